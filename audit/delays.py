"""Core. Promises of delay servers: never early, at most once, truly cancelled, and no delayed message unaccounted for.

Facts of kind `delayed`, one row per message that a frame decides about; `text` is one of

    dispatch    planned for a broker group; first: message number, last: due time, value: the master's clock,
                chain: producer id, total: batch number
    gone        cancelled, or written again under another number; first: message number
    stored, not_stored   outcome of a batch at its broker group; chain, total

Each message is in one state:

    taken = stored + under way + cancelled + replaced + pending + unsent

A delay group takes a message by storing it, or by writing it again in place of another. Under way: the outcome of its
batch is unknown, for `UNSENT_MS` at most. Unsent: due for that long, and in no other state. Batches acknowledged by a
target must be in that group's log; they are found by producer id and batch number.

    delays     the table `delays` of one delay group (audit.tables)
    frames     the table `frames` of the broker groups that it sends to
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from qmq.audit.findings import HOUR_MS, FindingKind, JudgeRow, finding
from qmq.audit.headers import NUMBER_MAX
from qmq.codec import Buffer
from qmq.log.delay_frames import Outcome, decode_dispatch, decode_places, decode_settled
from qmq.log.frame import Frame, FrameKind


def facts_of(frame: Frame, body: Buffer) -> Iterator[dict[str, Any]]:
    """Yield the decisions in a frame of a delay server's log. Raise ValueError if its body is invalid."""
    about: dict[str, Any] = {"kind": "delayed", "offset": frame.offset, "end": frame.end, "subject": frame.subject}
    if frame.kind == FrameKind.DISPATCH:
        numbers = {"value": frame.timestamp_ms, "chain": f"{frame.producer:016x}", "total": frame.batch}
        for number, due_ms in decode_dispatch(body, frame.count)[1]:
            yield about | numbers | {"text": "dispatch", "first": number, "last": due_ms}
    elif frame.kind == FrameKind.SETTLED:
        for producer, batch, outcome in decode_settled(body, frame.count):
            text = "stored" if outcome == Outcome.STORED else "not_stored"
            yield about | {"text": text, "chain": f"{producer:016x}", "total": batch}
    else:
        for number, _ in decode_places(body, frame.count):
            if number:  # 0: it replaces no message
                yield about | {"text": "gone", "first": number}


class DelayJudge:
    """Judges the decisions about one bucket of message numbers; takes lists of facts."""

    def __init__(self) -> None:
        self._planned: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._gone: dict[int, int] = {}
        """message number -> offset of its first cancel or rewrite"""
        self._stored: dict[tuple[str, int], int] = {}
        """batch -> offset of the frame that settles it"""

    def take(self, piece: int, facts: list[dict[str, Any]]) -> Iterator[JudgeRow]:
        for fact in facts:
            if fact["text"] == "stored":
                self._stored.setdefault((fact["chain"], fact["total"]), fact["offset"])
            elif fact["text"] == "not_stored":
                continue
            elif fact["text"] == "gone":
                self._gone.setdefault(fact["first"], fact["offset"])
            else:
                self._planned.setdefault((fact["subject"], fact["first"]), []).append(fact)
                if fact["value"] < fact["last"]:
                    yield _finding(
                        fact, FindingKind.EARLY, f"planned {fact['last'] - fact['value']} ms before it was due"
                    )

    def finish(self) -> Iterator[JudgeRow]:
        for (_, number), planned in sorted(self._planned.items()):
            stored = [self._stored[key] for plan in planned if (key := (plan["chain"], plan["total"])) in self._stored]
            if len(stored) > 1:
                yield _finding(planned[-1], FindingKind.TWICE, f"stored in {len(stored)} batches")
            elif stored and planned[-1]["offset"] > stored[0]:
                yield _finding(planned[-1], FindingKind.TWICE, f"planned again, though it was stored at {stored[0]}")
            gone = self._gone.get(number)
            for plan in planned:
                if gone is not None and plan["offset"] > gone:
                    yield _finding(
                        plan, FindingKind.RECALLED, f"planned after it was cancelled or written again at {gone}"
                    )


class BatchJudge:
    """Finds batches without a plan: each lane numbers its batches from 1 on, without holes. Takes lists of facts.

    Args:
        is_whole: whether the log is judged from its begin; else a lane's first known batch may be any.
    """

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._planned: dict[str, dict[int, dict[str, Any]]] = {}
        self._settled: dict[str, dict[int, dict[str, Any]]] = {}

    def take(self, piece: int, facts: list[dict[str, Any]]) -> Iterator[JudgeRow]:
        for fact in facts:
            lanes = self._planned if fact["text"] == "dispatch" else self._settled
            lanes.setdefault(fact["chain"], {}).setdefault(fact["total"], fact)
        yield from ()

    def finish(self) -> Iterator[JudgeRow]:
        for lane in sorted(self._planned.keys() | self._settled.keys()):
            planned, settled = self._planned.get(lane, {}), self._settled.get(lane, {})
            last = 0 if self._is_whole else min(planned, default=1 << 64)
            for batch in sorted(planned.keys() | settled.keys()):
                missing = batch - last - (batch in planned)
                if missing > 0:
                    text = f"{missing} plans of lane {lane} are missing: batch {last + 1} and later ones"
                    shown = settled.get(last + 1, (planned | settled)[batch])
                    yield _finding(shown, FindingKind.UNPLANNED, text, seen=shown["offset"])
                last = max(last, batch)


