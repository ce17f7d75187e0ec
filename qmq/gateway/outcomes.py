"""Core. Errors of the gateway: an HTTP status, a code for programs, a sentence for people, a remedy.

    {"error": {"code": "MISSING_RIGHT", "message": "token 'shop' may not …", "remedy": "use a token …"}}

The class of qmq's error determines all of them, so that callers get the outcomes of the native protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from qmq.client.batch import Outcome, Receipt
from qmq.errors import (
    AccessError,
    AskAnotherBroker,
    CallError,
    ClientClosed,
    MessageTooLarge,
    MissingRight,
    NotServed,
    OutcomeUnknown,
    PostponesTooMuch,
    QmqError,
    QueueFull,
    SubjectFull,
)


class Code(StrEnum):
    """Codes of errors."""

    INVALID = "INVALID_REQUEST"
    UNAUTHORIZED = "UNAUTHORIZED"
    MISSING_RIGHT = "MISSING_RIGHT"
    NOT_FOUND = "NOT_FOUND"
    METHOD = "METHOD_NOT_ALLOWED"
    TOO_SLOW = "TOO_SLOW"
    DECIDED = "ALREADY_DECIDED"
    OTHER_TERMS = "OTHER_TERMS"
    GONE = "HANDLE_GONE"
    TOO_LARGE = "TOO_LARGE"
    REPEAT_DIFFERS = "REPEAT_DIFFERS"
    LIMIT = "LIMIT_REACHED"
    INTERNAL = "INTERNAL"
    NOT_SERVED = "NOT_SERVED"
    UNKNOWN = "OUTCOME_UNKNOWN"


STATUS = {
    Code.INVALID: 400,
    Code.UNAUTHORIZED: 401,
    Code.MISSING_RIGHT: 403,
    Code.NOT_FOUND: 404,
    Code.METHOD: 405,
    Code.TOO_SLOW: 408,
    Code.DECIDED: 409,
    Code.OTHER_TERMS: 409,
    Code.GONE: 410,
    Code.TOO_LARGE: 413,
    Code.REPEAT_DIFFERS: 422,
    Code.LIMIT: 429,
    Code.INTERNAL: 500,
    Code.NOT_SERVED: 503,
    Code.UNKNOWN: 504,
}
"""HTTP status of each code."""

REMEDIES = {
    Code.INVALID: "Correct the request; /openapi.json describes it.",
    Code.UNAUTHORIZED: "Send a valid token as Authorization: Bearer.",
    Code.MISSING_RIGHT: "Use a token with that right; an admin makes one with AddToken.",
    Code.NOT_FOUND: "/openapi.json lists the addresses.",
    Code.METHOD: "Use a method of the header Allow.",
    Code.TOO_SLOW: "Send the whole request at once.",
    Code.DECIDED: "Nothing was changed. The first decision on a message counts.",
    Code.OTHER_TERMS: "Use another client id, or end this session with DELETE first.",
    Code.GONE: "The message is delivered again, unless its decision was stored before. Handle repeats by its id.",
    Code.TOO_LARGE: "Send less at once, or raise the limit on the gateway and the brokers.",
    Code.REPEAT_DIFFERS: "Use a new key for another message.",
    Code.LIMIT: "Wait, or decide messages and end sessions first.",
    Code.INTERNAL: "The gateway's log has the cause under this reference.",
    Code.NOT_SERVED: "Nothing was changed. Wait, then repeat the request.",
    Code.UNKNOWN: "The request may have been done. Repeat it with the same id or key; consumers may see a repeat.",
}
assert STATUS.keys() == REMEDIES.keys() == set(Code)

_CODES: tuple[tuple[type[QmqError], Code], ...] = (
    (MissingRight, Code.MISSING_RIGHT),
    (AccessError, Code.UNAUTHORIZED),
    (MessageTooLarge, Code.TOO_LARGE),
    (ClientClosed, Code.NOT_SERVED),
    (SubjectFull, Code.LIMIT),
    (QueueFull, Code.LIMIT),
    (PostponesTooMuch, Code.LIMIT),
    (CallError, Code.INVALID),
    (NotServed, Code.NOT_SERVED),
    (AskAnotherBroker, Code.NOT_SERVED),
    (OutcomeUnknown, Code.UNKNOWN),
)
"""Class of an error -> code. The first class that fits determines the code."""


class Refused(Exception):
    """Exception that ends a request with an error."""

    def __init__(self, code: Code, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.error = HttpError(code, message, headers or {})


@dataclass(frozen=True, slots=True)
class HttpError:
    """One error, ready to send."""

    code: Code
    message: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "remedy": REMEDIES[self.code]}

    def all_headers(self) -> dict[str, str]:
        """Return the error's headers, with those of its code."""
        return headers_of(self.code) | self.headers


def headers_of(code: Code) -> dict[str, str]:
    if code is Code.UNAUTHORIZED:
        return {"WWW-Authenticate": 'Bearer realm="qmq"'}
    return {"Retry-After": "1"} if code in (Code.NOT_SERVED, Code.LIMIT) else {}


def code_of(error: QmqError) -> Code:
    """Return the code of an error by the table, or NOT_SERVED for an unexpected error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.NOT_SERVED)


def error_of(error: QmqError) -> HttpError:
    return HttpError(code_of(error), str(error))


def error_of_receipt(receipt: Receipt) -> HttpError | None:
    """Return the error of a message that is not known to be stored, or None if it is stored."""
    if receipt.outcome is Outcome.STORED:
        return None
    if receipt.outcome is Outcome.UNKNOWN or receipt.error is None:
        return HttpError(Code.UNKNOWN, receipt.reason)
    code = code_of(receipt.error)
    return HttpError(Code.NOT_SERVED if code is Code.UNKNOWN else code, receipt.reason)


_WORST_FIRST = (Code.UNKNOWN, Code.NOT_SERVED, Code.LIMIT)


def worst(codes: list[Code]) -> Code | None:
    """Return the code of a request with several outcomes: one that a repeat may change, or else the first; None if all
    are done.
    """
    return next((code for code in _WORST_FIRST if code in codes), codes[0] if codes else None)
