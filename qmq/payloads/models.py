"""Shell. Classes of other libraries: models of pydantic, structs of msgspec, classes of attrs.

A process has classes of a library only if it has loaded the library, so each is looked up in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, get_args

from qmq.errors import MissingExtra
from qmq.payloads import plain
from qmq.payloads.plain import Convert, UnknownType, WrongValue, kept


def load(module: str, *, extra: str) -> ModuleType:
    """Import a library on its first use.

    Raises:
        MissingExtra: the library is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        package = module.partition(".")[0]
        raise MissingExtra(f"the package {package} is not installed: pip install 'qmq[{extra}]'") from None


class Model(Protocol):
    """Library of classes with typed fields."""

    def has_type(self, kind: Any) -> bool: ...

    def to_plain(self, value: Any) -> Any: ...

    def to_json(self, value: Any) -> bytes: ...

    def converter(self, kind: Any) -> Convert: ...

    def json_reader(self, kind: Any) -> Callable[[bytes], Any]: ...


class Pydantic:
    """Models, dataclasses and annotated types of pydantic 2. Aliases are used in both directions."""

    def has_type(self, kind: Any) -> bool:
        if "pydantic" not in sys.modules:
            return False
        if isinstance(kind, type):
            return hasattr(kind, "__pydantic_validator__")
        return any(type(part).__module__.startswith(("pydantic", "annotated_types")) for part in _metadata(kind))

    def to_plain(self, value: Any) -> Any:
        kind: Any = type(value)
        return self._adapter(kind).dump_python(value, mode="json", by_alias=True)

    def to_json(self, value: Any) -> bytes:
        kind: Any = type(value)
        return bytes(self._adapter(kind).dump_json(value, by_alias=True))

    def converter(self, kind: Any) -> Convert:
        return self._reader(self._adapter(kind).validate_python)

    def json_reader(self, kind: Any) -> Callable[[bytes], Any]:
        return self._reader(self._adapter(kind).validate_json)

    @staticmethod
    @kept
    def _adapter(kind: Any) -> Any:
        pydantic = sys.modules["pydantic"]
        try:
            adapter = pydantic.TypeAdapter(kind)
            adapter.rebuild(raise_errors=True)
        except pydantic.errors.PydanticUserError as error:
            raise UnknownType(str(error).partition("\n")[0]) from None
        return adapter

    @staticmethod
    def _reader(validate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        wrong: type[Exception] = sys.modules["pydantic"].ValidationError

        def read(value: Any) -> Any:
            try:
                return validate(value)
            except wrong as error:
                first: Any = error
                raise _wrong([(detail["loc"], detail["msg"]) for detail in first.errors()]) from None

        return read


class Msgspec:
    """Structs of msgspec."""

    def has_type(self, kind: Any) -> bool:
        msgspec = sys.modules.get("msgspec")
        return msgspec is not None and isinstance(kind, type) and issubclass(kind, msgspec.Struct)

    def to_plain(self, value: Any) -> Any:
        return _msgspec().to_builtins(value)

    def to_json(self, value: Any) -> bytes:
        return bytes(_msgspec().json.encode(value))

    def converter(self, kind: Any) -> Convert:
        convert = _msgspec().convert
        return self._reader(lambda value: convert(value, kind))

    def json_reader(self, kind: Any) -> Callable[[bytes], Any]:
        return self._reader(_msgspec().json.Decoder(kind).decode)

    @staticmethod
    def _reader(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        wrong: type[Exception] = _msgspec().DecodeError
        invalid: type[Exception] = _msgspec().ValidationError  # is a DecodeError

        def read(value: Any) -> Any:
            try:
                return convert(value)
            except wrong as error:
                if not isinstance(error, invalid):
                    raise WrongValue(f"it is no JSON: {error}") from None
                reason, _, path = str(error).partition(" - at `$")
                raise _wrong([((path.rstrip("`").removeprefix("."),) if path else (), reason)]) from None

        return read


class Attrs:
    """Classes of attrs, through cattrs."""

    def has_type(self, kind: Any) -> bool:
        return isinstance(kind, type) and hasattr(kind, "__attrs_attrs__")

    def to_plain(self, value: Any) -> Any:
        return _cattrs_converter().unstructure(value)

    def to_json(self, value: Any) -> bytes:
        return plain.to_json(self.to_plain(value), plain.to_plain)

    def converter(self, kind: Any) -> Convert:
        cattrs, structure = load("cattrs", extra="attrs"), _cattrs_converter().structure

        def read(value: Any) -> Any:
            try:
                return structure(value, kind)
            except Exception as error:  # any class, from hooks and converters of the application
                parts = (text.rpartition(" @ $") for text in cattrs.transform_error(error))
                raise _wrong([((path.removeprefix("."),) if path else (), text) for text, _, path in parts]) from None

        return read

    def json_reader(self, kind: Any) -> Callable[[bytes], Any]:
        convert = self.converter(kind)
        return lambda data: convert(plain.from_json(data))


@lru_cache(1)
def _cattrs_converter() -> Any:
    """Return a converter with the forms of `qmq.payloads.plain`."""
    made = load("cattrs", extra="attrs").Converter()
    for kind in plain.TEXT_TYPES:
        made.register_unstructure_hook(kind, plain.to_plain)
        made.register_structure_hook(kind, lambda value, kind: plain.converter(kind)(value))
    return made


def _msgspec() -> ModuleType:
    return sys.modules["msgspec"]


def _metadata(kind: Any) -> Iterator[Any]:
    """Yield the metadata of an annotation such as `Annotated[int, Field(gt=0)]`."""
    return iter(getattr(kind, "__metadata__", ()))


REASONS_MAX = 3
"""Limit of wrong fields that an error names."""


def _wrong(found: list[tuple[tuple[str | int, ...], str]]) -> WrongValue:
    """Return the error for wrong fields, each with its path and reason."""
    texts = [f"{plain.text_of_path(path)}: {reason}" if path else reason for path, reason in found[:REASONS_MAX]]
    more = len(found) - REASONS_MAX
    return WrongValue("; ".join(texts) + (f"; and {more} more" if more > 0 else ""))


MODELS: tuple[Model, ...] = (Pydantic(), Msgspec(), Attrs())


def model_of_value(value: Any) -> Model | None:
    """Return the library of a value's class, or None."""
    return _model_of_class(type(value))


@kept
def _model_of_class(kind: Any) -> Model | None:
    return next((model for model in MODELS if model.has_type(kind)), None)


def model_of_type(kind: Any) -> Model | None:
    """Return the library of a class in an annotation, also within a union or a list, or None."""
    for model in MODELS:
        if model.has_type(kind) or any(model.has_type(part) for part in _parts(kind)):
            return model
    return None


def _parts(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from _parts(part)


def foreign(kind: Any) -> Convert | None:
    """Return the converter of a class of another library, or None."""
    model = _model_of_class(kind)
    return None if model is None else model.converter(kind)


def to_plain(value: Any) -> Any:
    """Return a value of any known class as JSON's types, one level deep at least."""
    model = model_of_value(value)
    return plain.to_plain(value) if model is None else model.to_plain(value)
