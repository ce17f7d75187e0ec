"""Shell. Monitor of event loops: names a handler that blocks its loop, while it blocks.

One thread per process looks once a second for the task that each loop runs. If two looks find one task with the same
messages, it schedules a callback on the loop; until that runs, the loop is blocked. A call costs its worker only the
storing of one reference.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from qmq.client.received import ReceivedMessage
from qmq.client.terms import Refused
from qmq.errors import InvalidMessage
from qmq.logs import bounded

log = bounded(__name__)

LOOK_S = 1.0
STILL_S = 5.0
"""Gap between looks above which the whole process must have been stopped, so that no handler is named."""
BLOCKED_S = 5.0
"""Duration of a block at its first log line; each further line follows at twice the duration."""
REMEMBERED_MAX = 1_000
_OURS = str(Path(__file__).parent), str(Path(asyncio.__file__).parent)


@dataclass(eq=False, slots=True)
class Call:
    """Calls of one worker: `taken` holds the messages of the current or last one. Changed on the worker's loop."""

    about: str
    loop: asyncio.AbstractEventLoop
    thread: int
    taken: Sequence[ReceivedMessage] = ()


class LoopMonitor:
    """Monitor of all loops with workers in this process. Its thread runs while there are workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[asyncio.Task[object], Call] = {}
        self._suspicions: dict[asyncio.AbstractEventLoop, _Suspicion] = {}
        self._blocks: dict[tuple[str, str, str, int], str] = {}
        """Text for the failure reason of each message whose handler blocked its loop, the oldest first."""
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, about: str) -> Iterator[Call]:
        """Watch the calls of the current task, a worker; `about` names its handler in the log."""
        task, call = asyncio.current_task(), Call(about, asyncio.get_running_loop(), threading.get_ident())
        assert task is not None
        with self._lock:
            self._calls[task] = call
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="qmq loop monitor", daemon=True)
                self._thread.start()
        try:
            yield call
        finally:
            with self._lock:
                del self._calls[task]

    def explained(self, message: ReceivedMessage, decision: Refused) -> Refused:
        """Return the decision. If the message's handler blocked its loop, the reason of a failure names the block."""
        text = self._blocks.get(_key(message)) if self._blocks and decision.is_failure else None
        return decision if text is None else decision._replace(reason=f"{decision.reason}; {text}")

    def _run(self) -> None:
        looked_s = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            gap_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            with self._lock:
                calls = dict(self._calls)
                if not calls:
                    self._thread = None
                    return
            known = self._suspicions if gap_s < STILL_S else {}
            self._suspicions = {}
            for loop, any_call in {call.loop: call for call in calls.values()}.items():
                if (task := asyncio.current_task(loop)) is not None:
                    call = calls.get(task, any_call)
                    seen = call.taken if task in calls else task
                    self._suspicions[loop] = suspicion = _suspect(loop, known.get(loop), seen, looked_s)
                    if suspicion.asked_s is not None and looked_s - suspicion.asked_s >= suspicion.log_age_s:
                        suspicion.log_age_s *= 2
                        self._name(call, seen, looked_s - suspicion.asked_s)

    def _name(self, call: Call, seen: object, age_s: float) -> None:
        at = _place(call.thread)
        if seen is not call.taken:
            log.warning("task blocks the event loop of handlers blocked_s=%.0f at=%s task=%s", age_s, at, seen)
            return
        text = f"its handler blocked the event loop for {age_s:.0f} s or longer at {at}"
        blocks = self._blocks | {_key(message): text for message in call.taken[:REMEMBERED_MAX]}
        self._blocks = dict([*blocks.items()][-REMEMBERED_MAX:])
        first, messages = call.taken[0], len(call.taken)
        place = f"id={id_of(first)} sequence={first.sequence} messages={messages} broker_group={first.broker_group}"
        line = "handler blocks its event loop, make it a plain function (def) %s %s blocked_s=%.0f at=%s"
        log.warning(line, call.about, place, age_s, at)


@dataclass(eq=False, slots=True)
class _Suspicion:
    """Suspected block of a loop. `seen`: the worker's messages, or the other task, that a look found running. `run`,
    called on the loop, ends the suspicion.
    """

    seen: object
    asked_s: float | None = None
    log_age_s: float = field(default_factory=lambda: BLOCKED_S)
    has_run: bool = False

    def run(self) -> None:
        self.has_run = True


def _suspect(loop: asyncio.AbstractEventLoop, known: _Suspicion | None, seen: object, now_s: float) -> _Suspicion:
    if known is None or known.has_run or known.seen is not seen or not seen:
        return _Suspicion(seen)
    if known.asked_s is None:
        known.asked_s = now_s
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(known.run)
    return known


def _key(message: ReceivedMessage) -> tuple[str, str, str, int]:
    return message.source, message.group, message.broker_group, message.sequence


def id_of(message: ReceivedMessage) -> str:
    """Return the message's id for the log; "" if its bytes have none."""
    try:
        return str(message.id)
    except InvalidMessage:  # bytes of a foreign producer
        return ""


def _place(thread: int) -> str:
    """Return the handler's line at which a thread stands, and the innermost line if that is another one."""
    frame, lines = sys._current_frames().get(thread), list[str]()
    while frame is not None and not (lines and frame.f_code.co_filename.startswith(_OURS)):
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}({frame.f_code.co_name})")
        frame = frame.f_back
    return ">".join(dict.fromkeys([*lines[-1:], *lines[:1]]))


MONITOR = LoopMonitor()
if hasattr(os, "register_at_fork"):  # the thread stays in the parent, and may have held the lock
    os.register_at_fork(after_in_child=lambda: LoopMonitor.__init__(MONITOR))
