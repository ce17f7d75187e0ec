"""Core. What a delay server planned and did, held against what it promises: never early, at most once, truly cancelled.

Facts of kind `delayed`, a row per message that a frame decides about, of one of these (`text`):

    dispatch    planned for a broker group: first: its number, last: when it was due, value: the master's clock then,
                chain: producer id, total: batch number
    gone        cancelled, or written again elsewhere under another number: first: its number
    stored      a batch was stored by its broker group: chain, total

That no delayed message is unaccounted for: each is in one state, and what was sent is in its target's log.

    taken = stored + under way + cancelled + replaced + pending + unsent

A message is taken when a delay group stores it, or writes it again in place of another one; under way while nobody
knows what became of the batch that it was planned for, for `UNSENT_MS` at most; unsent, if it was due so long ago and
is in no other state.
What a target acknowledged is looked for in that group's log, by producer id and batch number.

    delays     the table `delays` of one delay group (audit.tables)
    frames     the table `frames` of the broker groups that it sends to
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from qmq.audit.findings import FindingKind, JudgeRow, finding
from qmq.audit.headers import NUMBER_MAX
from qmq.codec import Buffer
from qmq.log.delay_frames import Outcome, decode_dispatch, decode_places, decode_settled
from qmq.log.frame import Frame, FrameKind


def facts_of(frame: Frame, body: Buffer) -> Iterator[dict[str, Any]]:
    """Return what a frame of a delay server's log decides. Raises ValueError if its body makes no sense."""
    about: dict[str, Any] = {"kind": "delayed", "offset": frame.offset, "end": frame.end, "subject": frame.subject}
    if frame.kind == FrameKind.DISPATCH:
        numbers = {"value": frame.timestamp_ms, "chain": f"{frame.producer:016x}", "total": frame.batch}
        for number, due_ms in decode_dispatch(body, frame.count)[1]:
            yield about | numbers | {"text": "dispatch", "first": number, "last": due_ms}
    elif frame.kind == FrameKind.SETTLED:
        for producer, batch, outcome in decode_settled(body, frame.count):
            if outcome == Outcome.STORED:
                yield about | {"text": "stored", "chain": f"{producer:016x}", "total": batch}
    else:
        for number, _ in decode_places(body, frame.count):
            if number:  # else it stands in place of nothing
                yield about | {"text": "gone", "first": number}


class DelayJudge:
    """Judges what a delay server decided about the messages whose numbers fall to it; takes lists of facts."""

    def __init__(self) -> None:
        self._planned: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._gone: dict[int, int] = {}
        """message's number -> where it was first cancelled, or written again"""
        self._stored: set[tuple[str, int]] = set()

    def take(self, piece: int, facts: list[dict[str, Any]]) -> Iterator[JudgeRow]:
        for fact in facts:
            if fact["text"] == "stored":
                self._stored.add((fact["chain"], fact["total"]))
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
            times = sum((plan["chain"], plan["total"]) in self._stored for plan in planned)
            if times > 1:
                yield _finding(planned[-1], FindingKind.TWICE, f"stored in {times} batches")
            gone = self._gone.get(number)
            for plan in planned:
                if gone is not None and plan["offset"] > gone:
                    yield _finding(
                        plan, FindingKind.RECALLED, f"planned after it was cancelled or written again at {gone}"
                    )


def _finding(fact: dict[str, Any], what: FindingKind, text: str) -> JudgeRow:
    """`sequence` is the message's number: the offset at which it lies."""
    fields = {name: fact[name] for name in ("offset", "end", "subject")}
    return finding(what, text, sequence=min(fact["first"], NUMBER_MAX), **fields)


def spread_delayed(facts: list[dict[str, Any]], buckets: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Return the facts of a piece for `DelayJudge` by bucket: by a message's number, those of batches in each."""
    for bucket in range(buckets if facts else 0):
        yield bucket, [fact for fact in facts if fact["text"] == "stored" or fact["first"] % buckets == bucket]


DELAY_STATES = ("stored", "under_way", "cancelled", "replaced", "pending", "unsent")
UNSENT_MS = 3_600_000
"""What a group without a master, or a full disk, held up is sent when that has ended; longer is worth a look."""
LATE_MS = 60_000
HOUR_MS = 3_600_000
MESSAGES = 1
"""The kind of a messages frame."""


def message_states(delays: DataFrame, now_ms: int) -> DataFrame:
    """Return each message that was taken, with its state.

    out: subject string, number long, due_ms long, offset long, late_ms long (null unless it was sent), open_ms long
    (when it was planned for a batch that nobody knows about), targets array<string>: the broker group of that batch,
    or those that messages of its subject went to; null if there was none; state string.
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
    """Return the equation: per subject and hour in which its messages were due, how many are in each state.

    in: `message_states`; out: subject string, hour timestamp, taken long, a long for each of DELAY_STATES, late long
    (sent more than LATE_MS after they were due), late_ms_max long.
    """
    hour = F.timestamp_millis(F.floor(F.col("due_ms") / HOUR_MS) * HOUR_MS).alias("hour")
    counts = [F.count_if(F.col("state") == state).alias(state) for state in DELAY_STATES]
    late = F.count_if(F.col("late_ms") > LATE_MS).alias("late")
    return found.groupBy("subject", hour).agg(
        F.count("*").alias("taken"), *counts, late, F.max("late_ms").alias("late_ms_max")
    )


def unsent_messages(found: DataFrame) -> DataFrame:
    """Return messages that were due long ago and never sent.

    in: `message_states`; out: subject string, sequence long (its number), offset long, text string,
    targets array<string>.
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
    """Return messages that were planned before they say themselves that they are due, whatever the plan says.

    out: as `unsent_messages`, without targets.
    """
    planned = delays.where("event = 'planned'").select(
        "subject", F.col("number").alias("sequence"), "offset", F.col("due_ms").alias("said_ms"), "timestamp_ms"
    )
    taken = delays.where("event = 'taken'").select(F.col("number").alias("sequence"), "due_ms")
    found = planned.join(taken, "sequence").where("timestamp_ms < due_ms and said_ms != due_ms")
    text = F.format_string("planned %d ms before it is due by itself", F.col("due_ms") - F.col("timestamp_ms"))
    return found.select("subject", "sequence", "offset", text.alias("text"))


def waits_for(closed: Collection[str]) -> Column:
    """Return whether `targets` are there, and are all of these broker groups."""
    if not closed:
        return F.lit(False)
    are_closed = F.forall("targets", lambda name: name.isin(list(closed)))
    return F.coalesce((F.size("targets") > 0) & are_closed, F.lit(False))


def absent_batches(delays: DataFrame, frames: DataFrame, since: DataFrame) -> DataFrame:
    """Return batches that a broker group acknowledged, and of which its log has no frame.

    Left out are those that were planned before the oldest frame that the group's log still has.
    in: since: target string, since_ms long; out: as `unsent_messages`, of the first message.
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


def _moment(ms: Column) -> Column:
    return F.date_format(F.timestamp_millis(ms), "yyyy-MM-dd HH:mm:ss")
