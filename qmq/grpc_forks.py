"""Shell. Use of gRPC beside forks: a process that forks must not run gRPC's fork handlers.

gRPC's core registers handlers with `pthread_atfork`, unless `GRPC_ENABLE_FORK_SUPPORT` is false when gRPC is imported.
When another thread is inside gRPC, the handler that runs before a fork stops nothing. The handler in the child begins
gRPC's threads all the same; they find an inconsistent state, and the child ends with SIGSEGV. Four of five children of
a process with an open route watch did. Without handlers, the child has no thread of gRPC, and nothing touches gRPC's
state.
"""

from __future__ import annotations

import os
import sys

SETTING = "GRPC_ENABLE_FORK_SUPPORT"
_OFF = frozenset({"0", "f", "false", "n", "no"})
"""Texts that gRPC's core reads as false."""


def _turn_off() -> bool:
    """Turn the handlers off, unless gRPC is imported already or the variable is set; return whether they are off."""
    if "grpc._cython.cygrpc" not in sys.modules:
        os.environ.setdefault(SETTING, "false")
    return os.environ.get(SETTING, "").lower() in _OFF


HAS_HANDLERS = not _turn_off()
_grpc_process: int | None = None


def grpc_begins() -> None:
    """Record that this process has gRPC's threads from now on."""
    global _grpc_process
    _grpc_process = os.getpid()


def why_no_grpc() -> str:
    """Return the reason why this process must not use gRPC, or "" if it may."""
    if HAS_HANDLERS:
        return f"gRPC was imported with its fork handlers on. Import qmq before grpc, or set {SETTING}=false"
    if _grpc_process not in (None, os.getpid()):  # it has gRPC's locks without the threads: calls never return
        return "this process was forked from one that uses gRPC"
    return ""
