"""Core. Supervision of a worker's processes: start, restart with back-off, graceful reload, end and exit status.

A place holds one process. A reload goes from place to place: the new process starts, and once it is ready the old one
ends. Processes with fixed consumer ids would replace each other, so there the old one ends first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

RESTART_S_MIN, RESTART_S_MAX = 0.5, 30.0
"""Wait before a restart; doubled with each failure in a row."""
STEADY_S = 60.0
"""Life of a process after which its end counts as a first failure."""
FAILURES_MAX = 5
"""Failures in a row of one place, while no process was ever ready, after which the worker ends."""


class Exit(IntEnum):
    """Exit status of a process and of the worker, for the supervisor above."""

    ENDED = 0
    """On request."""
    FAILED = 1
    CANNOT_START = 2
    """Wrong call or import error: a restart does not help."""
    REFUSED = 77
    """The token is rejected (EX_NOPERM)."""


class Processes(Protocol):
    """Processes of the shell, by number."""

    def start(self) -> int: ...

    def terminate(self, process: int) -> None: ...

    def kill(self, process: int) -> None: ...


@dataclass
class Place:
    """One of `--processes` places."""

    current: int | None = None
    following: int | None = None
    """Process of a reload that is not ready yet."""
    began_s: float = 0.0
    failures: int = 0
    due_s: float = 0.0
    """Time of the next start, without a process."""
    is_renewed: bool = False
    """Whether a reload ended the process of the place."""


class Plan:
    """Supervision of all places; the shell calls `look` from time to time.

    Args:
        waits_for_change: an import error keeps the worker waiting for the next reload (`--reload`).
    """

    def __init__(self, count: int, processes: Processes, *, stop_s: float, waits_for_change: bool = False) -> None:
        self.places = [Place() for _ in range(count)]
        self.restarts = 0
        self.exit: Exit | None = None
        """Set once the worker ends; it has ended when no process is left."""
        self._processes = processes
        self._stop_s = stop_s
        self._waits_for_change = waits_for_change
        self._kill_s = math.inf
        self._ready: set[int] = set()
        self._leaving: set[int] = set()
        self._has_been_ready = False
        self._to_reload: list[Place] = []
        self.is_unique = False
        """Whether a second process of a place would replace the first one."""

    @property
    def running(self) -> set[int]:
        """Processes that exist, those that end included."""
        held = {process for place in self.places for process in (place.current, place.following)}
        return {process for process in held | self._leaving if process is not None}

    @property
    def has_ended(self) -> bool:
        return self.exit is not None and not self.running

    def look(self, now_s: float) -> None:
        """Start the processes that are due; kill those that do not end."""
        if self.exit is not None:
            if now_s >= self._kill_s:
                self._kill()
            return
        for place in self.places:
            if place.current is None and now_s >= place.due_s:
                place.current, place.began_s = self._processes.start(), now_s

    def ready(self, process: int, now_s: float) -> None:
        """Note that a process is connected; a reload ends its predecessor and goes on."""
        if process in self._ready:
            return
        self._ready.add(process)
        self._has_been_ready = True
        place = self._place_of(process)
        if place is None or self.exit is not None:
            return
        if place.following == process:
            place.following, place.began_s = None, now_s
            if place.current is not None:
                self._leave(place.current)
            place.current, place.failures = process, 0
        if not any(other.following or other.is_renewed for other in self.places if other is not place):
            place.is_renewed = False
            self._reload_next(now_s)

    def exited(self, process: int, status: int, now_s: float) -> None:
        """Note that a process has ended with this exit status; negative after a signal."""
        place = self._place_of(process)
        self._ready.discard(process)
        self._leaving.discard(process)
        if place is None:
            return
        if place.following == process:  # the reload has failed; the old processes go on
            place.following = None
            self._to_reload.clear()
            return
        place.current = None
        if self.exit is not None:
            return
        if place.is_renewed:
            place.due_s = now_s
            return
        self._failed(place, status, now_s)

    def _failed(self, place: Place, status: int, now_s: float) -> None:
        self.restarts += 1
        place.failures = 1 if now_s - place.began_s >= STEADY_S else place.failures + 1
        place.due_s = now_s + min(RESTART_S_MIN * 2 ** (place.failures - 1), RESTART_S_MAX)
        if status == Exit.CANNOT_START and self._waits_for_change:
            place.due_s = math.inf
        elif status == Exit.CANNOT_START and not self._has_been_ready:
            self.stop(now_s, Exit.CANNOT_START)
        elif status == Exit.REFUSED:
            self.stop(now_s, Exit.REFUSED)
        elif place.failures >= FAILURES_MAX and not self._has_been_ready:
            self.stop(now_s, Exit.FAILED)

    def stop(self, now_s: float, status: Exit = Exit.ENDED) -> None:
        """End all processes, and with them the worker; a second call kills them."""
        if self.exit is not None:
            self._kill()
            return
        self.exit, self._kill_s = status, now_s + self._stop_s
        for process in self.running - self._leaving:
            self._processes.terminate(process)

    def reload(self, now_s: float) -> None:
        """Replace all processes, one place after the other."""
        if self.exit is None:
            self._to_reload = list(self.places)
            if not any(place.following for place in self.places):
                self._reload_next(now_s)

    def _reload_next(self, now_s: float) -> None:
        while self._to_reload:
            place = self._to_reload.pop(0)
            if place.current is None:
                place.due_s, place.failures = now_s, 0
                continue
            if self.is_unique:
                place.is_renewed = True
                self._processes.terminate(place.current)
            else:
                place.following = self._processes.start()
            return

    def _leave(self, process: int) -> None:
        self._leaving.add(process)
        self._processes.terminate(process)

    def _kill(self) -> None:
        if self.exit is Exit.ENDED and self.running:
            self.exit = Exit.FAILED
        for process in self.running:
            self._processes.kill(process)

    def _place_of(self, process: int) -> Place | None:
        return next((place for place in self.places if process in (place.current, place.following)), None)