def spread_batches(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of a piece for `BatchJudge`: one per batch and outcome."""
    batches = {(fact["text"], fact["chain"], fact["total"]): fact for fact in facts if fact["text"] != "gone"}
    return list(batches.values())


def _finding(fact: dict[str, Any], what: FindingKind, text: str, *, seen: int | None = None) -> JudgeRow:
    """Return a finding; `sequence` is the message number, which is its offset, or null if the fact has none."""
    fields = {name: fact[name] for name in ("offset", "end", "subject")}
    number = fact.get("first")
    return finding(what, text, seen=seen, sequence=None if number is None else min(number, NUMBER_MAX), **fields)


def spread_delayed(facts: list[dict[str, Any]], buckets: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (bucket, facts) of a piece for `DelayJudge`: by message number; facts of batches go to every bucket."""
    for bucket in range(buckets if facts else 0):
        yield bucket, [fact for fact in facts if fact["text"] == "stored" or fact.get("first", -1) % buckets == bucket]


DELAY_STATES = ("stored", "under_way", "cancelled", "replaced", "pending", "unsent")
UNSENT_MS = 3_600_000
"""Grace period: a group without master, or a full disk, delays messages until it recovers; longer is a finding."""
LATE_MS = 60_000
GIVEN_UP_MS = 10_000
"""Batches of unknown outcome are settled later than this: `unknown_ms` is 60 s by default."""
MESSAGES = 1
"""FrameKind.MESSAGES."""


def message_states(delays: DataFrame, now_ms: int) -> DataFrame:
    """Return each taken message with its state.

    out: subject string, number long, due_ms long, offset long, late_ms long (null unless sent), open_ms long (plan time
    of a batch with unknown outcome), targets array<string>: the broker group of that batch, or those of the subject's
    other messages, or null; state string.
    """
    planned = delays.where("event = 'planned'").select("number", "producer", "batch", "target", "timestamp_ms")
    settled = delays.where("event in ('stored', 'not_stored')").select("producer", "batch", F.col("event").alias("as"))
    tries = (
        planned.join(settled, ["producer", "batch"], "left")
        .groupBy("number")
        .agg(
            F.min(F.when(F.col("as") == "stored", F.col("timestamp_ms"))).alias("sent_ms"),
            F.max(F.when(F.col("as").isNull(), F.col("timestamp_ms"))).alias("open_ms"),
            F.max_by("target", "timestamp_ms").alias("target"),
        )
    )
    gone = delays.where("event in ('cancelled', 'replaced')").groupBy("number").agg(F.max("event").alias("gone"))
    usual = delays.where("event = 'planned'").groupBy("subject").agg(F.collect_set("target").alias("usual"))
    taken = delays.where("event = 'taken'").select("subject", "number", "due_ms", "offset")
    found = taken.join(tries, "number", "left").join(gone, "number", "left").join(F.broadcast(usual), "subject", "left")
    targets = F.when(F.col("open_ms").isNotNull(), F.array("target")).otherwise(F.col("usual"))
    state = (
        F.when(F.col("sent_ms").isNotNull(), "stored")
        .when(F.col("gone").isNotNull(), F.col("gone"))
        .when(F.col("open_ms") >= now_ms - UNSENT_MS, "under_way")
        .when(F.col("due_ms") >= now_ms - UNSENT_MS, "pending")
        .otherwise("unsent")
    )
    return found.select(
        "subject",
        "number",
        "due_ms",
        "offset",
        (F.col("sent_ms") - F.col("due_ms")).alias("late_ms"),
        "open_ms",
        targets.alias("targets"),
        state.alias("state"),
    )


def account_per_hour(found: DataFrame) -> DataFrame:
    """Return the equation per subject and hour of the due time: the number of messages in each state.

    in: `message_states`; out: subject string, hour timestamp, taken long, a long for each of DELAY_STATES, late long
    (sent more than LATE_MS after the due time), late_ms_max long.
    """
    hour = F.timestamp_millis(F.floor(F.col("due_ms") / HOUR_MS) * HOUR_MS).alias("hour")
    counts = [F.count_if(F.col("state") == state).alias(state) for state in DELAY_STATES]
    late = F.count_if(F.col("late_ms") > LATE_MS).alias("late")
    return found.groupBy("subject", hour).agg(
        F.count("*").alias("taken"), *counts, late, F.max("late_ms").alias("late_ms_max")
    )


def unsent_messages(found: DataFrame) -> DataFrame:
    """Return messages due long ago and never sent.

    in: `message_states`; out: subject string, sequence long (message number), offset long, text string, targets
    array<string>.
    """
    due = F.concat(F.lit("due at "), _moment(F.col("due_ms")))
    planned = F.concat(
        F.lit(", planned for "),
        F.col("targets")[0],
        F.lit(" at "),
        _moment(F.col("open_ms")),
        F.lit(", and what became of that is unknown"),
    )
    text = F.concat(due, F.coalesce(planned, F.lit(", and neither sent nor cancelled")))
    return found.where("state = 'unsent'").select(
        "subject", F.col("number").alias("sequence"), "offset", text.alias("text"), "targets"
    )


def early_messages(delays: DataFrame) -> DataFrame:
    """Return messages planned before their own due time, regardless of the due time in the plan.

    in: `message_states`; out: as `unsent_messages`, without targets.
    """
    planned = delays.where("event = 'planned'").select(
        "subject", F.col("number").alias("sequence"), "offset", F.col("due_ms").alias("said_ms"), "timestamp_ms"
    )
    taken = delays.where("event = 'taken'").select(F.col("number").alias("sequence"), "due_ms")
    found = planned.join(taken, "sequence").where("timestamp_ms < due_ms and said_ms != due_ms")
    text = F.format_string("planned %d ms before it is due by itself", F.col("due_ms") - F.col("timestamp_ms"))
    return found.select("subject", "sequence", "offset", text.alias("text"))


def waits_for(closed: Collection[str]) -> Column:
    """Return whether all `targets`, at least one, are among these closed broker groups."""
    if not closed:
        return F.lit(False)
    are_closed = F.forall("targets", lambda name: name.isin(list(closed)))
    return F.coalesce((F.size("targets") > 0) & are_closed, F.lit(False))


def absent_batches(delays: DataFrame, frames: DataFrame, since: DataFrame) -> DataFrame:
    """Return batches that a broker group acknowledged and its log lacks.

    Batches planned before the oldest frame of that log are left out. in: since: target string, since_ms long; out: as
    `unsent_messages`, of the first message.
    """
    stored = delays.where("event = 'stored'").select("producer", "batch").distinct()
    batches = (
        delays.where("event = 'planned'")
        .groupBy("target", "subject", "producer", "batch", "offset")
        .agg(F.min("number").alias("sequence"), F.count("*").alias("messages"), F.min("timestamp_ms").alias("at_ms"))
    )
    due = batches.join(stored, ["producer", "batch"]).join(since, "target").where("at_ms > since_ms")
    kept = (
        frames.where(f"kind = {MESSAGES}").select(F.col("broker_group").alias("target"), "producer", "batch").distinct()
    )
    text = F.format_string(
        "%d messages, batch %d of producer %s: acknowledged, and not in the log of %s",
        "messages",
        "batch",
        "producer",
        "target",
    )
    return due.join(kept, ["target", "producer", "batch"], "left_anti").select(
        "subject", "sequence", "offset", text.alias("text")
    )


def denied_batches(delays: DataFrame, frames: DataFrame) -> DataFrame:
    """Return batches recorded as not stored, and in the log of their broker group.

    A delay server gives up a batch without an answer after `unknown_ms`, and its messages go to another group. A
    refusal recorded sooner was a broker's answer. out: as `absent_batches`, and numbers array<long>: its messages.
    """
    refused = delays.where("event = 'not_stored'").select(
        "producer", "batch", F.col("timestamp_ms").alias("settled_ms")
    )
    batches = (
        delays.where("event = 'planned'")
        .join(refused, ["producer", "batch"])
        .where(F.col("settled_ms") < F.col("timestamp_ms") + GIVEN_UP_MS)
        .groupBy(F.col("target").alias("broker_group"), "subject", "producer", "batch", "offset")
        .agg(F.collect_set("number").alias("numbers"))
    )
    text = F.format_string(
        "%d messages, batch %d of producer %s: recorded as not stored, and in the log of %s",
        F.size("numbers"),
        "batch",
        "producer",
        "broker_group",
    )
    stored = frames.where(f"kind = {MESSAGES}").select("broker_group", "producer", "batch")
    return batches.join(stored, ["broker_group", "producer", "batch"], "left_semi").select(
        "subject", F.array_min("numbers").alias("sequence"), "offset", text.alias("text"), "numbers"
    )


def _moment(ms: Column) -> Column:
    return F.date_format(F.timestamp_millis(ms), "yyyy-MM-dd HH:mm:ss")
