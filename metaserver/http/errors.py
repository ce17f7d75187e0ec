"""Core. Errors of the HTTP side as one JSON object: a code for programs, a sentence for people, a remedy.

    {"error": {"code": "MISSING_RIGHT", "message": "token 'shop' has the role client; …", "action": "use a token …"}}

Internals never appear in it: no stack trace, no SQL, no path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

INVALID, UNAUTHORIZED, MISSING_RIGHT = "INVALID_REQUEST", "UNAUTHORIZED", "MISSING_RIGHT"
NOT_FOUND, METHOD, REFUSED, TOO_LARGE = "NOT_FOUND", "METHOD_NOT_ALLOWED", "REFUSED", "TOO_LARGE"
TOO_SLOW, NOT_SERVED, UNKNOWN, INTERNAL = "TOO_SLOW", "NOT_SERVED", "OUTCOME_UNKNOWN", "INTERNAL"

STATUS = {
    INVALID: 400,
    UNAUTHORIZED: 401,
    MISSING_RIGHT: 403,
    NOT_FOUND: 404,
    METHOD: 405,
    TOO_SLOW: 408,
    REFUSED: 409,
    TOO_LARGE: 413,
    INTERNAL: 500,
    NOT_SERVED: 503,
    UNKNOWN: 504,
}
"""HTTP status of each code."""

WHAT_TO_DO = {
    INVALID: "correct the request; /api/v1/openapi.json describes it",
    UNAUTHORIZED: "send a valid token in the header X-Api-Token, or as Authorization: Bearer",
    MISSING_RIGHT: "use a token with that role or scope; an admin makes one with AddToken",
    NOT_FOUND: "/api/v1/openapi.json lists the addresses",
    METHOD: "use one of the methods in the header Allow",
    TOO_SLOW: "send the whole request at once",
    REFUSED: "nothing was changed; correct the fault that the message names, then repeat",
    TOO_LARGE: "send less at once",
    INTERNAL: "the metaserver's log has the cause under this reference",
    NOT_SERVED: "nothing was changed; wait, then repeat",
    UNKNOWN: "outcome unknown: check before you repeat it",
}


@dataclass(frozen=True, slots=True)
class HttpError:
    """One error, ready to send."""

    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> bytes:
        error: dict[str, Any] = {"code": self.code, "message": self.message, "action": WHAT_TO_DO[self.code]}
        if self.details:
            error["details"] = self.details
        return to_json({"error": error})


def to_json(content: object) -> bytes:
    """Encode as QMQ does: one line, UTF-8, a newline at the end. Invalid Unicode is escaped."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:
        return (json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n").encode()
