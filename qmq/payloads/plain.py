"""Core. Values of Python's own types as JSON's types, and back by an annotation.

| type | in JSON |
|---|---|
| None, bool, int, float, str, list, dict | itself; keys of a dict become texts |
| Decimal, UUID | text |
| datetime, date, time | text of ISO 8601 |
| timedelta | text of ISO 8601, such as "PT90.5S" |
| bytes | base64 |
| Enum | its value |
| tuple, set, frozenset, NamedTuple | list |
| dataclass, TypedDict | object with its fields |

`to_plain` does not need the type. `converter` reads it once per annotation and returns a function for the values.
"""

from __future__ import annotations

import base64
import collections.abc as abstract
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar
from uuid import UUID

P = ParamSpec("P")
T = TypeVar("T")
Convert = Callable[[Any], Any]
"""Function that makes a typed value of a plain one; raises WrongValue."""

CONVERTERS_MAX = 4_096
"""Limit of annotations with kept converters."""


class WrongValue(ValueError):
    """Error: a plain value is not of the expected type.

    `path` leads to the value: names of fields and positions, outermost first.
    """

    def __init__(self, reason: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path

    def within(self, part: str | int) -> WrongValue:
        """Return the error for the value that holds this one as `part`."""
        return WrongValue(self.reason, (part, *self.path))

    def __str__(self) -> str:
        return f"{text_of_path(self.path)}: {self.reason}" if self.path else self.reason


class UnknownType(TypeError):
    """Error: a type is not in the table of this module."""


def text_of_path(path: Iterable[str | int]) -> str:
    """Return a path as text: `items[0].price`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


# To JSON's types.


def to_plain(value: Any) -> Any:
    """Return a value as one that `json` encodes, one level deep: the function for `json.dumps(default=…)`.

    Raises:
        UnknownType: the value has another type.
    """
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise UnknownType(f"a {type(value).__qualname__} has no form in JSON")


def to_json(value: Any, write: Convert = to_plain) -> bytes:
    """Return a value as JSON.

    Args:
        write: makes a plain value of a value that JSON lacks.

    Raises:
        UnknownType: the value has a type without a form in JSON.
        ValueError: the value has a float that is no number, contains itself, or has text that is no valid Unicode.
    """
    encode = _encoder(write)
    try:
        return encode(value).encode()
    except UnknownType:
        raise
    except TypeError:  # a key that is no text
        return encode(with_text_keys(value, write)).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@lru_cache(8)
def _encoder(write: Convert) -> Callable[[Any], str]:
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=write).encode


def from_json(data: bytes) -> Any:
    """Return the plain value of JSON; raises WrongValue."""
    try:
        return json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WrongValue(f"it is no JSON: {error}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def with_text_keys(value: Any, write: Convert) -> Any:
    """Return a value in which all dicts, at every depth, have texts as keys."""
    if isinstance(value, dict):
        return {_key(key, write): with_text_keys(part, write) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_text_keys(part, write) for part in value]
    return value if value is None or isinstance(value, str | int | float) else with_text_keys(write(value), write)


def _key(key: Any, write: Convert) -> Any:
    if isinstance(key, str | int | float) or key is None:
        return key.value if isinstance(key, Enum) else key
    text = write(key)
    if not isinstance(text, str | int | float):
        raise UnknownType(f"a {type(key).__qualname__} is no key of an object in JSON")
    return text


def _timedelta_text(value: timedelta) -> str:
    sign, value = ("-", -value) if value < timedelta(0) else ("", value)
    seconds = value.days * 86_400 + value.seconds
    fraction = f".{value.microseconds:06d}".rstrip("0") if value.microseconds else ""
    return f"{sign}PT{seconds}{fraction}S"


_WRITERS: dict[type, Convert] = {
    Enum: lambda value: value.value,
    Decimal: str,
    UUID: str,
    date: lambda value: value.isoformat(),  # datetime is a subclass
    time: lambda value: value.isoformat(),
    timedelta: _timedelta_text,
    bytes: lambda value: base64.b64encode(value).decode("ascii"),
    bytearray: lambda value: base64.b64encode(value).decode("ascii"),
    set: list,
    frozenset: list,
}


# From JSON's types.

_DURATION = re.compile(r"(-?)P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,6})?)S)?)?")


def _read_timedelta(text: str) -> timedelta:
    found = _DURATION.fullmatch(text)
    if found is None or not any(found.groups()[1:]):
        raise ValueError
    sign, days, hours, minutes, seconds = found.groups()
    whole, _, fraction = (seconds or "0").partition(".")
    value = timedelta(
        days=int(days or 0),
        hours=int(hours or 0),
        minutes=int(minutes or 0),
        seconds=int(whole),
        microseconds=int(fraction.ljust(6, "0")) if fraction else 0,
    )
    return -value if sign else value


_READERS: dict[type, tuple[str, Callable[[str], Any]]] = {
    Decimal: ("a decimal number as text", Decimal),
    UUID: ("a UUID", UUID),
    datetime: ("a moment in ISO 8601", datetime.fromisoformat),
    date: ("a date in ISO 8601", date.fromisoformat),
    time: ("a time of day in ISO 8601", time.fromisoformat),
    timedelta: ('a duration in ISO 8601, such as "PT90S"', _read_timedelta),
    bytes: ("base64", partial(base64.b64decode, validate=True)),
    bytearray: ("base64", lambda text: bytearray(base64.b64decode(text, validate=True))),
}
TEXT_TYPES = tuple(_READERS)
"""Types that are a text in JSON."""
_SIMPLE: dict[type, str] = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}

_LISTS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    abstract.Sequence: list,
    abstract.MutableSequence: list,
    abstract.Iterable: list,
    abstract.Collection: list,
    abstract.Set: frozenset,
    abstract.MutableSet: set,
}
_DICTS = {dict, abstract.Mapping, abstract.MutableMapping}

Foreign = Callable[[Any], Convert | None]
"""Function that returns the converter of a class of another library, such as a model of pydantic, or None for other
types.
"""


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """Keep the results for annotations. An annotation that cannot be hashed, such as `Annotated[int, {}]`, is read each
    time.
    """
    cached = lru_cache(CONVERTERS_MAX)(make)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            hash(args)
        except TypeError:
            return make(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return call


@kept
def converter(kind: Any, foreign: Foreign = lambda _: None) -> Convert:
    """Return the function that makes a value of type `kind` of a plain value.

    Raises:
        UnknownType: the annotation holds a type that is not in the table, or a name that is not defined.
    """
    if kind is Any or kind is object or isinstance(kind, typing.TypeVar):
        return lambda value: value
    if kind is None or kind is types.NoneType:
        return _read_none
    if (found := foreign(kind)) is not None:
        return found
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is not None:
        return _of_generic(kind, origin, arguments, foreign)
    if isinstance(kind, typing.NewType):
        return converter(kind.__supertype__, foreign)
    if hasattr(kind, "__value__"):  # `type Orders = list[Order]` of Python 3.12
        return converter(kind.__value__, foreign)
    if isinstance(kind, type):
        return _of_class(kind, foreign)
    raise UnknownType(f"{kind!r} is no type that qmq reads")


def check(kind: Any, foreign: Foreign) -> None:
    """Raise UnknownType if `kind`, or a field of a class in it, has a type that is not in the table."""
    converter(kind, foreign)
    seen: list[Any] = []
    waiting = [kind]
    while waiting:
        part = waiting.pop()
        if part in seen or foreign(part) is not None:
            continue
        seen.append(part)
        waiting += [argument for argument in typing.get_args(part) if not isinstance(argument, str | int)]
        if isinstance(part, type) and (dataclasses.is_dataclass(part) or typing.is_typeddict(part)):
            _fields_of(part, foreign).read()
            waiting += _hints(part).values()


def _of_generic(kind: Any, origin: Any, arguments: tuple[Any, ...], foreign: Foreign) -> Convert:
    if origin in (typing.Annotated, typing.Required, typing.NotRequired, getattr(typing, "ReadOnly", None)):
        return converter(arguments[0], foreign)
    if origin in (typing.Union, types.UnionType):
        return partial(_read_union, [converter(member, foreign) for member in arguments], _name_of(kind))
    if origin is typing.Literal:
        return partial(_read_literal, arguments)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return partial(_read_tuple, [converter(part, foreign) for part in arguments if part != ()])
    if origin in _LISTS:
        return partial(_read_list, converter(arguments[0], foreign), _LISTS[origin])
    if origin in _DICTS:
        return partial(_read_dict, _key_converter(arguments[0], foreign), converter(arguments[1], foreign))
    if isinstance(origin, type):
        return _of_class(origin, foreign)
    raise UnknownType(f"{kind!r} is no type that qmq reads")


def _of_class(kind: Any, foreign: Foreign) -> Convert:
    if kind in _SIMPLE:
        return partial(_read_simple, kind)
    if kind in _READERS:
        return partial(_read_text, kind, *_READERS[kind])
    if issubclass(kind, Enum):
        return partial(_read_enum, kind)
    if kind in _LISTS:
        return partial(_read_list, lambda value: value, _LISTS[kind])
    if kind in _DICTS:
        return partial(_read_dict, lambda key: key, lambda value: value)
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _fields_of(kind, foreign)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = _hints(kind)
        parts = [converter(hints.get(name, Any), foreign) for name in kind._fields]
        return lambda value: kind(*_read_tuple(parts, value))
    raise UnknownType(f"{kind.__qualname__} is no type that qmq reads from JSON")


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise UnknownType(f"an annotation of {kind.__qualname__} is not defined here: {error}") from None


def _name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def _found(value: Any) -> str:
    """Return a value as part of a reason, cut."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _read_none(value: Any) -> None:
    if value is not None:
        raise WrongValue(f"{_found(value)} is not null")


def _read_simple(kind: type, value: Any) -> Any:
    given = value.__class__
    if given is kind:
        return value
    if kind is float and given is int:
        return float(value)
    raise WrongValue(f"{_found(value)} is not {_SIMPLE[kind]}")


def _read_text(kind: type, noun: str, read: Callable[[str], Any], value: Any) -> Any:
    if type(value) is kind:  # Avro and MessagePack return some of these types themselves
        return value
    if isinstance(value, str):
        try:
            return read(value)
        except (ValueError, InvalidOperation, OverflowError):
            pass
    elif read is Decimal and isinstance(value, int | float) and not isinstance(value, bool):
        return Decimal(str(value))
    raise WrongValue(f"{_found(value)} is not {noun}")


def _read_enum(kind: type[Enum], value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in list(kind)[:10])
        raise WrongValue(f"{_found(value)} is none of {allowed}") from None


def _read_literal(allowed: tuple[Any, ...], value: Any) -> Any:
    for item in allowed:
        if value.__class__ is item.__class__ and value == item:
            return value
    raise WrongValue(f"{_found(value)} is none of {', '.join(map(repr, allowed))}")


def _read_union(members: list[Convert], name: str, value: Any) -> Any:
    reasons: list[WrongValue] = []
    for convert in members:
        try:
            return convert(value)
        except WrongValue as error:
            reasons.append(error)
    deepest = max(reasons, key=lambda error: len(error.path))
    raise deepest if deepest.path else WrongValue(f"{_found(value)} is not {name}")


def _read_list(convert: Convert, make: Callable[[list[Any]], Any], value: Any) -> Any:
    if not isinstance(value, list):
        raise WrongValue(f"{_found(value)} is not a list")
    return make([_read_part(convert, position, part) for position, part in enumerate(value)])


def _read_tuple(parts: list[Convert], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(parts):
        raise WrongValue(f"{_found(value)} is not a list of {len(parts)}")
    return tuple(_read_part(convert, at, part) for at, (convert, part) in enumerate(zip(parts, value)))


def _read_dict(read_key: Convert, convert: Convert, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise WrongValue(f"{_found(value)} is not an object")
    return {_read_part(read_key, str(key), key): _read_part(convert, str(key), part) for key, part in value.items()}


def _read_part(convert: Convert, part: str | int, value: Any) -> Any:
    try:
        return convert(value)
    except WrongValue as error:
        raise error.within(part) from None


def _key_converter(kind: Any, foreign: Foreign) -> Convert:
    """Return the converter of keys, which are texts in JSON."""
    convert = converter(kind, foreign)

    def read(key: Any) -> Any:
        try:
            return convert(key)
        except WrongValue:
            try:
                return convert(json.loads(key))
            except (ValueError, TypeError):
                pass
            raise

    return read


class _Field(NamedTuple):
    name: str
    convert: Convert
    is_required: bool


class _Fields:
    """Converter of a dataclass or TypedDict. Its fields are read at its first value, because a class may contain
    itself.
    """

    def __init__(self, kind: Any, foreign: Foreign) -> None:
        self._kind = kind
        self._foreign = foreign
        self._is_dataclass = dataclasses.is_dataclass(kind)
        self._fields: list[_Field] | None = None

    def read(self) -> list[_Field]:
        """Return the fields; raises UnknownType."""
        if self._fields is None:
            self._fields = self._read_fields()
        return self._fields

    def _read_fields(self) -> list[_Field]:
        hints = _hints(self._kind)
        if not self._is_dataclass:
            required = self._kind.__required_keys__
            return [
                # With postponed annotations, __required_keys__ lists all names.
                _Field(
                    name,
                    self._converter(name, hint),
                    name in required and typing.get_origin(hint) is not typing.NotRequired,
                )
                for name, hint in hints.items()
            ]
        missing = dataclasses.MISSING
        return [
            _Field(
                field.name,
                self._converter(field.name, hints[field.name]),
                field.default is missing and field.default_factory is missing,
            )
            for field in dataclasses.fields(self._kind)
            if field.init
        ]

    def _converter(self, name: str, hint: Any) -> Convert:
        try:
            return converter(hint, self._foreign)
        except UnknownType as error:
            raise UnknownType(f"field {name!r} of {self._kind.__qualname__}: {error}") from None

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise WrongValue(f"{_found(value)} is not an object with the fields of {self._kind.__qualname__}")
        found: dict[str, Any] = {}
        for name, convert, is_required in self.read():
            if name in value:
                try:
                    found[name] = convert(value[name])
                except WrongValue as error:
                    raise error.within(name) from None
            elif is_required:
                raise WrongValue("is missing", (name,))
        if not self._is_dataclass:
            return found
        try:
            return self._kind(**found)
        except (ValueError, TypeError) as error:  # `__post_init__` of the application
            raise WrongValue(f"{self._kind.__qualname__}: {error}") from None


@kept
def _fields_of(kind: type, foreign: Foreign) -> _Fields:
    return _Fields(kind, foreign)
