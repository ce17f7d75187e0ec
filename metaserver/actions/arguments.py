"""Core. Arguments of a request, checked against the parameters of its action before the database is used."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from qmq.commands.action import IF_PLAN, Action, Kind, Parameter
from qmq.errors import InvalidRequest
from qmq.metaserver.model import ALL_SUBJECTS
from qmq.subjects import check_name

ACTION_ARGUMENT = "action"
NUMBER_DIGITS_MAX = 19


class Arguments(Mapping[str, str]):
    """Checked arguments of one request, with defaults for parameters that are not given."""

    def __init__(self, values: Mapping[str, str], given: frozenset[str]) -> None:
        self._values = values
        self._given = given

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def is_given(self, name: str) -> bool:
        """Return whether the parameter was given and is not empty."""
        return name in self._given

    def flag(self, name: str) -> bool:
        return self._values.get(name) == "true"

    def number(self, name: str) -> int:
        return int(self._values[name] or 0)

    def names(self, name: str) -> list[str]:
        return split_names(self._values[name])


def read_arguments(action: Action, given: Mapping[str, str]) -> Arguments:
    """Check the arguments of a request against the parameters of its action.

    Raises:
        InvalidRequest, InvalidName: names the argument, its fault and the remedy.
    """
    given = {name: text for name, text in given.items() if name != ACTION_ARGUMENT}
    for name in given:
        if action.parameter(name) is None:
            raise InvalidRequest(unknown_word(f"parameter of {action.name}", name, _names(action)))
    values = {}
    for parameter in action.all_parameters:
        text = given.get(parameter.name, "") or parameter.default
        if not text and parameter.required:
            raise InvalidRequest(f"{parameter.name} is empty; it is {parameter.description}")
        values[parameter.name] = _check(parameter, text) if text else ""
    return Arguments(values, frozenset(name for name, text in given.items() if text))


def unknown_word(noun: str, word: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown word, with the nearest known one."""
    names = list(known)
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word[:100].lower(), folded, n=1)
    hint = f"did you mean {folded[near[0]]}?" if near else f"known are {', '.join(names)}"
    return f"{word[:100]!r} is no {noun}; {hint}"


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def recorded(action: Action, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments for the audit trail: as given, without secrets and whole documents."""
    shown = {}
    for parameter in action.all_parameters:
        if arguments.is_given(parameter.name) and parameter.name != IF_PLAN:
            hidden = parameter.secret or parameter.kind is Kind.JSON
            shown[parameter.name] = "(not recorded)" if hidden else arguments[parameter.name]
    return shown


def _names(action: Action) -> list[str]:
    return [parameter.name for parameter in action.all_parameters]


def _check(parameter: Parameter, text: str) -> str:
    name, kind = parameter.name, parameter.kind
    if len(text) > parameter.chars_max:
        raise InvalidRequest(f"{name} is longer than {parameter.chars_max} characters")
    if "\0" in text:
        raise InvalidRequest(f"{name} contains a zero character")
    if kind is Kind.NAME or (kind is Kind.PATTERN and text != ALL_SUBJECTS):
        return check_name(name, text)
    if kind is Kind.NAMES:
        for part in split_names(text):
            check_name(name, part)
    elif kind in (Kind.NUMBER, Kind.PORT):
        _check_number(parameter, text)
    elif kind is Kind.FLAG:
        if text.lower() not in ("true", "false"):
            raise InvalidRequest(f"{name} {text!r} is neither true nor false")
        return text.lower()
    elif kind is Kind.CHOICE and text not in parameter.choices:
        raise InvalidRequest(f"{name} {text!r} is none of {', '.join(parameter.choices)}")
    elif kind is Kind.JSON:
        _check_json(name, text)
    return text


def _check_number(parameter: Parameter, text: str) -> None:
    least, most = (1, 65535) if parameter.kind is Kind.PORT else (parameter.least, parameter.most)
    noun = "port" if parameter.kind is Kind.PORT else "number"
    if not text.isascii() or not text.isdigit() or len(text) > NUMBER_DIGITS_MAX or not least <= int(text) <= most:
        raise InvalidRequest(f"{parameter.name} {text[:20]!r} is no {noun}; it is a number from {least} to {most}")


def _check_json(name: str, text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no JSON document: {error}") from None
