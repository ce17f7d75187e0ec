"""Shell. Rows that cannot be understood, perhaps edited by hand: left out, logged once, counted. They stop no other."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("qmq.metaserver")

REMEMBERED_MAX = 10_000


class BadRows:
    """Created with the repository; any thread may call it."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str, str]] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many different ones were met since the start."""
        return len(self._seen)

    def note(self, table: str, key: object, reason: object) -> None:
        row = (table, str(key)[:200], str(reason)[:200])
        with self._lock:
            if row in self._seen or len(self._seen) >= REMEMBERED_MAX:
                return
            self._seen.add(row)
        log.error("row left out, repair it: table=%s key=%r reason=%s", *row)
