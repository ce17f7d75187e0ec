"""Shell. Wakes whoever waits for a change, at once and without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Changes:
    """One wake-up call for all streams; each then looks whether the change concerns it. Used from the loop only."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Event, None] = {}  # in order, so that a run can be repeated

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """Give an event that is set at each change; clear it before looking, so that no change falls between."""
        event = asyncio.Event()
        self._watchers[event] = None
        try:
            yield event
        finally:
            self._watchers.pop(event)

    def publish(self) -> None:
        for event in self._watchers:
            event.set()
