"""Core. Reads what a metaserver answers: QMQ's three styles, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """What a command ends with."""

    DONE = 0
    REFUSED = 1
    """Nothing was changed, for the reason shown."""
    USAGE = 2
    UNREACHABLE = 3
    """Nothing was changed; the metaserver, or something that it needs, does not answer."""
    UNKNOWN = 4
    """It was done or not; look before repeating."""


_STATUS = {0: Exit.DONE, -1: Exit.REFUSED, -2: Exit.UNKNOWN, -3: Exit.UNREACHABLE}
"""The field `status` of an answer."""
_HTTP_STATUS = {429: Exit.UNREACHABLE, 503: Exit.UNREACHABLE, 500: Exit.UNKNOWN, 504: Exit.UNKNOWN}
"""Of an error that the metaserver words itself; others are refusals."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an action."""

    exit: Exit
    message: str
    data: Any
    raw: Any
    """The answer as it came."""


def read_answer(http_status: int, raw: Any) -> Answer | None:
    """Tell what an answer means; None: no metaserver answers like this.

    QMQ's styles: standard, `{"status", "message", "data"}`; map, `{"data"}` or `{"error"}`; raw, the bare result.
    """
    if http_status != 200:
        return _error(http_status, raw)
    if isinstance(raw, list):
        return Answer(Exit.DONE, "", raw, raw)
    if not isinstance(raw, dict):
        return None
    if "error" in raw:
        return Answer(_STATUS.get(raw.get("status", -1), Exit.REFUSED), str(raw["error"]), raw.get("data"), raw)
    if type(raw.get("status")) is int:
        exit_status = _STATUS.get(raw["status"], Exit.REFUSED)
        return Answer(exit_status, str(raw.get("message") or ""), raw.get("data"), raw)
    return Answer(Exit.DONE, "", raw["data"] if set(raw) == {"data"} else raw, raw)


def _error(http_status: int, raw: Any) -> Answer | None:
    """Read an error of the HTTP side: `{"error": {"code", "message", "action"}}`, or QMQ's envelope."""
    if not isinstance(raw, dict):
        return None
    error = raw.get("error", raw)
    if not isinstance(error, dict) or not error.get("message"):
        return None
    message = ": ".join(filter(None, (str(error["message"]), str(error.get("action") or ""))))
    return Answer(_HTTP_STATUS.get(http_status, Exit.REFUSED), message, None, raw)
