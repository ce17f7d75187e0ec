"""Known bugs, each planted into the real code for a while. A simulator that does not find them proves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from delayserver.decisions import Decisions
from delayserver.dispatching import Dispatching
from delayserver.keeping import Keeping, is_old
from delayserver.schedule import Filed
from delayserver.schedule import filing as frames_filed
from delayserver.schedule.book import Book
from delayserver.schedule.record import read_batch
from delayserver.wheel import Wheel
from qmq.log.delays import Outcome, batch_begin
from qmq.log.frame import FrameKind
from tests.delay_simulation.world import simulate
from tests.simulation.world import Outcome as Result

Patch = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Bug:
    name: str
    patches: Callable[[], list[Patch]]
    first: int = 1
    """Where a search begins: shortly before the seed that found it last, to save time."""


@contextlib.contextmanager
def planted(bug: Bug) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in bug.patches():
            stack.enter_context(patch)
        yield


def search(bug: Bug, seeds: range) -> Result | None:
    """Return the first seed that shows the bug."""
    with planted(bug):
        for seed in seeds:
            outcome = simulate(seed)
            if outcome.failure:
                return outcome
    return None


def _sent_before_its_plan_is_safe() -> list[Patch]:
    def when_safe(self: Dispatching, batch: Any) -> None:
        batch.is_safe = True
        self._read(batch)

    return [mock.patch.object(Dispatching, "_when_safe", when_safe)]


def _dispatched_messages_still_pend() -> list[Patch]:
    return [mock.patch.dict(frames_filed._KINDS, {FrameKind.DISPATCH: lambda book, frame, body: Filed()})]


def _segment_with_pending_messages_is_dropped() -> list[Patch]:
    def may_drop(self: Keeping, message_log: Any, now_ms: int) -> bool:
        return is_old(message_log, self._settings, now_ms)

    return [mock.patch.object(Keeping, "may_drop", may_drop)]


def _what_is_written_and_not_filed_decides_nothing() -> list[Patch]:
    return [mock.patch.object(Decisions, "not_named", lambda self, records: records)]


def _batches_of_earlier_reigns_are_put_together_anew() -> list[Patch]:
    resume = Dispatching.resume

    def anew(self: Dispatching, producer: int, number: int, *rest: Any) -> None:
        resume(self, producer, number, *rest)
        self._settle(self.open[producer, number], Outcome.NOT_STORED, 0)

    return [mock.patch.object(Dispatching, "resume", anew)]


def _early() -> list[Patch]:
    take = Wheel.take
    return [mock.patch.object(Wheel, "take", lambda self, now_ms, most: take(self, now_ms + 20, most))]


def _what_was_not_stored_is_not_due_again() -> list[Patch]:
    return [mock.patch.object(frames_filed, "_on_wheel", lambda *_: [])]


def _carried_message_pends_twice() -> list[Patch]:
    def carry(book: Book, frame: Any, body: Any) -> Filed:
        records = read_batch(frame, body, batch_begin(frame.count, True), book.position(frame.subject))
        return Filed(added=frames_filed._add(book, records))

    return [mock.patch.dict(frames_filed._KINDS, {FrameKind.CARRY: carry})]


BUGS = [
    Bug("sent before its plan is safe", _sent_before_its_plan_is_safe),
    Bug("dispatched messages still pend", _dispatched_messages_still_pend),
    Bug("segment with pending messages is dropped", _segment_with_pending_messages_is_dropped),
    Bug("what is written and not filed decides nothing", _what_is_written_and_not_filed_decides_nothing, 70),
    Bug("batches of earlier reigns are put together anew", _batches_of_earlier_reigns_are_put_together_anew, 9),
    Bug("early", _early),
    Bug("what was not stored is not due again", _what_was_not_stored_is_not_due_again),
    Bug("carried message pends twice", _carried_message_pends_twice),
]
