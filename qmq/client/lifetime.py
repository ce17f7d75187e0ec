"""Shell. End of clients: failed tasks, forks, exit of the process, SIGTERM."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from qmq.errors import InvalidRequest
from qmq.logs import bounded

log = bounded(__name__)


def logged_task(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Return the task; its error is logged when it ends before the client is closed."""
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("client task failed: close the client and make another one", exc_info=error)


class OpenClient(Protocol):
    """Open client of an event loop."""

    def inherited(self) -> None:
        """Close this copy in a forked process: reject every call, and leave the parent's connections alone."""

    @property
    def open_messages(self) -> int:
        """Number of messages without an outcome."""


_PATCHED = (
    ("gevent", "gevent.monkey", "is_module_patched", ("threading", "socket", "select", "queue")),
    ("eventlet", "eventlet.patcher", "is_monkey_patched", ("thread", "socket", "select")),
)
"""Library, its module, its function that checks whether a module is replaced, and the modules that qmq needs."""


def check_not_patched() -> None:
    """Raise InvalidRequest if gevent or eventlet replaced threads and sockets of the process.

    An event loop in such a thread never runs while its caller waits: every call would hang past its timeout.
    """
    for library, module, function, names in _PATCHED:
        is_patched = getattr(sys.modules.get(module), function, None)
        if is_patched is not None and any(map(is_patched, names)):
            raise InvalidRequest(
                f"{library} has replaced this process's threads and sockets, with which qmq cannot run: use threads "
                "instead (gunicorn --worker-class gthread, celery --pool threads or prefork)"
            )


def check_loop(noun: str, loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise InvalidRequest outside the event loop of an open client: no timer or answer would wake the call there."""
    if loop is not None and asyncio._get_running_loop() is not loop:
        raise InvalidRequest(
            f"{noun} is used outside the event loop that opened it. Send the call there with "
            "asyncio.run_coroutine_threadsafe(…, loop), make another client here, or use qmq.blocking"
        )


def no_pickle(noun: str) -> TypeError:
    """Return the error of pickling a client that belongs to its process; TypeError, as pickle itself raises."""
    return TypeError(f"{noun} cannot be pickled: its connections are this process's. Make one in the other process.")


_open: set[OpenClient] = set()
_of_parents: list[object] = []
"""Clients of parent processes. Kept alive, because closing their sockets would close the parent's."""


def opened(client: OpenClient) -> None:
    _open.add(client)


def closed(client: OpenClient) -> None:
    _open.discard(client)


def report_lost(messages: int, event: str) -> None:
    """Log messages with an outcome that will stay unknown."""
    if messages:
        text = "messages are not known to be stored messages=%d: %s before the producer was closed. Use `async with`"
        log.error(text, messages, event)


def _after_fork() -> None:
    _of_parents.extend(_open)
    for client in _open:
        client.inherited()
    _open.clear()


def _at_exit() -> None:
    for client in _open:
        report_lost(client.open_messages, "the process ended")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

_enders: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
_is_handled = False
"""Whether SIGTERM is handled here."""


def _is_free() -> bool:
    """Return whether SIGTERM can be handled in this thread and the application does not handle it."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def on_sigterm(end: Callable[[], None]) -> Callable[[], None]:
    """Call `end` at SIGTERM, with those of other consumers of this loop; return the function that unregisters it.

    Does nothing where signals cannot be handled (other threads, Windows), or where the application or its framework
    handles SIGTERM: then it calls `Consumer.stop` itself.
    """
    global _is_handled
    loop = asyncio.get_running_loop()
    if loop not in _enders:
        if not _is_free():
            return lambda: None
        try:
            loop.add_signal_handler(signal.SIGTERM, _end_all, loop)
        except NotImplementedError:
            return lambda: None
        _enders[loop], _is_handled = [], True
    _enders[loop].append(end)
    return lambda: _take_back(loop, end)


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    for end in list(_enders.get(loop, ())):
        end()


def _take_back(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    global _is_handled
    _enders[loop].remove(end)
    if not _enders[loop] and _is_handled:
        del _enders[loop]
        _is_handled = False
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def sigterm_calls(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGTERM: `on_sigterm` for a main thread without an event loop."""
    global _is_handled
    if not _is_free():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: stop())
    _is_handled = True
    try:
        yield
    finally:
        if _is_handled:
            _is_handled = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_blocked: set[int | signal.Signals] | None = None
"""Signals that were blocked before a fork, while SIGTERM is blocked for it."""


def _block_sigterm() -> None:
    """Block SIGTERM until the child has reset the handler."""
    global _blocked
    if _is_handled:
        _blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    global _blocked
    if _blocked is not None:
        blocked, _blocked = _blocked, None
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _reset_sigterm() -> None:
    """Let SIGTERM end the child: the handler would stop the parent's consumer, through the pipe of its event loop."""
    global _is_handled
    if _is_handled:
        _is_handled = False
        if _enders:
            signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_reset_sigterm)
