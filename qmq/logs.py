"""Shell. How our processes log: one line an event, as text or JSON, and no cause more often than it can be read.

    text   2026-01-31T12:00:00.123Z WARNING qmq.server slave fenced term=7 offset=81920
    json   {"time": …, "level": …, "logger": …, "message": …, "fields": {"term": "7", "offset": "81920"}}

What fails is tried again several times a second, by us and by everybody who talks to us. So the same text is logged
once in `REPEAT_S`, and of one cause, a place in the code that logs, `LINES_MAX` lines; the next line of that cause says
how many were left out.

SIGUSR1 changes the level while the process runs: everything is logged, until the next one takes that back.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import Any

REPEAT_S = 60.0
REMEMBERED_MAX = 1000
LINES_MAX = 100
"""Of one cause in `REPEAT_S`: 100 brokers that start at once are logged whole."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")

_FIELD = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*)=(\S+)")


class Bounded(logging.Filter):
    """Drops what was logged already, and what one cause has too much of."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._said: dict[tuple[str, str], float] = {}
        self._causes: dict[tuple[str, int], tuple[float, int, int]] = {}
        """Of each place: when its time began, lines since then, lines left out."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a value's own text fails: handlers say so, and raise nothing where it was logged
            return True
        text, now = (record.name, message), record.created
        if now - self._said.get(text, 0.0) < REPEAT_S:
            return False
        cause = record.pathname, record.lineno
        began, lines, left_out = self._causes.get(cause, (now, 0, 0))
        if now - began >= REPEAT_S:
            began, lines = now, 0
        if lines >= LINES_MAX:
            self._causes[cause] = began, lines, left_out + 1
            return False
        if left_out:
            record.msg, record.args = f"{message} left_out={left_out}", ()
        for known in (self._said, self._causes):
            if len(known) >= REMEMBERED_MAX:
                known.clear()
        self._said[text] = now
        self._causes[cause] = began, lines + 1, 0
        return True


LIBRARY = Bounded()
"""Of what a process uses of this library: its handlers are the application's, so each logger has the bound."""


def bounded(name: str) -> logging.Logger:
    """Return the logger of a module that applications use."""
    logger = logging.getLogger(name)
    logger.addFilter(LIBRARY)
    return logger


class Text(logging.Formatter):
    """One line of text, whatever the message or the traceback has in it."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}"
        if record.exc_info:
            line += f" traceback={self.formatException(record.exc_info)}"
        return line.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if "\n" in line else line


class Json(logging.Formatter):
    """One JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "fields": dict(_FIELD.findall(message)),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


def configure(level: str = "INFO", format: str = "text") -> None:
    """Log to stderr; called by a process's main, in its first thread, once its settings are read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Bounded())
    handler.setFormatter(Json() if format == "json" else Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for chatty in ("alembic", "uvicorn", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    signal.signal(signal.SIGUSR1, partial(_change_level, level))


def _change_level(configured: str, number: int, frame: FrameType | None) -> None:
    root = logging.getLogger()
    level = configured if root.level == logging.DEBUG else "DEBUG"
    root.setLevel(level)
    root.handle(root.makeRecord("qmq", logging.INFO, __file__, 0, "log level is now %s, by SIGUSR1", (level,), None))


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
