"""Shell. Which threads of a broker get a core first: the loop and the disk's come before those that read.

Linux lets a thread that runs finish its slice, 1.4 ms on two cores, whoever wakes up meanwhile; only who asked for
shorter slices comes at once (6.12 and newer). A loop works for some ten microseconds and waits, several times for a
message on each copy. Where others keep the cores busy, its own threads that read a backlog among them, the p99 of a
message was 1.4 times as long without short slices, and 1.1 times with threads that read and are not nice. A shorter
slice is no larger share: who asks for it is interrupted sooner, too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress

SLICE_NS = 100_000
"""The shortest that Linux gives."""
READ_NICE = 10
"""A tenth of the share of the loop, where both want a core. They have all of it where nobody else does."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""The call's number: few C libraries know it by name."""
_RESET_ON_FORK = 1
"""Threads that this one starts are as all others. They are not favoured if it is, so such a one goes without."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Size, scheduler, flags, nice, priority, slice in ns, and two that are for real time."""


def come_first() -> None:
    """Ask for short slices, for this thread and not for those it starts, unless `nice` favours it.

    Nothing happens on another system, or where somebody chose another scheduler for this process; an older Linux
    takes it and goes on as before."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    with suppress(OSError):  # musl has no such calls, and a sandbox may refuse them
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        flags = _RESET_ON_FORK if nice >= 0 else 0
        asked = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, flags, nice, 0, SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, asked, 0)


def stand_back() -> None:
    """Be nice, for this thread alone; nicer than that, if the process is."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):  # a sandbox may refuse it; a pool whose threads cannot begin would read nothing more
            os.setpriority(os.PRIO_PROCESS, 0, max(READ_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
