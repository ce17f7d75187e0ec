"""Core. Messages of applications."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from qmq.errors import InvalidMessage
from qmq.plain import plain

if TYPE_CHECKING:
    from qmq.payloads import Codec

T = TypeVar("T")
Value = str | int | float | bool | datetime
"""Value of a property. It travels as text in QMQ's spelling, and `qmq_types` restores its type."""
Body = bytes | bytearray | memoryview

RESERVED = "qmq_"
"""Prefix of the names of properties that qmq sets."""
ORDER_KEY, RETRIES_MAX, DELAY_KEY = "qmq_orderKey", "qmq_maxRetryNum", "qmq_delayKey"
RECUR_NAME, RECUR_OWNER, RECUR_CRON, RECUR_ZONE = "qmq_recurName", "qmq_recurOwner", "qmq_recurCron", "qmq_recurZone"
"""Origin of an occurrence of a recurring schedule."""
RECUR_SKIPPED = "qmq_recurSkipped"
"""Number of occurrences missed before this one, which are not sent; absent if 0."""
EXPIRES_AFTER = "qmq_consumerExpiresAfter"
"""Lifetime of a message in ms, from its send or due time. QMQ's own qmq_expireTime is in each message of its clients
and has no effect.
"""
TIMES = "qmq_times"
"""Delivery number of the first delivery from a group's mailbox."""
CONTENT_TYPE, CONTENT_ENCODING = "qmq_contentType", "qmq_contentEncoding"
"""Media type of the body, and its compression ("zstd"); absent without."""
TYPES = "qmq_types"
"""Types of the application's properties in their order, one character each (`types_of`); absent if all are texts."""
JSON = "json"
"""Property that holds the value of `Message.of_json`."""

