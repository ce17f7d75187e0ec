"""Shell. Event loop of all blocking clients of a process, in one thread that is started on first use.

Fork: a child process has only the thread that forked. It gets a loop of its own on first use and never touches its
parent's. Messages in flight in the parent stay with the parent.

End: Python waits for non-daemon threads before it shuts the interpreter down. One such thread, the keeper, waits for
the program's own threads and then for the outcomes of all messages. An `atexit` handler does the same for later
messages and ends the loop. Processes that end by `os._exit` run other hooks: multiprocessing's, and Celery's signal
(`_hook_ends`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import grpc.aio

from qmq.client.lifetime import check_not_patched
from qmq.errors import ClientClosed, InvalidRequest
from qmq.grpc_forks import grpc_begins, why_no_grpc
from qmq.logs import bounded, retrieve_error

log = bounded(__name__)

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
S = TypeVar("S")

END_S = 5.0
"""Time for the loop's thread to end after all clients were closed."""
THREADS = 2
"""Number of threads that are started at once. One would suffice if name servers always answered."""


class Client(Protocol):
    """Client that ends with the process."""

    def flush_at_exit(self) -> None:
        """Wait, within the client's limits, for the outcomes of all messages; log lost ones."""

    def close(self) -> None:
        """Wait as `flush_at_exit` does, and disconnect."""


class Opens(Protocol[A_co]):
    """Blocking client that drives the client `A` for coroutines."""

    def _opened(self) -> tuple[Background, A_co]:
        """Return this process's loop and the client that is open on it."""


def waits_for(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Opens[A], P], T]:
    """Return a blocking method for a coroutine method, with its arguments, result and docstring."""

    @wraps(method)
    def call(self: Opens[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        background, client = self._opened()
        return background.run(method(client, *args, **kwargs))

    return call


def arguments_of(
    call: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[Concatenate[S, ...], T]], Callable[Concatenate[S, P], T]]:
    """Declare that a method takes the arguments of another one, which checks them."""

    def declare(method: Callable[Concatenate[S, ...], T]) -> Callable[Concatenate[S, P], T]:
        method.__wrapped__ = call  # type: ignore[attr-defined]  # read by inspect.signature
        return method

    return declare


class Background:
    """Loop and its thread. Made by `background`; ends with the process."""

    def __init__(self) -> None:
        check_not_patched()
        self.pid: int = os.getpid()
        self.clients: set[Client] = set()
        """Open clients."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Threads())
        self._thread = threading.Thread(target=self._loop.run_forever, name="qmq", daemon=True)
        self._thread.start()
        self.submit(_begin_grpc()).result()
        # A thread inherits `daemon`: a process pool starts its workers in a daemon thread.
        threading.Thread(target=self._keep, name="qmq keeper", daemon=False).start()
        _hook_ends()

    def call_soon(self, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `call` on the loop; does not wait."""
        self._loop.call_soon_threadsafe(lambda: call(*args, **kwargs))

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Run `call` after some seconds; must be called on the loop."""
        self._loop.call_later(seconds, call)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(_retrieved(work), self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for it. An exception in the wait, such as Ctrl-C, cancels the work.

        Raises:
            InvalidRequest: this is the loop's own thread, which would wait for itself.
        """
        self.check_may_wait(work)
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def check_may_wait(self, work: Coroutine[Any, Any, object] | None = None) -> None:
        if threading.current_thread() is self._thread:
            if work is not None:
                work.close()
            raise InvalidRequest(
                "a callback must not wait: it runs on the background thread. Use the _nowait calls there"
            )

    def tasks(self) -> set[asyncio.Task[Any]]:
        """Return the loop's tasks, to which asyncio itself keeps only weak references."""
        return asyncio.all_tasks(self._loop)

    def _keep(self) -> None:
        """Wait for the program's own threads, then for their messages."""
        threading.main_thread().join()
        this = threading.current_thread()
        while others := [thread for thread in threading.enumerate() if thread is not this and _is_waited_for(thread)]:
            others[0].join()
        self.flush()

    def flush(self) -> None:
        """Wait for the outcomes of all clients' messages."""
        for client in list(self.clients):
            try:
                client.flush_at_exit()
            except Exception as error:
                log.warning("client flush failed error=%r", error)

    def end(self) -> None:
        """Close all clients, then the loop."""
        self.flush()
        for client in list(self.clients):
            try:
                client.close()
            except Exception as error:
                log.warning("client close failed error=%r", error)
        with contextlib.suppress(TimeoutError):
            self.submit(_end_tasks()).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _begin_grpc() -> None:
    """Start gRPC's thread now, for the reason given in `_Threads`."""
    if not why_no_grpc():
        grpc_begins()
        grpc.aio.init_grpc_aio()


async def _retrieved(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If it fails while its future is cancelled, asyncio does not log the error."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(retrieve_error)
    return await work


async def _end_tasks() -> None:
    """End all tasks of this loop: gRPC leaves calls behind that were just cancelled."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_waited_for(thread: threading.Thread) -> bool:
    """Return whether Python waits for this thread before the interpreter ends."""
    return not thread.daemon and thread is not threading.main_thread()


class _Threads(ThreadPoolExecutor):
    """Threads for blocking calls: name resolution, an application's database.

    Some are started at once, because from Python 3.12 on no thread can be started after the main thread has ended,
    while other threads may still send. The base class would reject calls from then on, so they do not go through it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(THREADS)
        for _ in range(THREADS):
            threading.Thread(target=self._serve, name="qmq call", daemon=True).start()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(work)
        if not self._idle.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the program is ending: the call waits for a busy thread
                threading.Thread(target=self._serve, name="qmq call", daemon=True).start()
        return future

    def _serve(self) -> None:
        while True:
            self._calls.get()()
            self._idle.release()


_background: Background | None = None
_of_parents: list[object] = []
"""Loops of parent processes with their tasks. Kept alive, because closing their sockets, epoll and gRPC channels would
close the parent's.
"""
lock: threading.Lock = threading.Lock()
"""Lock for objects made on first use: the loop, and the clients' sessions on it."""


def background() -> Background:
    """Return this process's loop, made on first use; call it with `lock` held.

    Raises:
        ClientClosed: the main thread has ended, so that no other thread can be started (from Python 3.12 on).
    """
    global _background
    if _background is None:
        try:
            _background = Background()
        except RuntimeError as error:
            if threading.main_thread().is_alive():
                raise
            text = "the program is ending, and no thread can begin any more: use the client before the main thread ends"
            raise ClientClosed(text) from error
        atexit.register(_end, os.getpid())
    return _background


def current() -> Background | None:
    """Return this process's loop, or None."""
    return _background


def _end(pid: int) -> None:
    if _background is not None and pid == os.getpid():
        _background.end()


def _flush(*_: object, **__: object) -> None:
    """Flush at the end of a process that skips `atexit`; ignores the registrations of a parent process."""
    if _background is not None and _background.pid == os.getpid():
        _background.flush()


def _hook_ends() -> None:
    """Register `_flush` where processes end by `os._exit`, in the modules that this process has loaded."""
    if (util := sys.modules.get("multiprocessing.util")) is not None:  # billiard's processes run these finalizers, too
        util.Finalize(None, _flush, exitpriority=-1)  # after the process has joined its own children
    if (signals := sys.modules.get("celery.signals")) is not None:  # workers of Celery's pools run nothing else
        signals.worker_process_shutdown.connect(_flush, weak=False, dispatch_uid="qmq")


def _after_fork() -> None:
    global _background, lock
    if _background is not None:
        _of_parents.append((_background, _background.tasks()))
    _background, lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
