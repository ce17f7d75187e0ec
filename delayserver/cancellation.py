"""Core. Cancelling and rescheduling: messages found by id or key, decided, written to the log, answered.

A thread searches for the messages. The loop then decides without interruption, so the answer is still true when the
frame is written: a message planned for a broker group by then counts as sent. The answer leaves when both disks have
the decision.

A search for one message may take as long as for thousands, and reading due messages needs the same threads. So one
search runs at a time, and requests that arrive meanwhile share the next one. Decisions are made in steps of some
requests; a step's cancels of a subject are one frame, and other work runs between steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qmq.codec import decode_envelope, decode_properties
from qmq.delayserver.decisions import Counters, Decisions
from qmq.delayserver.schedule import RECORD, Candidate, DamagedSchedule, Schedule, State, id_hash, key_hash
from qmq.delayserver.schedule.record import Messages, Records, read_messages
from qmq.delayserver.upkeep import ScheduleFiler
from qmq.errors import CorruptFrame, InvalidMessage, LogError, NotMaster, NotServed, Overloaded, QmqError
from qmq.log import MessageLog
from qmq.message import DELAY_KEY
from qmq.rations import Ration
from qmq.remoting.commands import DelayState
from qmq.replication.mastership import Mastership

log = logging.getLogger(__name__)

LOOKS_MAX = 5
"""Searches per request. A search is repeated if a message was written elsewhere meanwhile."""
NAMES_MAX = 5_000
"""Names in one search: each message found is read, and gathering 5,000 requests takes the loop 5 ms."""
DECIDED_AT_ONCE = 200
"""Requests and found messages in one step of decisions: 2 to 3 ms."""
MOVED_BYTES = 1 << 20
"""Bytes of messages in one frame that moves them; any number of messages may share a key."""
CANCELLED_MAX = 65_536
"""Messages cancelled by one frame: a mebibyte."""
ASKED_MAX = 10_000
"""Requests waiting at the same time."""


class Named(NamedTuple):
    """Names of messages. `due_ms` is a hint where to search first; 0: no hint."""

    subject: str
    ids: Sequence[str] = ()
    keys: Sequence[str] = ()
    due_ms: int = 0


class _Found(NamedTuple):
    """Message with a requested name: position of the name, record, state, and bytes if they are readable."""

    name: int
    number: int
    id_hash: int
    record: Any
    state: State
    message: bytes


Fates = Callable[[list[DelayState] | QmqError], None]
"""Takes the fate of each name, ids first, then keys."""
States = dict[int, State]
"""Number -> state of the message; none if its segment was deleted, because everything in it was done."""


class _Asked(NamedTuple):
    """A request. `due_ms`: new due time of the messages; None: cancel them. `ration`: write budget of the caller."""

    named: Named
    due_ms: int | None
    ration: Ration
    answer: Fates
    id_hashes: list[int]
    key_hashes: list[int]
    looks: int = LOOKS_MAX


class _Looked(NamedTuple):
    """Result of a search in a schedule that contained all frames before `filed_end`."""

    schedule: Schedule
    filed_end: int
    asked: _Asked
    found: list[_Found]


class Cancellations:
    """Handler of cancel and reschedule requests. Made by the master; ends with the mastership."""

    def __init__(self, mastership: Mastership, filing: ScheduleFiler, decisions: Decisions, counters: Counters) -> None:
        self._mastership = mastership
        self._filing = filing
        self._decisions = decisions
        self._counters = counters
        self._asked: deque[_Asked] = deque()
        self._is_looking = False
        self.looked: deque[_Looked] = deque()
        self._cancelled: dict[str, dict[int, Any]] = {}
        """Subject -> number -> record: cancelled in this step, not written yet."""

    def cancel(self, named: Named, answer: Fates) -> None:
        """Cancel the pending messages with these names."""
        self._ask(named, None, Ration(), answer)

    def reschedule(self, named: Named, due_ms: int, ration: Ration, answer: Fates) -> None:
        """Move the pending messages with these names to `due_ms`, within the write budget of `ration`."""
        self._ask(named, due_ms, ration, answer)

    def step_down(self) -> None:
        """End the mastership: refuse all requests, which go to the next master."""
        asked, self._asked = [*(request.asked for request in self.looked), *self._asked], deque()
        self.looked.clear()
        _refuse(asked, NotMaster(f"{self._mastership.group} has a newer master: fetch the route again"))

    # Searching.

    def _ask(self, named: Named, due_ms: int | None, ration: Ration, answer: Fates) -> None:
        self._mastership.check_has_begun()
        self._mastership.readonly.check_change(self._mastership.group, named.subject)
        if len(self._asked) + len(self.looked) >= ASKED_MAX:
            raise Overloaded(f"{ASKED_MAX} requests to cancel or reschedule wait already")
        hashes = [*map(id_hash, named.ids)], [*map(key_hash, named.keys)]
        self._asked.append(_Asked(named, due_ms, ration, answer, *hashes))
        self._look_next()

    def _look_next(self) -> None:
        while self._asked and not self._is_looking:
            together = self._next()
            try:
                self._look(together)
            except QmqError as error:
                _refuse(together, error)

    def _next(self) -> list[_Asked]:
        """Take the requests of the next search, at least one."""
        together, names = list[_Asked](), 0
        while self._asked:
            named = self._asked[0].named
            names += len(named.ids) + len(named.keys)
            if together and names > NAMES_MAX:
                break
            together.append(self._asked.popleft())
        return together

    def _look(self, together: list[_Asked]) -> None:
        mastership = self._mastership
        mastership.check_has_begun()
        self._file_all()
        schedule = self._filing.schedule
        message_log = mastership.log
        look = _Look(together, schedule, message_log.start)
        filed_end, self._is_looking = schedule.filed_end, True

        def done(result: list[list[_Found]] | LogError) -> None:
            self._is_looking = False
            try:
                if isinstance(result, LogError):
                    _refuse(together, self._error_for_callers(result, schedule))
                else:
                    self.looked.extend(map(partial(_Looked, schedule, filed_end), together, result))
                    self.go_on()
            finally:
                self._look_next()

        mastership.host.read(partial(look, message_log), done)

    def _error_for_callers(self, problem: QmqError, schedule: Schedule) -> QmqError:
        """Return the error for the callers; damage is reported for repair."""
        if isinstance(problem, CorruptFrame):
            self._mastership.found_damage(problem)
            return NotServed("this copy is damaged and being repaired; repeat in a moment")
        if isinstance(problem, DamagedSchedule):
            self._filing.rebuild_damaged(schedule, problem)
            return NotServed("the schedule is being rebuilt; repeat in a moment")
        return problem

    def _file_all(self) -> None:
        """File everything on this disk: then the schedule's states are exact, and the decisions cover later frames."""
        flushed_end = self._mastership.log.flushed_end
        self._filing.go_on(flushed_end)
        self._decisions.filed(self._filing.schedule.filed_end)
        if not self._filing.reaches(flushed_end):
            raise NotServed("this delay server still files older frames; repeat in a moment")

    # Deciding.

    def go_on(self) -> None:
        """Decide about some of the found messages; the next pass continues."""
        some, size = list[_Looked](), 0
        while self.looked and size < DECIDED_AT_ONCE:
            some.append(self.looked.popleft())
            size += 1 + len(some[-1].found)
        if self.looked:
            self._mastership.host.pass_soon()
        if not some:
            return
        schedule = self._filing.schedule
        try:
            self._mastership.check_may_progress()
            self._file_all()
            schedule = self._filing.schedule
            now = schedule.states_of(_records(found for request in some for found in request.found))
        except QmqError as error:
            _refuse([request.asked for request in some], self._error_for_callers(error, schedule))
            return
        self._decide(some, now)

    def _decide(self, some: list[_Looked], now: States) -> None:
        """Write the decisions, and answer when both disks have them."""
        answers = list[tuple[Fates, list[DelayState]]]()
        for looked in some:
            asked = looked.asked
            try:
                self._mastership.readonly.check_change(self._mastership.group, asked.named.subject)
                if looked.schedule is not self._filing.schedule:
                    raise NotServed("the schedule is being rebuilt; repeat in a moment")
                if asked.due_ms is not None:
                    self._write_cancelled()  # so nothing is moved that was cancelled in this step
                if not self._is_behind(looked, now):
                    answers.append((asked.answer, self._fates(looked, now)))
                elif asked.looks > 1:
                    self._asked.append(asked._replace(looks=asked.looks - 1))
                else:
                    raise NotServed("this message is being moved; repeat in a moment")
            except QmqError as error:
                asked.answer(error)
        self._write_cancelled()
        self._when_safe(answers)
        self._look_next()

    def _is_behind(self, looked: _Looked, now: States) -> bool:
        """Return whether a search must be repeated: a found message was written elsewhere meanwhile, or an unfiled
        frame decides about it.

        The search covers messages filed by `filed_end`, but reads their states a little later.
        """
        found, names = looked.found, self._decisions.names
        if looked.filed_end < self._decisions.moved_end:
            newest = {(candidate.name, candidate.id_hash): candidate for candidate in sorted(found, key=_number)}
            if any(candidate.state == State.MOVED for candidate in newest.values()):
                return True
        return any(
            names(candidate.number) or (now.get(candidate.number) == State.MOVED and candidate.state != State.MOVED)
            for candidate in found
        )

    def _fates(self, looked: _Looked, now: States) -> list[DelayState]:
        """Return the fate of each name; pending messages are cancelled or moved."""
        named, found = looked.asked.named, looked.found
        fates = [DelayState.UNKNOWN] * (len(named.ids) + len(named.keys))
        pending: dict[int, _Found] = {}
        last: dict[tuple[int, int], _Found] = {}
        """The last entry of each message: a broker may have refused an earlier one that counts as sent."""
        for candidate in sorted(found, key=_number):
            if candidate.message and now.get(candidate.number) == State.PENDING:
                pending[candidate.number] = candidate
            else:
                last[candidate.name, candidate.id_hash] = candidate
        for candidate in last.values():
            if (fate := _past(now.get(candidate.number))) is not None and fates[candidate.name] is not DelayState.SENT:
                fates[candidate.name] = fate
        if not pending:
            return fates
        fate = self._cancel(named, pending) if looked.asked.due_ms is None else self._move(looked.asked, pending)
        for candidate in found:
            if candidate.number in pending:
                fates[candidate.name] = fate
        return fates

    def _cancel(self, named: Named, pending: dict[int, _Found]) -> DelayState:
        records = self._cancelled.setdefault(named.subject, {})
        records.update((number, candidate.record) for number, candidate in pending.items())
        return DelayState.CANCELLED

    def _write_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, {}
        for subject, by_number in cancelled.items():
            all_records = _joined(by_number.values())
            for begin in range(0, len(all_records), CANCELLED_MAX):
                records = all_records[begin : begin + CANCELLED_MAX]
                self._filing.schedule.decided(self._decisions.cancel(subject, records), records)
            self._counters.cancelled_messages += len(all_records)

    def _move(self, asked: _Asked, pending: dict[int, _Found]) -> DelayState:
        assert asked.due_ms is not None
        asked.ration.write(sum(len(candidate.message) for candidate in pending.values()))
        for some in _parts(pending.values()):
            messages, records = [candidate.message for candidate in some], _records(some)
            frame = self._decisions.carry(asked.named.subject, records, messages, [asked.due_ms] * len(messages))
            self._filing.schedule.decided(frame, records)
        self._counters.rescheduled_messages += len(pending)
        return DelayState.RESCHEDULED

    def _when_safe(self, answers: list[tuple[Fates, list[DelayState]]]) -> None:
        def safe(error: QmqError | None) -> None:
            for answer, fates in answers:
                answer(fates if error is None else error)

        self._mastership.gate.stored(self._mastership.log.end, safe)