LARGE_UNITS = 8_192
"""QMQ's size of a part of a large text, in UTF-16 units. Its UTF-8 is below the 32,767 bytes of a property."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class Message:
    """Message with a subject, properties and tags.

    Args:
        subject: stream that the message belongs to.
        properties: values with names. They travel as text in QMQ's spelling (`True` is "true", a datetime its ms since
            1970 UTC), at most 32,767 bytes each (see `set_large`), and are received with their types. Names that begin
            with "qmq_" are reserved. An enumeration based on str, int or float is sent as its value, here and in all
            other arguments.
        body: content as bytes, up to the message limit (docs/payloads.md); None for no body.
        content_type: media type of the body, such as "application/json".
        tags: at most 10 words that consumers may filter by.
        id: at most 100 bytes, unique and kept through every retry; by default made by the producer.
        order_key: messages with the same subject and key are delivered one at a time, in the order of sending.
        retries_max: delivery attempts until the message becomes a dead letter; by default the listener's number.
        expires_after: seconds or a timedelta from the send or due time, after which no handler gets the message.

    A received message also has `created_ms`, by the producer's clock, in ms since 1970 UTC.
    """

    __slots__ = (
        "subject",
        "properties",
        "body",
        "content_type",
        "tags",
        "id",
        "order_key",
        "retries_max",
        "expires_after",
        "created_ms",
    )

    def __init__(
        self,
        subject: str,
        properties: Mapping[str, Value] | None = None,
        *,
        body: Body | None = None,
        content_type: str | None = None,
        tags: Iterable[str] = (),
        id: str | None = None,
        order_key: str | None = None,
        retries_max: int | None = None,
        expires_after: float | timedelta | None = None,
    ) -> None:
        self.subject = subject if subject.__class__ is str else plain(subject)
        self.properties = properties if properties is not None else {}
        self.body = body if body is None or body.__class__ is bytes else body_bytes(body)
        self.content_type = content_type if content_type is None else plain(content_type)
        self.tags = _tags(tags) if tags else ()
        self.id = id if id is None or id.__class__ is str else plain(id)
        self.order_key = order_key if order_key is None or order_key.__class__ is str else plain(order_key)
        self.retries_max = retries_max
        self.expires_after = expires_after
        self.created_ms = 0

    subject: str
    properties: Mapping[str, Value]
    body: bytes | None
    content_type: str | None
    tags: frozenset[str] | tuple[()]
    id: str | None
    order_key: str | None
    retries_max: int | None
    expires_after: float | timedelta | None
    created_ms: int

    @classmethod
    def of(
        cls,
        subject: str,
        payload: Any,
        properties: Mapping[str, Value] | None = None,
        *,
        codec: Codec | None = None,
        tags: Iterable[str] = (),
        id: str | None = None,
        order_key: str | None = None,
        retries_max: int | None = None,
        expires_after: float | timedelta | None = None,
    ) -> Message:
        """Return a message with `payload` as body, encoded by `codec` or by the codec of its type (docs/payloads.md).

        Raises:
            InvalidMessage: the payload cannot be encoded; the text names the remedy.
        """
        from qmq.payloads import encode  # an import of qmq loads no codec

        body, content_type = encode(payload, codec)
        return cls(
            subject,
            properties,
            body=body,
            content_type=content_type,
            tags=tags,
            id=id,
            order_key=order_key,
            retries_max=retries_max,
            expires_after=expires_after,
        )

    @overload
    def decode(self, type: type[T]) -> T: ...

    @overload
    def decode(self, type: Any) -> Any: ...

    def decode(self, type: Any) -> Any:
        """Return the payload in the body as `type`, by the codec of the content type.

        Raises:
            InvalidPayload: the body does not validate; make it a dead letter.
            UnreadablePayload: this process cannot decode it: register a codec, or install a package.
            InvalidRequest: no codec makes this type.
        """
        from qmq.payloads import decode

        return decode(self, type)

    @classmethod
    def of_json(
        cls,
        subject: str,
        value: Any,
        properties: Mapping[str, Value] | None = None,
        *,
        tags: Iterable[str] = (),
        id: str | None = None,
        order_key: str | None = None,
        retries_max: int | None = None,
        expires_after: float | timedelta | None = None,
    ) -> Message:
        """Return a message with `value` as JSON in the property "json", cut into parts if it is large.

        Raises:
            InvalidMessage: JSON cannot represent the value.
        """
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidMessage(f"the value for {subject!r} cannot be encoded as JSON: {error}") from None
        message = cls(
            subject,
            properties,
            tags=tags,
            id=id,
            order_key=order_key,
            retries_max=retries_max,
            expires_after=expires_after,
        )
        message.set_large(JSON, text)
        return message

    def json(self) -> Any:
        """Return the value given to `of_json`; raises InvalidMessage without one."""
        text = self.get_large(JSON)
        if text is None:
            raise InvalidMessage(f"message {self.id} has no property {JSON!r}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"property {JSON!r} of message {self.id} is no JSON: {error}") from None

    def copy_to(self, subject: str, *, id: str | None = None) -> Message:
        """Return a message with the same content for `subject`, without the properties that qmq set."""
        properties = {name: value for name, value in self.properties.items() if not name.startswith(RESERVED)}
        return Message(
            subject,
            properties,
            body=self.body,
            content_type=self.content_type,
            tags=self.tags,
            id=id,
            order_key=self.order_key,
            retries_max=self.retries_max,
        )

    # Properties.

    __iter__: ClassVar[None] = None
    """None, because a message is not a sequence. Without this, Python would iterate over `[0]`, `[1]` and so on."""

    def __getitem__(self, name: str) -> Value:
        return self.properties[name]

    def __contains__(self, name: str) -> bool:
        return name in self.properties

    def get(self, name: str, default: Value | None = None) -> Value | None:
        return self.properties.get(name, default)

    @overload
    def get_int(self, name: str) -> int | None: ...

    @overload
    def get_int(self, name: str, default: int) -> int: ...

    def get_int(self, name: str, default: int | None = None) -> int | None:
        """Return a property as an int, or `default` if it is absent; raises InvalidMessage."""
        value = self.properties.get(name)
        try:
            return default if value is None else int(_text(value))
        except ValueError:
            raise self._is_no(name, "a whole number") from None

    @overload
    def get_float(self, name: str) -> float | None: ...

    @overload
    def get_float(self, name: str, default: float) -> float: ...

    def get_float(self, name: str, default: float | None = None) -> float | None:
        """Return a property as a float, or `default` if it is absent; raises InvalidMessage."""
        value = self.properties.get(name)
        try:
            return default if value is None else float(_text(value))
        except ValueError:
            raise self._is_no(name, "a number") from None

    @overload
    def get_bool(self, name: str) -> bool | None: ...

    @overload
    def get_bool(self, name: str, default: bool) -> bool: ...

    def get_bool(self, name: str, default: bool | None = None) -> bool | None:
        """Return a property as a bool, or `default` if it is absent; raises InvalidMessage."""
        value = self.properties.get(name)
        if value is None:
            return default
        text = _text(value).lower()
        if text not in ("true", "false"):
            raise self._is_no(name, '"true" or "false"')
        return text == "true"

    @overload
    def get_datetime(self, name: str) -> datetime | None: ...

    @overload
    def get_datetime(self, name: str, default: datetime) -> datetime: ...

    def get_datetime(self, name: str, default: datetime | None = None) -> datetime | None:
        """Return a property as a datetime in UTC, or `default` if it is absent; raises InvalidMessage."""
        value = self.properties.get(name)
        try:
            return default if value is None else _EPOCH + int(_text(value)) * _MS
        except (ValueError, OverflowError):
            raise self._is_no(name, "a moment in ms since 1970") from None

    def _is_no(self, name: str, expected: str) -> InvalidMessage:
        found = repr(self.properties[name])
        return InvalidMessage(f"property {name!r} of message {self.id} is {found[:100]}, not {expected}")

    # Large texts.

    def set_large(self, name: str, text: str) -> None:
        """Set a property of any length. Above 8,192 characters it becomes `name#part0`, `name#part1`, …, as in QMQ."""
        name, text = plain(name), plain(text)
        properties = {key: value for key, value in self.properties.items() if not _is_part(key, name)}
        properties.pop(name, None)
        size = LARGE_UNITS if text.isascii() or max(text) <= "\uffff" else LARGE_UNITS // 2
        if len(text) <= size:
            properties[name] = text
        else:
            for part, begin in enumerate(range(0, len(text), size)):
                properties[f"{name}#part{part}"] = text[begin : begin + size]
        self.properties = properties

    def get_large(self, name: str, default: str | None = None) -> str | None:
        """Return a property that `set_large` has set, or one without parts."""
        properties, name = self.properties, plain(name)
        if (value := properties.get(name)) is not None:
            return _text(value)
        parts: list[str] = []
        while (value := properties.get(f"{name}#part{len(parts)}")) is not None:
            parts.append(_text(value))
        return "".join(parts) if parts else default

    def __repr__(self) -> str:
        key = f", order_key={self.order_key!r}" if self.order_key is not None else ""
        body = "" if self.body is None else f", body=<{len(self.body)} bytes of {self.content_type or 'no type'}>"
        return (
            f"Message({self.subject!r}, {dict(self.properties)!r}, tags={set(self.tags)!r}, id={self.id!r}{key}{body})"
        )


def not_a_message(given: object) -> InvalidMessage:
    """Return the error for a value that is not a message."""
    return InvalidMessage(f"send a qmq.Message, not a {type(given).__name__}")


def body_bytes(body: object) -> bytes:
    """Return a body as bytes, a copy of anything that may change; raises InvalidMessage."""
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    remedy = "write .encode() behind it" if isinstance(body, str) else "use a codec or properties (docs/payloads.md)"
    raise InvalidMessage(f"a body is bytes, not {type(body).__name__}: {remedy}")


_TYPE_OF: dict[type, str] = {str: "s", int: "i", float: "f", bool: "b", datetime: "d"}
_READERS: dict[str, Callable[[str], Value]] = {
    "s": str,
    "i": int,
    "f": float,
    "b": lambda text: {"true": True, "false": False}[text],
    "d": lambda text: _EPOCH + int(text) * _MS,
}


def types_of(classes: tuple[type, ...]) -> str:
    """Return the types of properties with values of these classes, one character each: s(tr), i(nt), f(loat),
    b(ool), d(atetime). Empty if all are texts.

    The values are valid. A subclass has the type of its base class.
    """
    types = "".join(_TYPE_OF.get(kind) or _base_type(kind) for kind in classes)
    return types if types.strip("s") else ""


def _base_type(kind: type) -> str:
    return next(character for base, character in _TYPE_OF.items() if issubclass(kind, base))


def with_types(properties: Mapping[str, str], types: str) -> dict[str, Value]:
    """Return properties with the types of `types_of`. Reserved ones stay texts; all stay texts if `types` does not
    match.
    """
    found: dict[str, Value] = {**properties}
    end = len(RESERVED)
    names = [name for name in properties if name[:end] != RESERVED]
    try:
        for name, kind in zip(names, types, strict=True):
            if kind != "s":
                found[name] = _READERS[kind](properties[name])
    except (KeyError, ValueError, OverflowError):  # a foreign or changed message
        return {**properties}
    return found


def text_of(value: object) -> str:
    """Return QMQ's spelling of a value. A value of a subclass, such as `class Color(str, Enum)`, has that of its base
    class.

    Raises:
        InvalidMessage: the value has another type, or is a datetime without time zone.
    """
    kind = value.__class__
    if kind is int or kind is float:
        return str(value)
    if kind is bool:
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(plain(value))
    if not isinstance(value, datetime):
        raise InvalidMessage(
            f"a property is a str, int, float, bool or datetime, not {kind.__name__}: write str(), int() or float() "
            "around it, or use Message.of_json"
        )
    if value.tzinfo is None:
        raise InvalidMessage("a datetime needs a time zone: write .astimezone() if it is local time")
    return str((value - _EPOCH) // _MS)


def _text(value: Value) -> str:
    return value if value.__class__ is str else text_of(value)


def _tags(tags: Iterable[str]) -> frozenset[str]:
    if isinstance(tags, str):
        raise InvalidMessage(f"tags are several words: {{{tags!r}}}, not {tags!r}")
    words = frozenset(tags)
    for word in words:
        if word.__class__ is not str:
            return frozenset(map(plain, words))
    return words


def _is_part(key: str, name: str) -> bool:
    return key.startswith(f"{name}#part") and key[len(name) + 5 :].isdecimal()
