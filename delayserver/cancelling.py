"""Core. Messages that are not to be sent after all, or at another time: found, decided, written down, answered truly.

Whoever asks names messages by id or by a key of his own. They are looked for on a thread; then it is decided on the
loop, where nothing happens in between, so that the answer is true when it is written down: what is planned for a broker
group by then counts as sent. The answer leaves when both disks have the decision.

To look for one message may take as long as for ten thousand, and what is due is read by the same threads. So there is
one look at a time, and who asks meanwhile shares the next one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from qmq.codec import decode_envelope, decode_properties
from qmq.delayserver.counters import Counters
from qmq.delayserver.decisions import Decisions
from qmq.delayserver.filing import Filing
from qmq.delayserver.messages import Messages, Records, read_messages
from qmq.delayserver.schedule import Candidate, DamagedSchedule, Schedule, State, id_hash, key_hash
from qmq.errors import CorruptFrame, InvalidMessage, LogError, NotMaster, NotServed, Overloaded, QmqError
from qmq.log import MessageLog
from qmq.message import DELAY_KEY
from qmq.remoting.commands import DelayState
from qmq.replication.mastership import Mastership

log = logging.getLogger(__name__)

LOOKS_MAX = 5
"""How often messages are looked for that are written elsewhere meanwhile."""
NAMES_MAX = 10_000
"""That are looked for together: each that is found is read."""
ASKED_MAX = 10_000
"""Requests that wait at the same time."""


class Named(NamedTuple):
    """Messages that somebody names. `due_ms` says where to look first; 0: nobody knows."""

    subject: str
    ids: Sequence[str] = ()
    keys: Sequence[str] = ()
    due_ms: int = 0


class _Found(NamedTuple):
    """A message that has the name: position of the name, the record, its bytes if it was readable and pends."""

    name: int
    record: Any
    state: State
    message: bytes


Fates = Callable[[list[DelayState] | QmqError], None]
"""Gets the fate of each name, ids first, then keys."""


class _Asked(NamedTuple):
    """A request; `decide` writes down what becomes of the messages that were found, and returns their fates."""

    named: Named
    decide: Callable[[Named, list[_Found]], list[DelayState]]
    answer: Fates
    looks: int = LOOKS_MAX


class Cancelling:
    """Made by the master; ends with the mastership."""

    def __init__(self, mastership: Mastership, filing: Filing, decisions: Decisions, counters: Counters) -> None:
        self._mastership, self._filing, self._decisions, self._counters = mastership, filing, decisions, counters
        self._asked: deque[_Asked] = deque()
        self._is_looking = False

    def cancel(self, named: Named, answer: Fates) -> None:
        """Cancel what these names mean and pends."""
        self._ask(_Asked(named, self._cancelled, answer))

    def reschedule(self, named: Named, due_ms: int, answer: Fates) -> None:
        """Let what these names mean and pends be due at `due_ms`."""
        self._ask(_Asked(named, partial(self._moved, due_ms=due_ms), answer))

    def step_down(self) -> None:
        """The mastership is over; who waits asks the next master."""
        asked, self._asked = self._asked, deque()
        for one in asked:
            one.answer(NotMaster(f"{self._mastership.group} has a newer master: fetch the route again"))

    # Looking.

    def _ask(self, asked: _Asked) -> None:
        self._mastership.check_has_begun()
        self._mastership.readonly.check(self._mastership.group, asked.named.subject)
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded(f"{ASKED_MAX} requests to cancel or reschedule wait already")
        self._asked.append(asked)
        self._go_on()

    def _go_on(self) -> None:
        while self._asked and not self._is_looking:
            together = self._next()
            try:
                self._look(together)
            except QmqError as error:
                for one in together:
                    one.answer(error)

    def _next(self) -> list[_Asked]:
        """Return who is looked for next: at least one."""
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
        look, message_log = _Look([one.named for one in together], schedule), mastership.log
        filed_end, self._is_looking = schedule.filed_end, True

        def done(result: list[list[_Found]] | LogError) -> None:
            self._is_looking = False
            try:
                self._looked(together, schedule, filed_end, result)
            finally:
                self._go_on()

        mastership.host.read(partial(look, message_log), done)

    def _looked(
        self, together: list[_Asked], schedule: Schedule, filed_end: int, result: list[list[_Found]] | LogError
    ) -> None:
        for at, asked in enumerate(together):
            try:
                if isinstance(result, LogError):
                    raise result
                self._mastership.check_may_progress()
                self._mastership.readonly.check(self._mastership.group, asked.named.subject)
                self._file_all()
                if schedule is not self._filing.schedule:
                    raise NotServed("the schedule is made anew; ask again in a moment")
                if not self._is_behind(result[at], filed_end):
                    self._when_safe(asked.decide(asked.named, result[at]), asked.answer)
                elif asked.looks > 1:
                    self._asked.append(asked._replace(looks=asked.looks - 1))
                else:
                    raise NotServed("this message is being written again; ask again in a moment")
            except CorruptFrame as problem:
                self._mastership.found_damage(problem)
                asked.answer(NotServed("this copy is damaged and being repaired; ask again in a moment"))
            except DamagedSchedule as problem:
                self._filing.is_damaged(schedule, problem)
                asked.answer(NotServed("the schedule is made anew; ask again in a moment"))
            except QmqError as error:
                asked.answer(error)

    def _file_all(self) -> None:
        """States are exact when the schedule has what is on our disk, and the decisions know the rest."""
        flushed_end = self._mastership.log.flushed_end
        self._filing.go_on(flushed_end)
        self._decisions.filed(self._filing.schedule.filed_end)
        if not self._filing.reaches(flushed_end):
            raise NotServed("this delay server reads what came before it began; ask again in a moment")

    def _is_behind(self, found: Sequence[_Found], filed_end: int) -> bool:
        """Return whether something happened to a message since it was looked for that has to be looked at again: it is
        written elsewhere now, or the schedule does not know yet what a frame decides about it.

        The look saw the messages that were filed by `filed_end`, but their states as they were a little later.
        """
        state_of = self._filing.schedule.state_of
        newest = {(one.name, int(one.record["id_hash"])): one for one in _by_number(found)}
        if filed_end < self._decisions.moved_end and any(one.state == State.MOVED for one in newest.values()):
            return True
        return any(
            self._decisions.names(int(one.record["number"]))
            or (one.state != State.MOVED and state_of(one.record) == State.MOVED)
            for one in found
        )

    # Deciding.

    def _pends(self, found: _Found) -> bool:
        return bool(self._filing.schedule.state_of(found.record) == State.PENDING)

    def _split(self, named: Named, found: Sequence[_Found]) -> tuple[list[_Found], list[DelayState]]:
        """Return what pends, each message once, and the fate of each name as far as nothing is changed."""
        fates = [DelayState.UNKNOWN] * (len(named.ids) + len(named.keys))
        pending: dict[int, _Found] = {}
        last: dict[tuple[int, int], _Found] = {}
        """What was written last of each message: a broker may have refused what counts as sent before."""
        for one in _by_number(found):
            if one.message and self._pends(one):
                pending[int(one.record["number"])] = one
            else:
                last[one.name, int(one.record["id_hash"])] = one
        for one in last.values():
            if (fate := self._past(one)) is not None and fates[one.name] is not DelayState.SENT:
                fates[one.name] = fate
        return list(pending.values()), fates

    def _past(self, found: _Found) -> DelayState | None:
        """What became of a message that does not pend; None: it was written again, and is found there."""
        state = self._filing.schedule.state_of(found.record)
        if state == State.CANCELLED:
            return DelayState.CANCELLED
        return None if state == State.MOVED else DelayState.SENT

    def _cancelled(self, named: Named, found: Sequence[_Found]) -> list[DelayState]:
        pending, fates = self._split(named, found)
        if pending:
            records = _records(pending)
            self._filing.schedule.decided(self._decisions.cancel(named.subject, records), records)
            self._counters.cancelled_messages += len(pending)
        return _with_fate(fates, found, pending, DelayState.CANCELLED)

    def _moved(self, named: Named, found: Sequence[_Found], due_ms: int) -> list[DelayState]:
        pending, fates = self._split(named, found)
        if pending:
            messages = [one.message for one in pending]
            records = _records(pending)
            frame = self._decisions.carry(named.subject, records, messages, [due_ms] * len(pending))
            self._filing.schedule.decided(frame, records)
            self._counters.rescheduled_messages += len(pending)
        return _with_fate(fates, found, pending, DelayState.RESCHEDULED)

    def _when_safe(self, fates: list[DelayState], answer: Fates) -> None:
        mastership = self._mastership
        mastership.gate.stored(mastership.log.end, lambda error: answer(fates if error is None else error))
        mastership.gate.release_now()


class _Look:
    """A question of several requests at once; made on the loop, called on a thread."""

    def __init__(self, together: Sequence[Named], schedule: Schedule) -> None:
        self._together = together
        self._subjects = [schedule.position(named.subject) for named in together]
        self._ids = [(at, place) for at, named in enumerate(together) for place in range(len(named.ids))]
        self._keys = [(at, place) for at, named in enumerate(together) for place in range(len(named.keys))]
        self._find = schedule.find(
            None,
            [id_hash(together[at].ids[place]) for at, place in self._ids],
            [key_hash(together[at].keys[place]) for at, place in self._keys],
            [named.due_ms for named in together if named.due_ms > 0],
        )

    def __call__(self, message_log: MessageLog) -> list[list[_Found]]:
        """Return what is found for each request; raises LogError."""
        found: list[list[_Found]] = [[] for _ in self._together]
        self._add(found, self._find.near(), message_log, {*range(len(found))})
        missing = {at for at, named in enumerate(self._together) if not _are_all_there(named, found[at])}
        if missing:
            self._add(found, self._find.far(), message_log, missing)
        return found

    def _add(
        self, found: list[list[_Found]], candidates: list[Candidate], message_log: MessageLog, wanted: set[int]
    ) -> None:
        """Keep those candidates that have the name itself, not its hash alone, for requests that want them."""
        for by_key, index, record, state in candidates:
            at, place = self._keys[index] if by_key else self._ids[index]
            if at not in wanted or int(record["subject"]) != self._subjects[at]:
                continue
            named = self._together[at]
            name = place + len(named.ids) if by_key else place
            message = _read(message_log, record)
            if message is None:
                if state in (State.SENT, State.CANCELLED):
                    found[at].append(_Found(name, record, state, b""))  # the log let it go; its hash has to do
            elif _has_name(message, named, by_key, place):
                found[at].append(_Found(name, record, state, message))


def _are_all_there(named: Named, found: Sequence[_Found]) -> bool:
    """Return whether each name means one message, and all of them pend: what was sent or moved may be elsewhere again,
    and a key may mean several."""
    return not named.keys and len({one.name for one in found if one.state == State.PENDING}) == len(named.ids)


def _read(message_log: Any, record: Any) -> bytes | None:
    """Read a message; None if retention took it."""
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
        return decode_properties(message, envelope.body_begin).get(DELAY_KEY) == named.keys[index]
    except InvalidMessage:
        return False


def _by_number(found: Sequence[_Found]) -> list[_Found]:
    """Return what was written first before what was written later."""
    return sorted(found, key=lambda one: int(one.record["number"]))


def _records(found: Sequence[_Found]) -> Records:
    return np.array([one.record for one in found])


def _with_fate(
    fates: list[DelayState], found: Sequence[_Found], changed: Sequence[_Found], fate: DelayState
) -> list[DelayState]:
    numbers = {int(one.record["number"]) for one in changed}
    for one in found:
        if int(one.record["number"]) in numbers:
            fates[one.name] = fate
    return fates
