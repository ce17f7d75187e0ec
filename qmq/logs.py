"""Shell. How our processes log: one line an event, and the same event once a minute."""

from __future__ import annotations

import logging

REPEAT_S = 60.0
REMEMBERED = 1000


class OncePerMinute(logging.Filter):
    """Drops a line that was logged less than a minute ago.

    What fails is tried again several times a second, by us and by everybody who talks to us; an operator needs to read
    it once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.getMessage())
        if record.created - self._said.get(key, 0.0) < REPEAT_S:
            return False
        if len(self._said) >= REMEMBERED:
            self._said.clear()
        self._said[key] = record.created
        return True


def configure() -> None:
    """Log to stderr; called by a process's main."""
    handler = logging.StreamHandler()
    handler.addFilter(OncePerMinute())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, handlers=[handler]
    )
