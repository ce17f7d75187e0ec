"""Shell. Processes that stand still.

SIGSTOP is only asked for when `kill` returns: on a busy machine the thread that takes it may have to wait for its turn,
and meanwhile the others go on, answer and confirm.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOPPED = frozenset("TtZX")
LIMIT_S = 60


def stand_still(pid: int) -> None:
    """Stop a process, and wait until all its threads stand still; one that is gone does so, too."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + LIMIT_S
    while not _states(pid) <= STOPPED:
        assert time.monotonic() < deadline, f"process {pid} does not stand still"
        time.sleep(0.005)


def _states(pid: int) -> set[str]:
    """Of all threads, as /proc/…/stat has them behind the name, which may contain anything."""
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(stat.read_text().rpartition(") ")[2][:1])
        except (FileNotFoundError, ProcessLookupError):
            pass  # that thread has ended
    return states
