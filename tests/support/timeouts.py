"""Shell. End of tests that never end: pytest's plugin fails them; this one names the await, and fails a second time.

pytest-timeout shows the stacks of threads. A hung `async def` test stands in its loop's select there, so the stacks of
all tasks are shown, too. Its timer ends with the first failure; this one also ends fixtures that do not end.
"""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import pytest_timeout

FOLDERS = "/unit/", "/golden/", "/property/", "/transcripts/"
SHORT_S = 240.0
"""Bound of a test in `FOLDERS`, which starts no cluster; others have minutes to name the state that is missing."""
AGAIN_S = 60.0
PHASES = {"pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown"}
BEGIN = pytest.StashKey[Callable[[float], None]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in str(item.path) for folder in FOLDERS) and not any(item.iter_markers("timeout")):
            item.add_marker(pytest.mark.timeout(SHORT_S))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    if settings.method != "signal":
        return None

    def fail(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if not _is_in(PHASES, frame):
            return  # raised in pytest's own code, it would end the session; the timer fires again
        item.add_report_section("call", "tasks", tasks())
        pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def begin(after_s: float) -> None:
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, after_s, AGAIN_S)

    setattr(item, "cancel_timeout", cancel)  # noqa: B010
    item.stash[BEGIN] = begin
    begin(settings.timeout)
    return True


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item) -> None:
    """Bound the fixtures' ends after a failure, for which pytest-timeout has just stopped its timer."""
    if BEGIN in node.stash and not node.config.getoption("usepdb"):
        node.stash[BEGIN](AGAIN_S)


def _is_in(names: set[str], frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


def tasks() -> str:
    """Return the stacks of all tasks of the loops that run in any thread."""
    text = io.StringIO()
    for loop in {loop for top in sys._current_frames().values() if (loop := _loop_of(top))}:
        for task in asyncio.all_tasks(loop):
            task.print_stack(limit=8, file=text)
    return text.getvalue()


def _loop_of(top: FrameType) -> asyncio.AbstractEventLoop | None:
    frame: FrameType | None = top
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_code.co_name == "run_forever" else None
        if isinstance(found, asyncio.AbstractEventLoop):
            return found
        frame = frame.f_back
    return None
