"""Shell. Codecs of JSON, MessagePack, protobuf, Avro, and bytes as they are. Libraries are imported on first use."""

from __future__ import annotations

import io
from typing import Any

from qmq.errors import UnreadablePayload
from qmq.payloads import plain
from qmq.payloads.models import foreign, load, model_of_type, model_of_value, to_plain
from qmq.payloads.plain import Convert, WrongValue, converter, kept


class Raw:
    """Bytes as they are."""

    content_type = "application/octet-stream"

    def encode(self, value: bytes | bytearray | memoryview, /) -> bytes:
        return bytes(value)

    def decode(self, data: bytes, type: Any, /) -> bytes:
        if type is bytes or type is Any:
            return data
        raise WrongValue(f"the body is bytes without a structure, and {type!r} is expected")


class Json:
    """JSON: the default. Types and their forms are in `qmq.payloads.plain`; models are encoded by their libraries.

    As `bytes`, a handler gets the text of the body.
    """

    content_type = "application/json"

    def encode(self, value: Any, /) -> bytes:
        model = model_of_value(value)
        return plain.to_json(value, to_plain) if model is None else model.to_json(value)

    def decode(self, data: bytes, type: Any, /) -> Any:
        return _json_reader(type)(data)


@kept
def _json_reader(kind: Any) -> Convert:
    if kind is bytes:
        return lambda data: data
    if (model := model_of_type(kind)) is not None:
        return model.json_reader(kind)
    convert = converter(kind, foreign)
    return lambda data: convert(plain.from_json(data))


class Msgpack:
    """MessagePack (extra `msgpack`). It keeps bytes as bytes; other types have their forms in JSON."""

    content_type = "application/msgpack"

    def encode(self, value: Any, /) -> bytes:
        return bytes(load("msgpack", extra="msgpack").packb(value, default=to_plain))

    def decode(self, data: bytes, type: Any, /) -> Any:
        msgpack = load("msgpack", extra="msgpack")
        if type is bytes:
            return data
        try:
            value = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise WrongValue(f"it is no MessagePack: {error}") from None
        return _reader(type)(value)


@kept
def _reader(kind: Any) -> Convert:
    model = model_of_type(kind)
    return converter(kind, foreign) if model is None else model.converter(kind)


class Protobuf:
    """Messages of protobuf; the annotation is the message's class."""

    content_type = "application/protobuf"

    def encode(self, value: Any, /) -> bytes:
        return bytes(value.SerializeToString())

    def decode(self, data: bytes, type: Any, /) -> Any:
        if type is bytes:
            return data
        if not hasattr(type, "FromString"):
            raise WrongValue(f"the body is a message of protobuf, and {type!r} is no class of one")
        wrong: Any = load("google.protobuf.message", extra="server").DecodeError
        try:
            return type.FromString(data)
        except wrong as error:
            raise WrongValue(f"it is no {type.__name__}: {error}") from None


class Avro:
    """Avro (extra `avro`), in its single-object encoding: each body names its schema by a fingerprint.

    Bodies of `older` schemas are resolved to the first one, by Avro's rules of evolution. Register one codec per type.

    Args:
        schema: schema of the bodies that are sent, as JSON's types.
        older: schemas of earlier versions, which are still read.
    """

    def __init__(self, schema: Any, *older: Any) -> None:
        fastavro = load("fastavro.schema", extra="avro")
        self._schema = fastavro.parse_schema(schema)
        self._by_head = {self._head(parsed): parsed for parsed in (self._schema, *map(fastavro.parse_schema, older))}
        self._own_head = self._head(self._schema)
        name = schema.get("name", "") if isinstance(schema, dict) else ""
        self.content_type: str = f"application/avro;name={self._schema.get('name', name)}"

    @staticmethod
    def _head(schema: Any) -> bytes:
        """Return the marker and fingerprint that begin a body: C3 01, then CRC-64-AVRO in little-endian order."""
        fastavro = load("fastavro.schema", extra="avro")
        digits = fastavro.fingerprint(fastavro.to_parsing_canonical_form(schema), "CRC-64-AVRO")
        return b"\xc3\x01" + bytes.fromhex(digits)

    def encode(self, value: Any, /) -> bytes:
        out = io.BytesIO()
        out.write(self._own_head)
        load("fastavro", extra="avro").schemaless_writer(out, self._schema, _opened(value))
        return out.getvalue()

    def decode(self, data: bytes, type: Any, /) -> Any:
        if type is bytes:
            return data
        if data[:2] != b"\xc3\x01":
            raise WrongValue("it is no single-object encoding of Avro")
        if (schema := self._by_head.get(data[:10])) is None:
            raise UnreadablePayload(
                f"the schema with fingerprint {data[2:10].hex()} is unknown here: give it to {self.content_type}"
            )
        try:
            value = load("fastavro", extra="avro").schemaless_reader(io.BytesIO(data[10:]), schema, self._schema)
        except (ValueError, EOFError, IndexError, KeyError, TypeError) as error:
            raise WrongValue(f"it is no {self.content_type}: {error!r}") from None
        return _reader(type)(value)


def _opened(value: Any) -> Any:
    """Return a value with its classes as dicts, at every depth. Avro itself has times, UUIDs, decimals and bytes."""
    if isinstance(value, dict):
        return {key: _opened(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_opened(part) for part in value]
    if model_of_value(value) is not None or hasattr(value, "__dataclass_fields__"):
        return _opened(_fields(value))
    return value


def _fields(value: Any) -> dict[str, Any]:
    names = getattr(type(value), "__struct_fields__", None)
    if names is None:
        attributes = getattr(type(value), "__attrs_attrs__", None)
        names = [item.name for item in attributes] if attributes is not None else None
    if names is None:
        names = list(getattr(type(value), "model_fields", None) or value.__dataclass_fields__)
    return {name: getattr(value, name) for name in names}