class _Look:
    """One search for several requests; made on the loop, called on a thread. `log_start`: start of the log when
    made.
    """

    def __init__(self, together: Sequence[_Asked], schedule: Schedule, log_start: int) -> None:
        self._together = [request.named for request in together]
        self._log_start = log_start
        self._subjects = [schedule.position(named.subject) for named in self._together]
        self._ids = [(at, place) for at, named in enumerate(self._together) for place in range(len(named.ids))]
        self._keys = [(at, place) for at, named in enumerate(self._together) for place in range(len(named.keys))]
        self._find = schedule.find(
            None,
            [hash for request in together for hash in request.id_hashes],
            [hash for request in together for hash in request.key_hashes],
            [named.due_ms for named in self._together if named.due_ms > 0],
        )

    def __call__(self, message_log: MessageLog) -> list[list[_Found]]:
        """Return the messages found for each request; raises LogError."""
        found: list[list[_Found]] = [[] for _ in self._together]
        self._add(found, self._find.near(), message_log, {*range(len(found))})
        missing = {at for at, named in enumerate(self._together) if not _are_all_there(named, found[at])}
        if missing:
            self._add(found, self._find.far(), message_log, missing)
        return found

    def _add(
        self, found: list[list[_Found]], candidates: list[Candidate], message_log: MessageLog, wanted: set[int]
    ) -> None:
        """Keep candidates with a matching name, not just its hash, for the requests in `wanted`."""
        for by_key, index, record, state in candidates:
            at, place = self._keys[index] if by_key else self._ids[index]
            if at not in wanted or int(record["subject"]) != self._subjects[at]:
                continue
            named = self._together[at]
            name = place + len(named.ids) if by_key else place
            message = _read(message_log, record)
            if message is None:
                # The log has deleted it, so only its hash can match. If deleted since the search began, a pending one
                # was moved.
                if state in (State.SENT, State.CANCELLED) or int(record["number"]) >= self._log_start:
                    found[at].append(_found(name, record, state, b""))
            elif _has_name(message, named, by_key, place):
                found[at].append(_found(name, record, state, message))


