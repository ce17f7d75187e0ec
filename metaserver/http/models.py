"""Core. Contents of HTTP requests and answers: parameters of each action as pydantic models, and errors as JSON.

An error is one object: a code for programs, a sentence for people, a remedy. Internals never appear in it: no stack
trace, no SQL, no path.

    {"error": {"code": "MISSING_RIGHT", "message": "token 'shop' has the role client; …", "action": "use a token …"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from qmq.metaserver.actions import Action, Kind, Parameter
from qmq.metaserver.actions.arguments import NUMBER_DIGITS_MAX, unknown_word

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

REMEDIES = {
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
        error: dict[str, Any] = {"code": self.code, "message": self.message, "action": REMEDIES[self.code]}
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


NUMBER_MAX = 2**53
"""Larger integers lose digits in some JSON readers."""

_FLAGS = {"true": True, "false": False}


class ErrorBody(BaseModel):
    """An error, for programs and for people."""

    code: Literal[tuple(sorted(STATUS))]  # type: ignore[valid-type]
    message: str
    action: str
    details: dict[str, Any] = Field(default_factory=dict)


class Error(BaseModel):
    """Body of every error."""

    error: ErrorBody


class Done(BaseModel):
    """Body of an action's answer."""

    data: Any
    message: str


@cache  # building a model takes milliseconds, and a process may have several metaservers
def body_model(action: Action) -> type[BaseModel]:
    """Return the model of an action's JSON body, with typed values."""
    return _model(action, action.name, is_text=False)


@cache
def query_model(action: Action) -> type[BaseModel]:
    """Return the model of an action's query, with numbers and flags as text."""
    return _model(action, f"{action.name}Query", is_text=True)


def arguments_of(given: BaseModel) -> dict[str, str]:
    """Return the given values as arguments of the action."""
    return {name: _as_text(value) for name, value in given.model_dump(exclude_unset=True).items()}


def bounds(parameter: Parameter) -> tuple[int, int]:
    """Return the least and the greatest value of a number."""
    return (1, 65535) if parameter.kind is Kind.PORT else (parameter.least, min(parameter.most, NUMBER_MAX))


def _model(action: Action, name: str, *, is_text: bool) -> type[BaseModel]:
    fields: dict[str, Any] = {
        parameter.name: (_type(parameter, is_text), _field(parameter)) for parameter in action.all_parameters
    }
    config = ConfigDict(strict=True, extra="forbid", field_title_generator=lambda name, _: name)
    return create_model(name, __config__=config, __doc__=action.summary, **fields)


def _type(parameter: Parameter, is_text: bool) -> Any:
    """Return the type of a parameter. The action itself checks the rules of names, and gives the reason."""
    match parameter.kind:
        case Kind.FLAG:
            return Annotated[bool, BeforeValidator(_read_flag)] if is_text else bool
        case Kind.NUMBER | Kind.PORT:
            least, most = bounds(parameter)
            return Annotated[int, Field(ge=least, le=most), BeforeValidator(_read_number if is_text else _whole)]
        case Kind.CHOICE:
            return Literal[parameter.choices]
        case Kind.JSON:
            return dict[str, Any]
    return Annotated[str, Field(min_length=1 if parameter.required else None, max_length=parameter.chars_max)]


def _field(parameter: Parameter) -> Any:
    if parameter.required:
        return Field(description=parameter.sent_help)
    if not parameter.default:  # None differs from null, which the document would name
        return Field(default_factory=lambda: None, description=parameter.sent_help)
    is_number = parameter.kind in (Kind.NUMBER, Kind.PORT)
    default = int(parameter.default) if is_number else _FLAGS.get(parameter.default, parameter.default)
    return Field(default=default, description=parameter.sent_help)


def _whole(value: object) -> object:
    """Return a whole number as an integer: JSON has one kind of numbers, so 1.0 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_number(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX else text


def _read_flag(text: str) -> object:
    return _FLAGS.get(text, text)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict) else str(value)


PROBLEMS_MAX = 5
"""Number of problems reported at once."""

BODY_WORDS = {
    "json_invalid": "the body is no JSON",
    "missing": "the body is missing",
}


def describe(problems: Sequence[Mapping[str, Any]], action: Action | None) -> str:
    """Return one sentence about all problems. `action`: the action with these parameters, if any."""
    missing = [str(error["loc"][1]) for error in problems if error["type"] == "missing" and len(error["loc"]) > 1]
    others = [error for error in problems if error["type"] != "missing" or len(error["loc"]) == 1]
    texts = [f"{', '.join(missing)}: missing"] if missing else []
    return "; ".join(texts + [_problem_text(problem, action) for problem in others[:PROBLEMS_MAX]])


def _problem_text(problem: Mapping[str, Any], action: Action | None) -> str:
    kind, where = problem["type"], problem["loc"]
    if kind in BODY_WORDS:
        return BODY_WORDS[kind]
    if len(where) == 1:
        return "the body is no JSON object of the type application/json"
    name = str(where[1])[:100]
    parameter = action.parameter(name) if action else None
    if action and not parameter:
        return unknown_word(
            f"parameter of {action.name}", name, [parameter.name for parameter in action.all_parameters]
        )
    if kind == "string_unicode":
        return f"{name} is not valid Unicode"
    if parameter:
        return f"{name} must be {_valid_form(parameter)}"
    return f"{name}: {problem['msg']}"


def _valid_form(parameter: Parameter) -> str:
    match parameter.kind:
        case Kind.FLAG:
            return "boolean: true or false"
        case Kind.NUMBER | Kind.PORT:
            least, most = bounds(parameter)
            return f"integer, from {least} to {most}"
        case Kind.CHOICE:
            return f"one of {', '.join(parameter.choices)}"
        case Kind.JSON:
            return "object"
    return f"string, of {1 if parameter.required else 0} to {parameter.chars_max} characters"
