"""Shell. Account of the messages of delay groups, in their own logs and in those of their targets
(`qmq.audit.delays`).

    fact of key    payload
    batches:N      events of one bucket of batches: plans, outcomes, and batches in the targets' logs
    numbers:N      events of one bucket of message numbers, and plans with their outcome
    found          findings about batches
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from qmq.audit.copies import CannotRead, Copy, folder_of, open_copy
from qmq.audit.data_source import Part, TableReader
from qmq.audit.delays import (
    DELAY_STATES,
    DELAYED_HOUR,
    EVENTS,
    TRIES,
    Waiting,
    account_per_hour,
    early_messages,
    message_states,
    tries_of,
    unsent_finding,
    unsent_messages,
)
from qmq.audit.executors import Executors, Failed, Rows, Stage
from qmq.audit.facts import ALL
from qmq.audit.findings import FINDING, FINDINGS_MAX, MORE, FindingKind, Row
from qmq.audit.plan import Fact, Judged
from qmq.audit.selection import CLOCK_MS
from qmq.audit.walk import HEADER_BYTES_MAX
from qmq.errors import CorruptFrame
from qmq.log.delay_frames import SCHEDULE_FOLDER
from qmq.log.frame import FrameKind, decode_header
from qmq.types import Role

SUBJECTS_MAX = 5_000
BUCKET_BYTES = 256 << 20
"""Log bytes of a delay group per judge: 250,000 messages of 1 KiB, with 100 bytes of memory each."""
_DELAYS = frozenset({Role.DELAY_MASTER, Role.DELAY_SLAVE})
_COUNTS = ("taken", *DELAY_STATES, "late")
_ACCOUNT, _WAITING, _FOUND = "account", "waiting", "found"
_BATCHES, _NUMBERS = "batches:", "numbers:"


class Source(NamedTuple):
    """One copy of a broker group's log."""

    group: str
    place: Mapping[str, str]


class Account(NamedTuple):
    """Equation per subject, findings {what, subject, sequence, offset, text}, and notes about waiting messages.

    `more`: findings per kind that are counted but not listed.
    """

    rows: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    notes: list[str]
    more: dict[str, int]


class Step(NamedTuple):
    """A part of one log, for a task. `group`: the target's broker group; None for the delay group's own log."""

    options: Mapping[str, str]
    part: Part
    group: str | None
    buckets: int


def is_delay_group(place: Mapping[str, str]) -> bool:
    """Return whether a copy is a delay server's; raise CannotRead."""
    if path := place.get("path"):
        return (folder_of(Path(path)).parent / SCHEDULE_FOLDER).is_dir()
    with closing(open_copy(place)) as copy:
        return copy.owner().role in _DELAYS


