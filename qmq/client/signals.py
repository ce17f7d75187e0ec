"""Shell. SIGTERM ends consumers in an orderly way, where the application has not its own idea of it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable

_enders: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}


def on_sigterm(end: Callable[[], None]) -> Callable[[], None]:
    """Call `end` at SIGTERM, together with those of other consumers of this loop; return what takes that back.

    Nothing is done where signals cannot be handled (another thread than the main one, Windows), or where the
    application or its framework handles SIGTERM already: there, it calls `Consumer.stop`.
    """
    loop = asyncio.get_running_loop()
    if loop not in _enders:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return lambda: None
        try:
            loop.add_signal_handler(signal.SIGTERM, _end_all, loop)
        except NotImplementedError:
            return lambda: None
        _enders[loop] = []
    _enders[loop].append(end)
    return lambda: _take_back(loop, end)


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    for end in list(_enders.get(loop, ())):
        end()


def _take_back(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    _enders[loop].remove(end)
    if not _enders[loop]:
        del _enders[loop]
        loop.remove_signal_handler(signal.SIGTERM)
