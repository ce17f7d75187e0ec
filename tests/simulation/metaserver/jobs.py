"""Event loop in virtual time that turns SQL and calls to brokers into jobs.

The loop runs ready callbacks and stops. The walk then carries out a job with a chosen fate, or lets time pass. There is
no thread, socket or clock: the same steps give the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.loop import VirtualLoop

WHOSE: contextvars.ContextVar[Any] = contextvars.ContextVar("whose")
"""Errand that a job belongs to."""

WRITES: contextvars.ContextVar[bool] = contextvars.ContextVar("writes", default=False)
"""Set while a write is ordered."""


@dataclass(eq=False)
class Job:
    """A transaction, or a call to a broker, that code under test awaits."""

    whose: Any
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    kind: str = "sql"
    writes: bool = False
    """Whether it may change the database."""

    def resolve(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # its caller was cancelled
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class JobLoop(VirtualLoop):
    """Loop in a time that the world advances."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.on_job: Callable[[Job], None]
        """Called with each new job."""
        self.failed: list[dict[str, Any]] = []
        """Contexts of unhandled errors."""
        self.tasks: dict[asyncio.Task[Any], Any] = {}
        """Unfinished task -> its errand."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.failed.append(context))

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        job = Job(WHOSE.get(), lambda: func(*args), self.create_future(), writes=WRITES.get())
        self.on_job(job)
        return job.future

    def ask(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """Make a job of a call to a broker."""
        job = Job(WHOSE.get(), call, self.create_future(), "broker")
        self.on_job(job)
        return job.future

    def _make_task(self, loop: Any, work: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context)
        self.tasks[task] = (context or contextvars.copy_context()).get(WHOSE)  # None: the end of a generator
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def begin(self, whose: Any, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of this errand."""
        context = contextvars.copy_context()
        context.run(WHOSE.set, whose)
        return self.create_task(work, context=context)

    def run_ready(self) -> None:
        """Run until every task waits for a job or a later time."""
        with self.own_clock():
            for _ in range(10_000):
                if not self._ready and not self._due():
                    return
                self.call_soon(self.stop)
                self.run_forever()
        raise AssertionError("tasks keep each other busy without waiting for anything")

    @contextmanager
    def own_clock(self) -> Iterator[None]:
        """Replace clocks and dice by the loop's."""
        real = time.monotonic, time.monotonic_ns, time.time_ns, secrets._sysrand
        nanoseconds = lambda: round(self.now_s * 1e9)
        time.monotonic, time.monotonic_ns, time.time_ns = self.time, nanoseconds, nanoseconds
        secrets._sysrand = self.rng
        try:
            yield
        finally:
            time.monotonic, time.monotonic_ns, time.time_ns, secrets._sysrand = real

    def _due(self) -> bool:
        return any(not handle.cancelled() and handle.when() <= self.now_s for handle in self._scheduled)

    def next_timer(self) -> float | None:
        return min((handle.when() for handle in self._scheduled if not handle.cancelled()), default=None)