def account_for(
    executors: Executors,
    delays: Source,
    targets: Sequence[Source],
    *,
    now_ms: int,
    store: Callable[[Rows], None] | None = None,
    closed: Mapping[str, Sequence[str]] | None = None,
) -> Account:
    """Account for each delayed message of a delay group at `now_ms`.

    Args:
        targets: logs of broker groups; batches for other groups are not checked.
        store: takes the equations per subject and hour.
        closed: reasons of readonly groups; messages waiting for them are a note.

    Raises:
        CannotRead: a log cannot be read.
    """
    with ExitStack() as held:
        size = _size(held.enter_context(closing(open_copy(delays.place))))
        steps = [*_steps(delays.place, {"rows": "delays"}, None, size // BUCKET_BYTES + 1)]
        planned = _planned(executors.of(size).run(_plans_in, steps))
        kept: dict[str, int] = {}
        for source in targets:
            if (
                first_ms := min((at for (_, name), at in planned.items() if name == source.group), default=None)
            ) is not None:
                copy = held.enter_context(closing(open_copy(source.place)))
                copy.hold()  # else a batch in a segment that retention deletes now would look lost
                kept[source.group] = _begin_of(source.group, copy)
                options = {"rows": "frames", "since": str(max(0, first_ms - CLOCK_MS))}
                size += _size(copy)
                steps += _steps(source.place, options, source.group, steps[0].buckets)
        waiting = _waiting(planned, closed or {})
        stages: list[Stage] = [partial(_settle, kept, steps[0].buckets), partial(_judge, now_ms, waiting)]
        judged = executors.of(size).fold([[step] for step in steps], _read, stages, store)
        return _account(judged, closed or {})


def _size(copy: Copy) -> int:
    log = copy.describe()
    return log.end - log.start


def _steps(place: Mapping[str, str], options: Mapping[str, str], group: str | None, buckets: int) -> Iterator[Step]:
    given = {**place, **options}
    for part in TableReader(given, []).partitions():
        assert isinstance(part, Part)
        yield Step(given, part, group, buckets)


def _begin_of(group: str, copy: Copy) -> int:
    """Return the time of a log's oldest frame plus CLOCK_MS; 0 if nothing was ever removed."""
    start = copy.describe().start
    if start == 0:
        return 0
    try:
        return decode_header(copy.window(start, HEADER_BYTES_MAX), 0, start, None).timestamp_ms + CLOCK_MS
    except (CorruptFrame, OSError) as error:
        raise CannotRead(f"the oldest frame of {group} cannot be read: {error}") from None


Planned = Mapping[tuple[str, str], int]
"""(subject, broker group) -> time of the first plan."""


def _plans_in(step: Step) -> Planned:
    found: dict[tuple[str, str], int] = {}
    for events in _events(step, ["event", "subject", "target", "stored_at"]):
        plans = events.filter(pc.equal(events["event"], "planned")).group_by(["subject", "target"])
        for row in plans.aggregate([("timestamp_ms", "min")]).to_pylist():
            key = row["subject"], row["target"]
            found[key] = min(row["timestamp_ms_min"], found.get(key, row["timestamp_ms_min"]))
    return found


def _planned(found: Iterable[Planned | Failed]) -> Planned:
    planned: dict[tuple[str, str], int] = {}
    for part in found:
        if isinstance(part, Failed):
            raise CannotRead(part.reason)
        for key, at_ms in part.items():
            planned[key] = min(at_ms, planned.get(key, at_ms))
    return planned


def _waiting(planned: Planned, closed: Mapping[str, Sequence[str]]) -> Waiting:
    usual: defaultdict[str, set[str]] = defaultdict(set)
    for subject, target in planned:
        usual[subject].add(target)
    idle = {subject: tuple(sorted(names)) for subject, names in usual.items() if names <= closed.keys()}
    return Waiting(frozenset(closed), idle)


def _events(step: Step, columns: list[str]) -> Iterator[pa.Table]:
    """Yield the events of a part, as EVENTS; columns that are not read are null."""
    reader = TableReader(step.options, columns)
    for batch in reader.read(step.part):
        rows = pa.table(batch)
        for name, number in (("stored_at", "timestamp_ms"), ("due_at", "due_ms")):
            if name in rows.schema.names:
                rows = rows.append_column(number, pc.divide(rows[name].cast(pa.int64()), 1000)).drop_columns([name])
        if step.group is not None:
            rows = rows.filter(pc.equal(rows["kind"], int(FrameKind.MESSAGES)))
            rows = rows.append_column("event", pa.repeat("logged", len(rows)))
            rows = rows.append_column("target", pa.repeat(step.group, len(rows)))
        given = [rows[name] if name in rows.schema.names else pa.nulls(len(rows), kind) for name, kind in _EVENT_TYPES]
        yield pa.table(given, names=EVENTS.names).cast(EVENTS)


_EVENT_TYPES = [(field.name, field.type) for field in EVENTS]
_OWN = ["event", "subject", "offset", "number", "due_at", "stored_at", "target", "producer", "batch"]
_LOGGED = ["kind", "producer", "batch"]
_BY_BATCH = pa.array(["planned", "stored", "not_stored", "logged"])


def _read(task: Sequence[Step]) -> Iterator[Fact]:
    """Yield the events of a task, by bucket."""
    for step in task:
        begin = step.part.extents[0].begin if step.part.extents else 0
        for events in _events(step, _OWN if step.group is None else _LOGGED):
            is_batch = pc.fill_null(pc.is_in(events["event"], _BY_BATCH), False)
            is_number = pc.and_(pc.is_valid(events["event"]), pc.invert(is_batch))
            for prefix, column, some in ((_BATCHES, "batch", is_batch), (_NUMBERS, "number", is_number)):
                for bucket, rows in _spread(events.filter(some), column, step.buckets):
                    yield 0, f"{prefix}{bucket}", begin, ALL, pickle.dumps(rows, 5)


def _spread(rows: pa.Table, column: str, buckets: int) -> Iterator[tuple[int, pa.Table]]:
    if buckets == 1:
        if len(rows):
            yield 0, rows
        return
    bucket = rows[column].to_numpy() % buckets
    for number in sorted(set(bucket.tolist())):
        yield number, rows.filter(pa.array(bucket == number))


def _by_key(facts: Iterable[Fact]) -> Iterator[tuple[str, list[Any]]]:
    for (_, key), group in groupby(facts, itemgetter(0, 1)):
        yield key, [pickle.loads(fact[4]) for fact in group]


def _settle(kept: Mapping[str, int], buckets: int, facts: Iterable[Fact]) -> Iterator[list[Fact]]:
    """Judge the batches, and pass each plan to the judge of its message. `kept`: as `since` of `tries_of`."""
    for key, tables in _by_key(facts):
        if key.startswith(_NUMBERS):
            yield [(0, key, 0, ALL, pickle.dumps(rows, 5)) for rows in tables]
            continue
        tries, found = tries_of(pa.concat_tables(tables), kept)
        yield [(0, _FOUND, 0, ALL, pickle.dumps((what, row), 5)) for what, row in found]
        spread = _spread(tries, "number", buckets)
        yield [(0, f"{_NUMBERS}{bucket}", 0, ALL, pickle.dumps(rows, 5)) for bucket, rows in spread]


def _judge(now_ms: int, waiting: Waiting, facts: Iterable[Fact]) -> Iterator[list[Judged]]:
    """Judge messages, and list findings and counts."""
    for key, payloads in _by_key(facts):
        if key == _FOUND:
            for what in (FindingKind.LOST, FindingKind.TWICE):
                yield _listed(what, [row for kind, row in payloads if kind == what])
            continue
        of_plans, of_events = (
            [rows for rows in payloads if ("sent_ms" in rows.column_names) == is_plan] for is_plan in (True, False)
        )
        events, tries = (
            pa.concat_tables([EVENTS.empty_table(), *of_events]),
            pa.concat_tables([TRIES.empty_table(), *of_plans]),
        )
        states = message_states(events, tries, now_ms)
        hours = [*account_per_hour(states)]
        yield [_row(DELAYED_HOUR, hour, is_listed=False) for hour in hours]
        yield [_row(_ACCOUNT, account) for account in _summed(hours)]
        unsent, waits_for = unsent_messages(states, waiting)
        yield [_row(_WAITING, {"targets": targets, "messages": times}) for targets, times in waits_for.items()]
        yield _listed(FindingKind.EARLY, [*early_messages(events, tries)])
        first = unsent.sort_by("number").slice(0, FINDINGS_MAX).to_pylist()
        yield _listed(FindingKind.UNSENT, [unsent_finding(row) for row in first], total=len(unsent))


def _listed(what: FindingKind, found: Sequence[Row], total: int = 0) -> list[Judged]:
    """Return the first findings of a kind as rows, and the number of further ones; `total`: of all, given or not."""
    first = sorted(found, key=itemgetter("sequence"))[:FINDINGS_MAX]
    more = max(total, len(found)) - len(first)
    return [_row(FINDING, row | {"what": what.value}) for row in first] + [_row(MORE, {what.value: more})]


def _row(kind: str, row: Row, *, is_listed: bool = True) -> Judged:
    return 0, ALL, kind, json.dumps(row), is_listed


def _summed(hours: Iterable[Row]) -> Iterable[Row]:
    """Return the sum of equations by subject."""
    found: dict[str, Row] = {}
    for row in hours:
        known = found.setdefault(row["subject"], {"subject": row["subject"]} | dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            known[name] += row[name]
        late = [at for at in (known.get("late_ms_max"), row["late_ms_max"]) if at is not None]
        known["late_ms_max"] = max(late, default=None)
    return found.values()


def _account(judged: Iterable[Judged], closed: Mapping[str, Sequence[str]]) -> Account:
    """Collect the rows of all judges."""
    accounts: list[Row] = []
    findings: dict[str, list[Row]] = {kind.value: [] for kind in _KINDS}
    more, waits_for = Counter[str](), Counter[tuple[str, ...]]()
    for _, _, kind, payload, _ in judged:
        row = json.loads(payload)
        if kind == _ACCOUNT:
            accounts.append(row)
        elif kind == _WAITING:
            waits_for[tuple(row["targets"])] += row["messages"]
        elif kind == MORE:
            more.update(row)
        else:
            findings[row["what"]].append(row)
    for what, rows in findings.items():
        rows.sort(key=itemgetter("sequence"))
        more[what] += len(rows[FINDINGS_MAX:])
        del rows[FINDINGS_MAX:]
    notes = []
    for targets, messages in sorted(waits_for.items()):
        names = "; ".join(f"{name} ({', '.join(closed[name])})" for name in targets)
        due = f"{messages} messages that were due an hour ago or earlier"
        notes.append(f"{due} wait for broker groups that accept none: {names}")
    listed = [row for rows in findings.values() for row in rows]
    accounts = sorted(_summed(accounts), key=itemgetter("subject"))[:SUBJECTS_MAX]
    return Account(accounts, listed, notes, dict(+more))


_KINDS = (FindingKind.EARLY, FindingKind.LOST, FindingKind.TWICE, FindingKind.UNSENT)