def _found(name: int, record: Any, state: State, message: bytes) -> _Found:
    return _Found(name, int(record["number"]), int(record["id_hash"]), record, state, message)


def _are_all_there(named: Named, found: Sequence[_Found]) -> bool:
    """Return whether each name has one message, all of them pending. A sent or moved message may exist elsewhere too,
    and a key may have several messages.
    """
    return not named.keys and len({candidate.name for candidate in found if candidate.state == State.PENDING}) == len(
        named.ids
    )


def _read(message_log: Any, record: Any) -> bytes | None:
    """Read a message; None if retention deleted it."""
    if record["number"] < message_log.start:
        return None
    wanted = Messages([int(record["number"])], [int(record["size"])], [int(record["crc"])])
    try:
        return read_messages(message_log, wanted)[0]
    except CorruptFrame:
        if record["number"] < message_log.start:
            return None
        raise


def _has_name(message: bytes, named: Named, by_key: bool, index: int) -> bool:
    try:
        envelope = decode_envelope(message)
        if not by_key:
            return envelope.id == named.ids[index]
        return decode_properties(message).get(DELAY_KEY) == named.keys[index]
    except InvalidMessage:
        return False


def _parts(found: Iterable[_Found]) -> Iterator[list[_Found]]:
    """Split messages into the contents of frames, at least one message each."""
    part, size = list[_Found](), 0
    for candidate in found:
        if part and size + len(candidate.message) > MOVED_BYTES:
            yield part
            part, size = [], 0
        part.append(candidate)
        size += len(candidate.message)
    if part:
        yield part


def _number(found: _Found) -> int:
    return found.number


def _past(state: State | None) -> DelayState | None:
    """Return the fate of a message that does not pend; None: it was written again elsewhere."""
    if state == State.CANCELLED:
        return DelayState.CANCELLED
    return None if state == State.MOVED else DelayState.SENT


def _records(found: Iterable[_Found]) -> Records:
    return _joined(candidate.record for candidate in found)


def _joined(records: Iterable[Any]) -> Records:
    return np.frombuffer(b"".join(record.tobytes() for record in records), RECORD)


def _refuse(asked: Iterable[_Asked], error: QmqError) -> None:
    for request in asked:
        request.answer(error)
