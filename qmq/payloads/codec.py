"""Shell. Codecs: registered by content type, chosen by the value that is sent and by the handler's annotation.

The codecs of this package are registered when they are first needed. Applications `register` their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from qmq.errors import InvalidMessage, InvalidPayload, InvalidRequest, UnreadablePayload
from qmq.payloads import plain
from qmq.payloads.formats import Json, Msgpack, Protobuf, Raw
from qmq.payloads.models import foreign, model_of_type
from qmq.payloads.plain import UnknownType, WrongValue

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
C = TypeVar("C", bound="Codec")


@runtime_checkable
class Codec(Protocol):
    """Encoding of payloads. Its methods may be called from any thread.

    `content_type` is sent with each message and selects the codec that decodes it.
    """

    @property
    def content_type(self) -> str: ...

    def encode(self, value: Any, /) -> bytes:
        """Return the body of a message; raises TypeError or ValueError."""

    def decode(self, data: bytes, type: Any, /) -> Any:
        """Return the value of a body as `type`, the annotation of the handler.

        Raises:
            ValueError: the body is not valid. The message becomes a dead letter with this text.
            qmq.UnreadablePayload: this process cannot read the body, for instance without a key. The message stays in
                its group.
        """


RAW, JSON = Raw(), Json()
_PROTOBUF = Protobuf()
_codecs: dict[str, Codec] = {codec.content_type: codec for codec in (RAW, JSON, _PROTOBUF, Msgpack())}
_own: set[str] = set()
"""Content types that the application registered."""
ALIASES = {
    "application/x-msgpack": "application/msgpack",
    "application/vnd.msgpack": "application/msgpack",
    "application/x-protobuf": "application/protobuf",
}


def register(codec: C) -> C:
    """Decode messages of a content type with `codec`, in this process. A later codec replaces an earlier one.

    Raises:
        InvalidRequest: `codec` is no codec.
    """
    if isinstance(codec, type) or not isinstance(codec, Codec) or not isinstance(codec.content_type, str):
        raise InvalidRequest(
            f"a codec is an object with content_type, encode(value) and decode(data, type), not {codec!r:.100}"
        )
    name = _exact(codec.content_type)
    _codecs[name] = codec
    _own.add(name)
    _find.cache_clear()
    return codec


def _exact(content_type: str) -> str:
    """Return a content type in lower case without blanks and charset: `application/avro;name=shop.order`."""
    name, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return ";".join([name, *(part for part in parameters if part and not part.startswith("charset="))])


@lru_cache(1_024)
def _find(content_type: str) -> Codec | None:
    """Return the codec of a content type: with its parameters, without them, or by its suffix (`+json`)."""
    exact = _exact(content_type)
    name = exact.partition(";")[0]
    suffix = name.rpartition("+")[2] if "+" in name else ""
    for key in (exact, name, ALIASES.get(name, ""), f"application/{suffix}"):
        if key in _codecs:
            return _codecs[key]
    return None


# Sending.


def encode(value: Any, codec: Codec | None = None) -> tuple[bytes, str]:
    """Return the body and content type of a payload.

    Without `codec`, bytes are sent as they are, messages of protobuf in its encoding, and all other values as JSON.

    Raises:
        InvalidMessage: the value cannot be encoded; the text names the remedy.
    """
    if codec is None:
        codec = RAW if isinstance(value, bytes | bytearray | memoryview) else _PROTOBUF if _is_protobuf(value) else JSON
    elif isinstance(codec, type) or not isinstance(codec, Codec):
        raise InvalidMessage(f"codec= is a codec such as qmq.payloads.Msgpack(), not {codec!r:.100}")
    try:
        return codec.encode(value), codec.content_type
    except UnreadablePayload as error:
        raise InvalidMessage(str(error)) from None
    except UnknownType as error:
        raise InvalidMessage(f"{error}: send a dataclass, a model or plain values, or give a codec= for it") from None
    except (TypeError, ValueError) as error:
        text = f"a {type(value).__qualname__} cannot be encoded as {codec.content_type}: {error}"
        raise InvalidMessage(text) from error


def _is_protobuf(value: Any) -> bool:
    return hasattr(value, "SerializeToString") and hasattr(value, "DESCRIPTOR")


# Receiving.


class HasBody(Protocol):
    """Message with a body; see `qmq.Message`."""

    @property
    def body(self) -> bytes | None: ...

    @property
    def content_type(self) -> str | None: ...

    def get_large(self, name: str) -> str | None: ...


class Decoder(Generic[T_co]):
    """Decoder of the payloads of one handler, or of one type.

    Raises:
        InvalidRequest: no codec makes this type; the text names the remedy.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        if kind is not bytes and not _own and not _is_protobuf(kind) and model_of_type(kind) is None:
            try:
                plain.check(kind, foreign)
            except UnknownType as error:
                raise InvalidRequest(
                    f"{error}: use a dataclass, a model of pydantic, msgspec or attrs, or types of Python, or register "
                    "a codec (docs/payloads.md)"
                ) from None

    def __call__(self, message: HasBody) -> T_co:
        """Return the payload of a message.

        Raises:
            InvalidPayload: the body does not validate.
            UnreadablePayload: this process has no codec for the content type, or cannot use it.
        """
        data, content_type = message.body, message.content_type or ""
        if data is None:
            if (text := message.get_large("json")) is None:
                raise InvalidPayload(
                    f"the message has no body and the handler expects {self._name}: send it with "
                    "send(subject, payload), or take a qmq.ReceivedMessage"
                )
            data, content_type = text.encode(), JSON.content_type  # of `Message.of_json`
        codec = _find(content_type)
        if codec is None:
            if self.kind is bytes:
                return data  # type: ignore[return-value]
            raise UnreadablePayload(
                f"no codec for content type {content_type!r}: qmq.payloads.register one, or take bytes"
                if content_type
                else "the body has no content type: take bytes, or qmq.ReceivedMessage"
            )
        try:
            return codec.decode(data, self.kind)  # type: ignore[no-any-return]
        except WrongValue as error:
            raise InvalidPayload(str(error)) from None
        except UnknownType as error:
            raise UnreadablePayload(f"{content_type} has no form of {self._name}: {error}") from None
        except ValueError as error:
            raise InvalidPayload(f"it is no {content_type}: {error}") from error

    @property
    def _name(self) -> str:
        return self.kind.__qualname__ if isinstance(self.kind, type) else str(self.kind)


def decode(message: HasBody, kind: Any) -> Any:
    """Return the payload of a message as `kind`; see `Decoder`."""
    return _decoder(kind)(message)


@plain.kept
def _decoder(kind: Any) -> Decoder[Any]:
    return Decoder(kind)
