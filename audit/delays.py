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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from qmq.audit.findings import HOUR_MS, FindingKind, JudgeRow, Row, finding
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
    """Judge of the decisions about one bucket of message numbers; takes lists of facts."""

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
    """Judge of batches without a plan: each lane numbers its batches from 1 on, without holes. Takes lists of facts.

    A plan precedes the outcome of its batch. Under a number that was settled before, it is the plan of other messages.

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
            for batch in sorted(planned.keys() & settled.keys()):
                plan, outcome = planned[batch], settled[batch]
                if outcome["offset"] < plan["offset"]:
                    text = f"batch {batch} of lane {lane} was settled before its plan, which is at {plan['offset']}"
                    yield _finding(outcome, FindingKind.UNPLANNED, text, seen=outcome["offset"])


def spread_batches(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of a piece for `BatchJudge`: the first plan of each batch, and the first of each outcome."""
    batches: dict[tuple[str, str, int], dict[str, Any]] = {}
    for fact in facts:
        if fact["text"] != "gone":
            batches.setdefault((fact["text"], fact["chain"], fact["total"]), fact)
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
DELAYED_HOUR = "delayed_hour"
"""Kind of a judged row: subject, hour since 1970 UTC, taken, each of DELAY_STATES, late, late_ms_max."""

