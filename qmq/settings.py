"""Core. Settings of a process: one frozen dataclass, read from a TOML file and the environment, checked as a whole.

A field is declared with `setting(default, unit=…, why=…, least=…, most=…)`. The file has it under its own name, the
environment as `<PREFIX>_<NAME>` in capitals; `<PREFIX>_<NAME>_FILE` names the file of a secret. All complaints are
reported together.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from qmq.access import Token, TokenFile, read_token_file
from qmq.errors import AccessError, CallError
from qmq.types import Host

T = TypeVar("T")
REQUIRED: Any = dataclasses.MISSING


class InvalidSettings(CallError):
    """Settings are invalid; correct each line of the text."""

    def __init__(self, complaints: list[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = complaints


def setting(
    default: Any = REQUIRED,
    *,
    why: str,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    one_of: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """Declare a field of a settings dataclass. `why` states its purpose, and the reason for the default."""
    metadata = {"why": why, "unit": unit, "least": least, "most": most, "one_of": one_of, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def advertising_complaints(host: str, advertised: str) -> Iterator[str]:
    """Yield the reasons why others cannot connect to a process that listens on `host` and advertises `advertised`, or
    `host`.
    """
    if not advertised and Host(host).is_any:
        yield f"advertised_ip: missing; host {host} stands for all addresses: set the one that others connect to"
    if advertised and Host(advertised).is_any:
        yield f"advertised_ip: others cannot connect to {advertised}; set the address of this machine"


SECRET = "set, not shown"


def shown(settings: Any) -> dict[str, str]:
    """Return settings as text, in their order. Secrets are replaced."""
    values = {field.name: (field, getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    return {name: _shown(field, value) for name, (field, value) in values.items()}


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    if field.metadata.get("secret") and value:
        return SECRET
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def load(kind: type[T], *, prefix: str, path: Path | None, environ: Mapping[str, str]) -> T:
    """Build `kind` from the file at `path` (None: no file) and the variables of `environ` that begin with `prefix`.

    Raises:
        InvalidSettings: with all complaints: unreadable file, unknown keys, wrong types, values out of range.
    """
    complaints: list[str] = []
    given = _read(path, complaints)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    complaints += [f"{name}: unknown setting; known are {', '.join(fields)}" for name in given if name not in fields]
    for name, field in fields.items():
        if (variable := f"{prefix}_{name.upper()}") in environ:
            given[name] = environ[variable]
        if field.metadata["secret"] and (file := environ.get(f"{variable}_FILE")):
            text = _secret(name, file, complaints)
            given[name] = TokenFile(Path(file), text) if hints[name] == Token else text
            if variable in environ:
                complaints.append(f"{name}: both {variable} and {variable}_FILE are set; keep one")
    values = {}
    for name, field in fields.items():
        if name in given:
            try:
                values[name] = _convert(given[name], hints[name])
                _check(values[name], field.metadata)
            except ValueError as error:
                complaints.append(f"{name}: {error} ({field.metadata['why']})")
        elif field.default is dataclasses.MISSING:
            variable = f"{prefix}_{name.upper()}"
            complaints.append(f"{name}: missing; set it in the file or as {variable} ({field.metadata['why']})")
    if complaints:
        raise InvalidSettings(complaints)
    return kind(**values)


def _read(path: Path | None, complaints: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        complaints.append(f"{path}: {error}")
        return {}


def _secret(name: str, file: str, complaints: list[str]) -> str:
    try:
        return read_token_file(Path(file), name)
    except AccessError as error:
        complaints.append(f"{name}: {error}")
        return "unread"


def _convert(value: Any, hint: Any) -> Any:
    """Convert a TOML value or an environment's text to the field's type; raise ValueError."""
    if isinstance(value, TokenFile):
        return value
    if hint is bool:
        if isinstance(value, bool):
            return value
        if value in ("true", "false"):
            return value == "true"
        raise ValueError(f"{value!r} is neither true nor false")
    if hint in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{value!r} is no number")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is no number")
        if hint is int and not number.is_integer():
            raise ValueError(f"{value!r} is no whole number")
        return hint(value)
    if hint == tuple[str, ...]:
        words = value.split(",") if isinstance(value, str) else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{value!r} is no list of words")
        return tuple(word.strip() for word in words if word.strip())
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is no text")
    return value if hint == Token else hint(value)


def _check(value: Any, metadata: Mapping[str, Any]) -> None:
    least, most, unit = metadata["least"], metadata["most"], metadata["unit"]
    if least is not None and value < least:
        raise ValueError(f"{value} {unit} is less than {least}")
    if most is not None and value > most:
        raise ValueError(f"{value} {unit} is more than {most}")
    if metadata["one_of"] and value not in metadata["one_of"]:
        raise ValueError(f"{value!r} is none of {', '.join(metadata['one_of'])}")
