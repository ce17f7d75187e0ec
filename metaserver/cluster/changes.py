"""Shell. Wakes all tasks that wait for a change, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class Changes:
    """One wake-up call for all streams; each then checks whether the change concerns it. Used from the loop only."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Event, object] = {}  # ordered, so that a simulated run repeats

    @contextmanager
    def watch(self, about: object = None) -> Iterator[asyncio.Event]:
        """Return an event that is set at each change. Clear it before reading state, so that no change is missed.

        Args:
            about: leave out changes that name other objects only.
        """
        event = asyncio.Event()
        self._watchers[event] = about
        try:
            yield event
        finally:
            self._watchers.pop(event)

    def publish(self, about: Collection[object] | None = None) -> None:
        """Wake all watchers; with `about`, only those of these objects and those of everything."""
        for event, what in self._watchers.items():
            if about is None or what is None or what in about:
                event.set()