_BATCH = ["producer", "batch"]
EVENTS = pa.schema(
    [
        ("event", pa.string()),
        ("subject", pa.string()),
        ("offset", pa.int64()),
        ("number", pa.int64()),
        ("due_ms", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("target", pa.string()),
        ("producer", pa.string()),
        ("batch", pa.int64()),
    ]
)
"""Decisions, as in the table `delays`; and batches in the logs of broker groups (event `logged`), by target."""
TRIES = pa.schema(
    [*EVENTS, ("sent_ms", pa.int64()), ("open_ms", pa.int64()), ("is_denied", pa.bool_())],
)


class Waiting(NamedTuple):
    """Readonly broker groups, and the subjects that have only such groups."""

    closed: frozenset[str] = frozenset()
    subjects: Mapping[str, tuple[str, ...]] = {}


def tries_of(events: pa.Table, since: Mapping[str, int]) -> tuple[pa.Table, list[tuple[FindingKind, Row]]]:
    """Return the outcome of each plan in one bucket of batches, and findings about the batches.

    A batch that a broker group acknowledged must be in its log. A batch recorded as refused within GIVEN_UP_MS must not
    be there: that refusal was a broker's answer. A later one may stand for a batch without an answer, which is given up
    after `unknown_ms`.

    Args:
        events: EVENTS `planned`, `stored`, `not_stored` and `logged`.
        since: broker groups whose logs were read, with the time from which on they have all frames.

    Returns:
        Plans as TRIES. sent_ms: time of a plan whose batch was stored; open_ms: of one without an outcome; is_denied:
        whether the batch was refused and is in the log.
    """
    planned, logged = _only(events, "planned"), _only(events, "logged").select(["target", *_BATCH])
    stored, refused = (
        _only(events, event).group_by(_BATCH).aggregate([("timestamp_ms", "min")]).rename_columns([*_BATCH, name])
        for event, name in (("stored", "stored_ms"), ("not_stored", "refused_ms"))
    )
    logged = logged.group_by(["target", *_BATCH]).aggregate([])
    logged = logged.append_column("is_logged", pa.repeat(True, len(logged)))
    tries = planned.join(stored, _BATCH).join(refused, _BATCH).join(logged, ["target", *_BATCH])
    is_stored, is_refused, is_logged = (pc.is_valid(tries[name]) for name in ("stored_ms", "refused_ms", "is_logged"))
    at_ms, none = tries["timestamp_ms"], pa.scalar(None, pa.int64())
    soon = pc.fill_null(pc.less(tries["refused_ms"], pc.add(at_ms, GIVEN_UP_MS)), False)
    is_denied = pc.and_(pc.and_(is_refused, is_logged), soon)
    names, times = pa.array(list(since), pa.string()), pa.array(list(since.values()), pa.int64())
    kept = pc.take(times, pc.index_in(tries["target"], names))
    is_due = pc.and_(is_stored, pc.fill_null(pc.greater(at_ms, kept), False))
    found = [
        *_batches(tries.filter(pc.and_not(is_due, is_logged)), FindingKind.LOST, "acknowledged, and not in the log of"),
        *_batches(tries.filter(is_denied), FindingKind.TWICE, "recorded as not stored, and in the log of"),
    ]
    is_open = pc.invert(pc.or_(is_stored, is_refused))
    tries = tries.append_column("sent_ms", pc.if_else(is_stored, at_ms, none))
    tries = tries.append_column("open_ms", pc.if_else(is_open, at_ms, none)).append_column("is_denied", is_denied)
    return tries.select(TRIES.names).cast(TRIES), found


def _batches(tries: pa.Table, what: FindingKind, problem: str) -> Iterator[tuple[FindingKind, Row]]:
    """Yield a finding for each batch, at its first message."""
    by = ["target", "subject", "producer", "batch", "offset"]
    for row in tries.group_by(by).aggregate([("number", "min"), ("number", "count_distinct")]).to_pylist():
        text = f"{row['number_count_distinct']} messages, batch {row['batch']} of producer {row['producer']}: {problem}"
        about = {"subject": row["subject"], "sequence": row["number_min"], "offset": row["offset"]}
        yield what, about | {"text": f"{text} {row['target']}"}


def message_states(events: pa.Table, tries: pa.Table, now_ms: int) -> pa.Table:
    """Return each taken message with its state, in one bucket of message numbers.

    Args:
        events: EVENTS `taken`, `cancelled` and `replaced`.
        tries: as of `tries_of`.

    Returns:
        subject string, number long, due_ms long, offset long, late_ms long (null unless sent), open_ms long (time of a
        plan without an outcome), target string (of the last plan), is_denied bool, state string.
    """
    last = tries.sort_by("timestamp_ms").group_by("number", use_threads=False)
    plans = last.aggregate([("sent_ms", "min"), ("open_ms", "max"), ("target", "last"), ("is_denied", "max")])
    plans = plans.rename_columns(["number", "sent_ms", "open_ms", "target", "is_denied"])
    gone = pa.concat_tables([_only(events, "cancelled"), _only(events, "replaced")])
    gone = gone.group_by("number").aggregate([("event", "max")]).rename_columns(["number", "gone"])
    taken = _only(events, "taken").select(["subject", "number", "due_ms", "offset"])
    found = taken.join(plans, "number").join(gone, "number")
    since_ms = now_ms - UNSENT_MS
    cases = pc.make_struct(
        pc.is_valid(found["sent_ms"]),
        pc.is_valid(found["gone"]),
        pc.greater_equal(found["open_ms"], since_ms),
        pc.greater_equal(found["due_ms"], since_ms),
    )
    state = pc.case_when(cases, "stored", found["gone"], "under_way", "pending", "unsent")
    late = pc.subtract(found["sent_ms"], found["due_ms"])
    found = found.drop_columns(["sent_ms", "gone"])
    return found.append_column("late_ms", late).append_column("state", state)


def account_per_hour(found: pa.Table) -> Iterator[Row]:
    """Yield the equation per subject and hour of the due time: DELAYED_HOUR. in: `message_states`."""
    hour = pc.divide(found["due_ms"], HOUR_MS)
    columns = {"subject": found["subject"], "hour": hour, "late_ms_max": found["late_ms"]}
    columns |= {state: pc.equal(found["state"], state).cast(pa.int64()) for state in DELAY_STATES}
    columns["late"] = pc.fill_null(pc.greater(found["late_ms"], LATE_MS), False).cast(pa.int64())
    names = (*DELAY_STATES, "late")
    asked = [("state", "count"), *((name, "sum") for name in names), ("late_ms_max", "max")]
    table = pa.table(columns | {"state": found["state"]}).group_by(["subject", "hour"]).aggregate(asked)
    yield from table.rename_columns(["subject", "hour", "taken", *names, "late_ms_max"]).to_pylist()


def unsent_messages(found: pa.Table, waiting: Waiting) -> tuple[pa.Table, Counter[tuple[str, ...]]]:
    """Return messages due long ago and never sent, and the number of those that wait for closed broker groups.

    A refused batch that is in the log of its broker group is a finding of its own. in, and out: `message_states`.
    """
    unsent = found.filter(pc.equal(found["state"], "unsent"))
    is_open = pc.is_valid(unsent["open_ms"])
    closed = pc.is_in(unsent["target"], pa.array(list(waiting.closed), pa.string()))
    idle = pc.is_in(unsent["subject"], pa.array(list(waiting.subjects), pa.string()))
    waits = pc.if_else(is_open, closed, idle)
    waits_for: Counter[tuple[str, ...]] = Counter()
    groups = unsent.append_column("is_open", is_open).filter(waits).group_by(["subject", "target", "is_open"])
    for row in groups.aggregate([([], "count_all")]).to_pylist():
        waits_for[(row["target"],) if row["is_open"] else waiting.subjects[row["subject"]]] += row["count_all"]
    is_denied = pc.fill_null(unsent["is_denied"], False)
    return unsent.filter(pc.invert(pc.or_(waits, is_denied))), waits_for


def unsent_finding(row: Row) -> Row:
    """Return the finding about a message of `unsent_messages`."""
    text = f"due at {_moment(row['due_ms'])}"
    if row["open_ms"] is None:
        text += ", and neither sent nor cancelled"
    else:
        text += f", planned for {row['target']} at {_moment(row['open_ms'])}, and its outcome is unknown"
    return {"subject": row["subject"], "sequence": row["number"], "offset": row["offset"], "text": text}


def early_messages(events: pa.Table, tries: pa.Table) -> Iterator[Row]:
    """Yield findings about messages planned before their own due time, regardless of the due time in the plan."""
    taken = _only(events, "taken").select(["number", "due_ms"]).rename_columns(["number", "own_ms"])
    found = tries.join(taken, "number", join_type="inner")
    early = pc.and_(pc.less(found["timestamp_ms"], found["own_ms"]), pc.not_equal(found["due_ms"], found["own_ms"]))
    for row in found.filter(early).to_pylist():
        text = f"planned {row['own_ms'] - row['timestamp_ms']} ms before it is due by itself"
        yield {"subject": row["subject"], "sequence": row["number"], "offset": row["offset"], "text": text}


def _only(events: pa.Table, event: str) -> pa.Table:
    return events.filter(pc.equal(events["event"], event))


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
