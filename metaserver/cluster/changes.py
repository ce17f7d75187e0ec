"""Shell. Wakes all tasks that wait for a change, at once and without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class Changes:
    """One wake-up call for all streams; each then looks whether the change concerns it. Used from the loop only."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Event, object] = {}  # in order, so that a run can be repeated

    @contextmanager
    def watch(self, about: object = None) -> Iterator[asyncio.Event]:
        """Give an event that is set at each change; clear it before looking, so that no change falls between.

        Args:
            about: leave out changes that are said to be about others.
        """
        event = asyncio.Event()
        self._watchers[event] = about
        try:
            yield event
        finally:
            self._watchers.pop(event)

    def publish(self, about: Collection[object] | None = None) -> None:
        """Wake all; or, of those who said what they wait for, the ones that are among `about`."""
        for event, what in self._watchers.items():
            if about is None or what is None or what in about:
                event.set()
