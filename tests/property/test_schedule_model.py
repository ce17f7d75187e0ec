"""Core. A schedule equals a dictionary of messages, for any log and any number of crashes.

The machine writes frames to a log and keeps the state of each message in a simple model. The schedule on its faulty
disk is fed, flushed, crashed, damaged, opened with other segment lengths, and rebuilt from a shortened log.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qmq.delayserver.schedule import DamagedSchedule, Filed, Schedule, State, discard, id_hash, key_hash
from qmq.delayserver.wheel import Wheel
from qmq.errors import DiskFailed
from qmq.log.delay_frames import Outcome, Place
from qmq.log.memory_disk import MemoryDisk
from tests.support.effort import examples
from tests.unit.delayserver.delay_log import HOUR_MS, DelayLog, delayed, drop_before, places

DUES = st.integers(0, 20).map(lambda step: step * HOUR_MS // 4)
PICKS = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)


@dataclass
class Known:
    """State of a message in the model."""

    subject: str
    id: str
    due: int
    size: int
    state: State = State.PENDING


class ScheduleAndDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log = DelayLog()
        self.disk = MemoryDisk()
        self.known: dict[int, Known] = {}
        self.flying: dict[tuple[int, int], list[int]] = {}
        self.count = self.now_ms = self.loaded_until_ms = 0
        self.flush = self.piece = None
        self.segment_ms = HOUR_MS
        self.open()

    def open(self) -> None:
        self.flush = self.piece = None
        self.schedule = Schedule(self.disk, segment_ms=self.segment_ms, log_start=self.log.start)
        self.forget_wheel()
        self.feed()

    def forget_wheel(self) -> None:
        self.wheel = Wheel()
        self.loaded_until_ms = 0
        self.piece = None
        self.is_loaded = False
        self.on_wheel: set[int] = set()
        self.schedule.forget_loads()

    def feed(self) -> None:
        for filed in self.log.file_into(self.schedule):
            self.to_wheel(filed)

    def to_wheel(self, filed: Filed) -> None:
        for number, _ in places(filed.added):
            assert number not in self.on_wheel
            self.on_wheel.add(number)
        self.wheel.add(filed.added)
        self.wheel.remove(filed.done)
        self.on_wheel -= {number for number, _ in places(filed.done)}

    def picked(self, picks: list[int]) -> list[Place]:
        numbers = sorted(self.known)
        return [(number, self.known[number].due) for number in (numbers[pick % len(numbers)] for pick in picks)]

    def pending(self) -> set[int]:
        return {number for number, message in self.known.items() if message.state == State.PENDING}

    # Frames of a master.

    def made(self, subject: str, dues: list[int]) -> list[bytes]:
        made = []
        for due in dues:
            id = f"m{self.count}"
            made.append(delayed(subject, id, due, key=f"k{self.count % 7}" if self.count % 3 == 0 else None))
            self.count += 1
        return made

    def added(self, subject: str, messages: list[bytes], where: list[Place]) -> None:
        first = self.count - len(messages)
        for i, (message, (number, due)) in enumerate(zip(messages, where, strict=True)):
            self.known[number] = Known(subject, f"m{first + i}", due, len(message))

    @rule(subject=st.sampled_from("st"), dues=st.lists(DUES, min_size=1, max_size=5), times=st.sampled_from([1, 2, 90]))
    def messages(self, subject: str, dues: list[int], times: int) -> None:
        messages = self.made(subject, dues * times)
        self.added(subject, messages, self.log.messages(messages, subject))
        self.feed()

    @precondition(lambda self: self.known)
    @rule(picks=PICKS)
    def cancel(self, picks: list[int]) -> None:
        named = self.picked(picks)
        self.log.cancel([*named, (5, 5)])
        for number, _ in named:
            if self.known[number].state == State.PENDING:
                self.known[number].state = State.CANCELLED
        self.feed()

    @precondition(lambda self: self.known)
    @rule(picks=PICKS, data=st.data())
    def carry(self, picks: list[int], data: st.DataObject) -> None:
        """Choose new due times for some pending messages, each once, as a master does."""
        pending = self.pending()
        old = [place for place in dict.fromkeys(self.picked(picks)) if place[0] in pending]
        if not old:
            return
        self.carry_to(old, data.draw(st.lists(DUES, min_size=len(old), max_size=len(old))))

    def carry_to(self, old: list[Place], dues: list[int]) -> None:
        messages = self.made("s", dues)
        new = self.log.carry(old, messages)
        self.added("s", messages, new)
        for number, _ in old:
            self.known[number].state = State.MOVED
        self.feed()

    @precondition(lambda self: self.known)
    @rule(picks=PICKS, is_planned=st.booleans())
    def dispatch(self, picks: list[int], is_planned: bool) -> None:
        named = self.picked(picks)
        if is_planned:
            self.plan(named)
        self.log.dispatch("group", named, producer=9, batch=self.log.end)
        taken = []
        for number, _ in named:
            if self.known[number].state == State.PENDING:
                self.known[number].state = State.IN_FLIGHT
                taken.append(number)
        if taken:
            self.flying[9, self.log.frames[-1][0].batch] = taken
        self.take_off(taken)
        self.feed()

    def plan(self, named: list[Place]) -> None:
        """Apply to the model before the frame is written."""
        listed = {int(record["number"]): record for record in self.schedule.list(0, 1 << 60, None, 10**6)()}
        if all(number in listed for number, _ in named):
            self.schedule.planned(9, self.log.end, np.array([listed[number] for number, _ in named]))

    def take_off(self, numbers: list[int]) -> None:
        """Dispatched messages are off the wheel."""
        records = self.schedule.list(0, 1 << 60, None, 10**6)()
        self.wheel.remove(records[np.isin(records["number"], numbers)])
        self.on_wheel -= set(numbers)

    @precondition(lambda self: self.flying)
    @rule(pick=st.integers(0, 100), outcome=st.sampled_from(Outcome))
    def settle(self, pick: int, outcome: Outcome) -> None:
        key = sorted(self.flying)[pick % len(self.flying)]
        self.log.settled(*key, outcome)
        for number in self.flying.pop(key):
            self.known[number].state = State.SENT if outcome == Outcome.STORED else State.PENDING
        self.feed()

    # Loading.

    @precondition(lambda self: self.piece is None)
    @rule(until_ms=DUES)
    def next_piece(self, until_ms: int) -> None:
        self.loaded_until_ms = max(self.loaded_until_ms, until_ms)
        self.piece = self.schedule.next_piece(until_ms)
        self.is_loaded = self.piece is None
        self.read = None if self.piece is None else self.piece.read()

    @precondition(lambda self: self.piece is not None)
    @rule()
    def hand(self) -> None:
        handed = self.schedule.handed(self.piece, self.read)
        self.to_wheel(Filed(added=handed))
        self.piece = None

    @rule()
    def mastership_begins(self) -> None:
        self.forget_wheel()

    # The disk.

    @precondition(lambda self: self.flush is None)
    @rule(stop=st.booleans(), later_ms=st.integers(0, 40_000))
    def take_flush(self, stop: bool, later_ms: int) -> None:
        self.now_ms += later_ms
        self.flush = self.schedule.take_flush(self.now_ms, stop=stop)

    @precondition(lambda self: self.flush is not None)
    @rule()
    def perform(self) -> None:
        self.flush.perform()
        self.schedule.flushed(self.flush)
        self.flush = None

    @rule(seed=st.integers(0, 1000), calls=st.integers(0, 30), segment_ms=st.sampled_from([1, 4, 7, 24, 48]))
    def crash(self, seed: int, calls: int, segment_ms: int) -> None:
        """Fail in the middle of a flush, if one runs."""
        if self.flush is not None:
            self.disk.fail_after(calls)
            try:
                self.flush.perform()
            except DiskFailed:
                pass
            self.disk.heal()
        self.disk.crash(Random(seed))
        self.segment_ms = segment_ms * HOUR_MS // 4
        self.open()

    @rule()
    def make_anew(self) -> None:
        discard(self.disk)
        self.open()

    @rule(pick=st.integers(0, 100), bit=st.integers(0, 10**6))
    def damage(self, pick: int, bit: int) -> None:
        """Damage a file; its readers detect it."""
        names = [f"segments/{name}" for name in self.disk.names("segments")]
        if self.flush is not None or not names:
            return
        name = names[pick % len(names)]
        image = self.disk.copy()
        self.disk.flip(name, bit % (8 * self.disk.size(name)))
        try:
            self.check()
        except DamagedSchedule:
            discard(self.disk)
            self.open()
        else:
            self.disk.put_back(image)

    @precondition(lambda self: self.flush is None and len(self.log.frames) > 2)
    @rule(part=st.integers(1, 100))
    def retention(self, part: int) -> None:
        """Write pending messages of the oldest part of the log again, then drop that part."""
        border = self.log.frames[part * (len(self.log.frames) - 1) // 100][0].offset
        if any((batch.records["number"] < border).any() for batch in self.schedule.in_flight.values()):
            return
        below = places(self.schedule.pending_below(border)())
        if below:
            self.carry_to(below, [due for _, due in below])
        drop_before(self.log, border)
        self.known = {
            number: message for number, message in self.known.items() if number >= border or message.state < State.SENT
        }

    # Invariants.

    @invariant()
    def check(self) -> None:
        schedule = self.schedule
        undone = {number: message for number, message in self.known.items() if message.state < State.SENT}
        assert schedule.pending_messages == len(undone)
        assert schedule.pending_bytes == sum(message.size for message in undone.values())
        records = schedule.list(0, 1 << 60, None, 10**6)()
        assert places(records) == sorted(
            ((n, message.due) for n, message in undone.items()), key=lambda place: place[::-1]
        )
        assert schedule.states_of(records) == {number: message.state for number, message in undone.items()}
        flying = {key: [number for number, _ in places(batch.records)] for key, batch in schedule.in_flight.items()}
        assert flying == self.flying
        for subject in "st":
            hours: dict[int, int] = {}
            for message in undone.values():
                if message.subject == subject:
                    hours[message.due // HOUR_MS * HOUR_MS] = hours.get(message.due // HOUR_MS * HOUR_MS, 0) + 1
            assert schedule.counts(0, 1 << 60, subject) == dict(sorted(hours.items()))
        assert schedule.pending_from() <= min(undone, default=self.log.end)
        self.check_find()

    def check_find(self) -> None:
        """For messages whose segment may be deleted, only the schedule counts."""
        some = sorted(self.known)[:: max(len(self.known) // 6, 1)]
        hashes = [id_hash(self.known[number].id) for number in some]
        found = self.schedule.find(None, hashes, [key_hash("k3")])()
        states = {int(entry.record["number"]): entry.state for entry in found if not entry.by_key}
        for number in some:
            state = self.known[number].state
            assert states.get(number, state) == state
            assert state >= State.SENT or number in states
        keyed = {int(entry.record["number"]) for entry in found if entry.by_key}
        wanted = {
            n for n, message in self.known.items() if int(message.id[1:]) % 3 == 0 and int(message.id[1:]) % 7 == 3
        }
        assert {n for n in keyed if n in self.known} <= wanted
        assert {n for n in wanted if self.known[n].state < State.SENT} <= keyed

    @invariant()
    def check_wheel(self) -> None:
        pending = self.pending()
        assert self.on_wheel <= pending
        assert len(self.wheel) == len(self.on_wheel)
        if self.is_loaded:
            missing = {n for n in pending - self.on_wheel if self.known[n].due < self.loaded_until_ms}
            assert not missing

    def teardown(self) -> None:
        self.check()
        taken = self.wheel.take(1 << 61, 10**6)["number"].tolist()
        assert sorted(taken) == sorted(self.on_wheel)


TestScheduleAndDict = ScheduleAndDict.TestCase
TestScheduleAndDict.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
