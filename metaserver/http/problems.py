"""Core. Says in our words what FastAPI found wrong with a request. Nothing that was sent is repeated but names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qmq.metaserver.actions import Action, Kind, Parameter
from qmq.metaserver.actions.words import unknown_word
from qmq.metaserver.http.models import bounds

PROBLEMS_MAX = 5
"""More are not told at once."""

BODY_WORDS = {
    "json_invalid": "the body is no JSON",
    "missing": "the body is missing",
}


def describe(found: Sequence[Mapping[str, Any]], action: Action | None) -> str:
    """Return one sentence about all that is wrong. `action`: whose parameters they are, if it is one's."""
    missing = [str(one["loc"][1]) for one in found if one["type"] == "missing" and len(one["loc"]) > 1]
    others = [one for one in found if one["type"] != "missing" or len(one["loc"]) == 1]
    texts = [f"{', '.join(missing)}: missing"] if missing else []
    return "; ".join(texts + [_one(problem, action) for problem in others[:PROBLEMS_MAX]])


def _one(problem: Mapping[str, Any], action: Action | None) -> str:
    kind, where = problem["type"], problem["loc"]
    if kind in BODY_WORDS:
        return BODY_WORDS[kind]
    if len(where) == 1:
        return "the body is no JSON object of the type application/json"
    name = str(where[1])[:100]
    parameter = action.parameter(name) if action else None
    if action and not parameter:
        return unknown_word(f"parameter of {action.name}", name, [one.name for one in action.all_parameters])
    if kind == "string_unicode":
        return f"{name} is not valid Unicode"
    if parameter:
        return f"{name} must be {_right(parameter)}"
    return f"{name}: {problem['msg']}"


def _right(parameter: Parameter) -> str:
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
