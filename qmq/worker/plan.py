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
"""Bounds of the wait before a restart, which doubles with each failure in a row."""
STEADY_S = 60.0
"""Run time of a process after which its end counts as a first failure."""
STILL_S = 5.0
"""Gap between looks above which the whole worker must have been stopped, so that silence before does not count."""
FAILURES_MAX = 5
"""Number of failures in a row of one place after which the worker ends, if no process was ever ready."""


class Exit(IntEnum):
    """Exit status of a process and of the worker, for the supervisor above."""

    ENDED = 0
    """On request."""
    FAILED = 1
    CANNOT_START = 2
    """Wrong call or import error, at which a restart does not help."""
    REFUSED = 77
    """The token is rejected (EX_NOPERM)."""


class Processes(Protocol):
    """Processes, by number; implemented by the shell."""

    def start(self) -> int: ...

    def terminate(self, process: int) -> None: ...

    def kill(self, process: int, why: str) -> None: ...


@dataclass
class Place:
    """One of `--processes` places."""

    current: int | None = None
    following: int | None = None
    """Process started by a reload that is not ready yet."""
    began_s: float = 0.0
    failures: int = 0
    due_s: float = 0.0
    """Time of the next start, while the place has no process."""
    is_renewed: bool = False
    """Whether a reload ended the process of the place."""


class Plan:
    """Supervision of all places; the shell calls `look` from time to time.

    Args:
        stop_s: time from the request to end until the kill of a process.
        kill_after_s: time without a report after which a process is killed; infinite for never.
        waits_for_change: whether after an import error the worker waits for the next reload (`--reload`).
    """

    def __init__(
        self,
        count: int,
        processes: Processes,
        *,
        stop_s: float,
        kill_after_s: float = math.inf,
        waits_for_change: bool = False,
    ) -> None:
        self.places: list[Place] = [Place() for _ in range(count)]
        self.restarts: int = 0
        self.exit: Exit | None = None
        """Set once the worker ends; it has ended when no process is left."""
        self._processes = processes
        self._stop_s = stop_s
        self._kill_after_s = kill_after_s
        self._waits_for_change = waits_for_change
        self._kill_s: dict[int, float] = {}
        """Time of the kill, for each process that was requested to end."""
        self._reported_s: dict[int, float] = {}
        """Time of the start or last report, for each process that was not killed."""
        self._looked_s = math.inf
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
        """Start the processes that are due; kill those that hang or do not end."""
        if now_s - self._looked_s >= STILL_S:
            self._reported_s = dict.fromkeys(self._reported_s, now_s)
        self._looked_s = now_s
        for process, silent_s in self.silence(now_s).items():
            if silent_s >= self._kill_after_s:
                self._kill(process, f"no report for {silent_s:.0f} s: its event loop or its import blocks")
            elif now_s >= self._kill_s.get(process, math.inf):
                self._kill(process, f"not ended within {self._stop_s:g} s")
        if self.exit is not None:
            return
        for place in self.places:
            if place.current is None and now_s >= place.due_s:
                place.current, place.began_s = self._start(now_s), now_s

    def reported(self, process: int, now_s: float) -> None:
        """Record that a process has reported, so its event loop runs."""
        if process in self._reported_s:
            self._reported_s[process] = now_s

    def silence(self, now_s: float) -> dict[int, float]:
        """Return the seconds since the last report of each process, or since its start; from any thread."""
        return {process: now_s - at_s for process, at_s in dict(self._reported_s).items()}

    def ready(self, process: int, now_s: float) -> None:
        """Record that a process is connected. A reload then ends its predecessor and continues."""
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
                self._leaving.add(place.current)
                self._end(place.current, now_s)
            place.current, place.failures = process, 0
        if not any(other.following or other.is_renewed for other in self.places if other is not place):
            place.is_renewed = False
            self._reload_next(now_s)

    def exited(self, process: int, status: int, now_s: float) -> None:
        """Record that a process has ended with this exit status, which is negative after a signal."""
        place = self._place_of(process)
        self._ready.discard(process)
        self._leaving.discard(process)
        for times in (self._kill_s, self._reported_s):
            times.pop(process, None)
        if place is None:
            return
        if place.following == process:  # the reload has failed; the old processes continue
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
            for process in self.running:
                self._kill(process, "second request to end")
            return
        self.exit = status
        for process in self.running - self._kill_s.keys():
            self._end(process, now_s)

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
                self._end(place.current, now_s)
            else:
                place.following = self._start(now_s)
            return

    def _start(self, now_s: float) -> int:
        process = self._processes.start()
        self._reported_s[process] = now_s
        return process

    def _end(self, process: int, now_s: float) -> None:
        self._kill_s[process] = now_s + self._stop_s
        self._processes.terminate(process)

    def _kill(self, process: int, why: str) -> None:
        self._reported_s.pop(process, None)
        if self.exit is Exit.ENDED:
            self.exit = Exit.FAILED
        self._processes.kill(process, why)

    def _place_of(self, process: int) -> Place | None:
        return next((place for place in self.places if process in (place.current, place.following)), None)
