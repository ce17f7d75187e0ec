"""Event loop in virtual time that runs many processes, each with its tasks and its clock.

The context of a callback holds its process; asyncio hands it on from task to task. Callbacks of a killed process never
run again, those of a stopped process wait. Jobs of threads are callbacks that run later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import partial
from random import Random
from typing import Any

from sqlalchemy.exc import OperationalError

STEPS_MAX = 3_000_000
"""Maximum of callbacks in a run, against endless ones."""


class Killed(BaseException):
    """Raised where the process has ended. No code of the process may catch it."""


class Process:
    """Process of a machine, from its start until it ends or is killed.

    `clock_s`: error of the machine's wall clock.
    """

    def __init__(self, loop: VirtualLoop, name: str, ip: str) -> None:
        self.loop = loop
        self.name = name
        self.ip = ip
        self.is_dead = self.is_stopped = False
        self.parked: deque[asyncio.Handle] = deque()
        self.reason: BaseException | None = None
        """Error by which it ended itself, if it did."""
        self.clock_s = 0.0
        self.spent_s = 0.0
        """Time spent in system calls, by the clock that measures such times."""
        self.thread_s = (0.0001, 0.003)
        """Duration of a job on a thread, as a range."""
        loop.processes.append(self)
        self.context = copy_context()
        self.context.run(_process.set, self)
        self.signals: dict[int, Callable[[], object]] = {}
        """Signal handlers."""
        self.ended: list[Callable[[], None]] = []
        """Work of the kernel when the process is killed."""
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work, context=self.context)
        self._tasks.append(task)
        return task

    def kill(self) -> None:
        """End it here and now. References to its tasks stay, so none of their `finally` blocks runs."""
        if not self.is_dead:
            self.is_dead = True
            self.parked.clear()
            for end in self.ended:
                end()

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        self.loop.ready(self.parked)


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """Return the running process; None: the world around them."""
    return _process.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """Loop in a time that stands still while any callback is ready, and then jumps to the next timer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = Random(seed)
        self.now_s = 1000.0
        self.steps = 0
        self.world = Context()
        """Context of callbacks without a process."""
        self.errors: list[str] = []
        self.processes: list[Process] = []
        self.lives: deque[tuple[Process, Any]] = deque(maxlen=24)
        """Newest sessions and batches of clients, with their processes."""
        self.database = ""
        """Present fault of the database."""
        self._kept: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._take_error)
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        return self.now_s

    def at(self, when_s: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Schedule a callback of the world."""
        return self.call_at(when_s, call, *args, context=self.world)

    def ready(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)
        handles.clear()

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **words: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **words)
        task._log_destroy_pending = False
        self._kept.append(task)
        if len(self._kept) > 5000:
            self._kept = [task for task in self._kept if not task.done()]
        return task

    def abandon(self) -> None:
        """Close unfinished tasks and ignore their errors."""
        for process in self.processes:
            process.is_dead = True
        for task in self._kept:
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self._kept.clear()
        self.close()

    def _take_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, process = context.get("exception"), current()
        if not isinstance(error, Killed) and not (process is not None and process.is_dead):
            self.errors.append(f"{process.name if process else 'world'}: {context['message']}: {error!r}")

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not ready and timers and not self._stopping:
            self.now_s = max(self.now_s, timers[0]._when)
        while timers and timers[0]._when <= self.now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            self._run(ready.popleft())

    def _run(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(_process)
        if handle.cancelled() or (process is not None and process.is_dead):
            return
        if process is not None and process.is_stopped:
            process.parked.append(handle)
            return
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise RuntimeError(f"more than {STEPS_MAX} callbacks; the last one is {handle!r}")
        handle._run()

    def _process_events(self, event_list: list[object]) -> None:
        """Do nothing: arrivals are timers of the network."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps in a system call."""

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: object) -> None:
        process = current()
        process.signals[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        process = current()
        return process is not None and process.signals.pop(sig, None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        threads = executor if isinstance(executor, Threads) else Threads(32)
        return asyncio.wrap_future(threads.submit(func, *args), loop=self)


OF_DATABASES = "database", "outbox"
"""Threads that talk to a database: the metaserver's, and a shop's."""


class Threads:
    """Stands in for ThreadPoolExecutor: a job runs later, in its process, and takes no time itself. Initializers of
    threads have no meaning here.
    """

    def __init__(self, workers: int, name: str = "", initializer: Callable[[], None] | None = None) -> None:
        self._free_s = [0.0] * workers
        self._name = name

    def submit(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        loop, process = asyncio.get_event_loop(), current()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        if self._name in OF_DATABASES and loop.database == "hangs":
            loop.call_later(loop.rng.uniform(3.0, 8.0), self._work, loop, future, call, args)
            return future
        worker = min(range(len(self._free_s)), key=self._free_s.__getitem__)
        self._free_s[worker] = when_s = max(self._free_s[worker], loop.now_s) + loop.rng.uniform(*process.thread_s)
        loop.call_at(when_s, self._work, loop, future, call, args)
        return future

    def _work(self, loop: VirtualLoop, future: concurrent.futures.Future[Any], call: Any, args: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._name in OF_DATABASES and loop.database == "refuses":
                raise OperationalError("", None, Exception("the database is away"))
            settle: tuple[Callable[[Any], None], Any] = future.set_result, call(*args)
            if self._name in OF_DATABASES and loop.database == "forgets":  # the work is done and its answer is lost
                raise OperationalError("", None, Exception("the connection was lost"))
        except Killed:
            raise
        except BaseException as error:
            settle = future.set_exception, error
        loop.call_later(loop.rng.uniform(0, 0.001), *settle)  # the process may be killed before

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...
