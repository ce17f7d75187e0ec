"""Shell. Logging of qmq's processes: one line per event, as text or JSON, with a bound on repetitions.

    text   2026-01-31T12:00:00.123Z WARNING qmq.server slave fenced term=7 offset=81920
    json   {"time": …, "level": …, "logger": …, "message": …, "fields": {"term": "7", "offset": "81920"}}

Failures are retried several times a second, here and in every peer. So the same text is logged once in `REPEAT_S`, and
each cause, a place in the code that logs, gets `LINES_MAX` lines. Its next line states the number of dropped ones.

SIGUSR1 changes the level of a running process: everything is logged until the next SIGUSR1.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

REPEAT_S = 60.0
REMEMBERED_MAX = 1000
LINES_MAX = 100
"""Lines per cause in `REPEAT_S`: enough for 100 brokers that start at once."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")

_FIELD = re.compile(r"(?:^|\s)([a-z][a-z0-9_]*)=(\S+)")


class Bounded(logging.Filter):
    """Filter that drops repeated lines, and lines beyond the bound of their cause."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        """Reset all counts."""
        self._logged: dict[tuple[str, str], float] = {}
        self._causes: dict[tuple[str, int], tuple[float, int, int]] = {}
        """Place in the code -> begin of its period, lines since then, dropped lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:  # a value's __str__ fails: handlers report that, and the code that logs gets no error
            return True
        text, now = (record.name, message), record.created
        if now - self._logged.get(text, 0.0) < REPEAT_S:
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
        for known in (self._logged, self._causes):
            if len(known) >= REMEMBERED_MAX:
                known.clear()
        self._logged[text] = now
        self._causes[cause] = began, lines + 1, 0
        return True


HANDLED: ContextVar[Sequence[Any]] = ContextVar("messages of the running handler", default=())
"""Received messages; set by listeners for each call. Tasks and threads of a handler inherit it."""
MESSAGE_FIELDS = ("message_id", "subject", "group", "attempt")


class MessageFields(logging.Filter):
    """Filter that adds the handled message (of a list, the first one) to each record that a handler logs, as the
    attributes of `MESSAGE_FIELDS`. Other records get empty texts.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        values: Sequence[object] = ("",) * len(MESSAGE_FIELDS)
        if taken := HANDLED.get():
            first = taken[0]
            with suppress(Exception):  # bytes of a foreign producer have no id
                values = first.id, first.subject, first.group, first.times
        for name, value in zip(MESSAGE_FIELDS, values):
            record.__dict__.setdefault(name, value)
        return True


LIBRARY = Bounded()
"""Filter of library modules. Their log handlers are the application's, so each logger has the bound."""


def bounded(name: str) -> logging.Logger:
    """Return the logger of a module used by applications."""
    logger = logging.getLogger(name)
    logger.addFilter(LIBRARY)
    return logger


class Text(logging.Formatter):
    """Formatter of an event as one line of text, for any content of message or traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {record.name} {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in _message_fields(record).items())
        if record.exc_info:
            line += f" traceback={self.formatException(record.exc_info)}"
        return line.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if "\n" in line else line


class Json(logging.Formatter):
    """Formatter of an event as one JSON object in a line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            "fields": dict(_FIELD.findall(message)) | _message_fields(record),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, ensure_ascii=False)


def _message_fields(record: logging.LogRecord) -> dict[str, str]:
    """Return the fields of `MessageFields`, unless the message has them itself."""
    if not getattr(record, "message_id", "") or "id=" in record.getMessage():
        return {}
    return {name: str(getattr(record, name)) for name in MESSAGE_FIELDS}


def configure(level: str = "INFO", format: str = "text") -> None:
    """Log to stderr. Called by a process's main, in its first thread, once its settings are read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Bounded())
    handler.addFilter(MessageFields())
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


def retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task whose result nothing needs, which asyncio would log. For `add_done_callback`."""
    if not task.cancelled():
        task.exception()


async def shielded(task: asyncio.Future[T]) -> T:
    """Return the result of a task that continues if the caller is cancelled. asyncio does not log its error then.

    `asyncio.shield` leaves such an error to asyncio, and logs it itself from Python 3.14 on.
    """
    task.add_done_callback(retrieve_error)
    await asyncio.wait([task])
    return task.result()
