"""Shell. What the system says about this process's memory, and giving back what is free in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def ram_bytes() -> int:
    """Return what this process may count on: the machine's memory, or its container's share of it."""
    ram = PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(name) as file:  # "max" is no limit
            ram = min(ram, int(file.read()))
    return ram


def used_bytes() -> int:
    """Return what this process alone has in memory; not the files it maps, which the system may drop. Takes 20 µs."""
    _, resident, shared, *_ = os.pread(_statm(os.getpid()), 200, 0).split()
    return (int(resident) - int(shared)) * PAGE_BYTES


@cache
def _statm(pid: int) -> int:
    """Opened once, as it is read each second; by each process that was forked, as it is the opener's."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY)


def give_back() -> None:
    """Return free memory to the system: the allocator keeps what lies between blocks that are still in use.

    Blocks no other thread of Python; takes milliseconds. Nothing happens where the C library cannot do it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
