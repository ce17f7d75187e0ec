"""Core. Messages of a producer's calls: `send(message)`, `send(subject, payload)`, and the producer's filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypedDict,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

from qmq.client.delay import DelayArguments
from qmq.client.handler import check_plain
from qmq.errors import InvalidMessage, InvalidRequest
from qmq.message import Message, Value, not_a_message
from qmq.subjects import check_subject

if TYPE_CHECKING:
    from qmq.payloads import Codec

OutgoingFilter = Callable[[Message], Message]
"""Returns the message to send: the same one, perhaps changed, or another one. An exception refuses the message."""


class _Absent(Enum):
    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT
Absent = Literal[_Absent.ABSENT]
"""Stands for a payload that is not given: None is a payload."""


class MessageFields(TypedDict, total=False):
    """Arguments of `send(subject, payload, …)`: those of `qmq.Message`, and the codec of the payload."""

    properties: Mapping[str, Value] | None
    tags: Iterable[str]
    id: str | None
    order_key: str | None
    retries_max: int | None
    expires_after: float | timedelta | None
    codec: Codec | None


class SendFields(MessageFields, DelayArguments, total=False):
    """Arguments of `send(subject, payload, …)` with a delay."""


class Declared(NamedTuple):
    """Declared message of an application: type of its payload, or None for properties; a sentence about the message."""

    payload_type: Any
    about: str


class Outgoing:
    """Maker of a producer's messages.

    Args:
        codec: codec of payloads without one of their own; None chooses it by the payload.
        filters: functions for each message, in order, of every call that sends.
    """

    def __init__(self, codec: Codec | None, filters: Sequence[OutgoingFilter]) -> None:
        self._codec = codec
        self.declared: dict[str, list[Declared]] = {}
        """Declared messages by subject."""
        self._filters = [check_plain("a filter of the producer", filter_) for filter_ in filters]

    def declare(self, subject: str, payload_type: Any, about: str) -> None:
        """Declare a message; see `Producer.declare`."""
        if not isinstance(about, str):
            raise InvalidRequest(f"about= is a sentence about the message, not {about!r:.50}")
        is_named = callable(payload_type) or hasattr(payload_type, "__value__")  # a class, NewType, or `type X = …`
        if not (payload_type is None or is_named or get_origin(payload_type)):
            raise InvalidRequest(
                f"payload_type {payload_type!r:.50} is no type: give a class, or list[Order], int | str"
            )
        self.declared.setdefault(check_subject(subject), []).append(Declared(payload_type, about))

    def _check_declared(self, subject: str, payload: object) -> None:
        """Raise InvalidMessage if a subject is declared, and the payload is of no declared type."""
        if kinds := [declared.payload_type for declared in self.declared.get(subject, ())]:
            if not any(kind is None or _is_of(kind, payload) for kind in kinds):
                names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
                raise InvalidMessage(
                    f"subject {subject!r} is declared with {names}, and the payload is {type(payload).__name__}: "
                    "declare its type, too"
                )

    def message(self, message: Message | str, payload: object | Absent, fields: Mapping[str, Any]) -> Message:
        """Return the message of a call, without the filters.

        Raises:
            InvalidMessage: the arguments are no message, or the payload cannot be encoded.
            InvalidRequest: the arguments are a message and parts of another one.
        """
        if isinstance(message, str):
            if payload is ABSENT:
                raise InvalidMessage(f"send a qmq.Message, or a subject with its payload: ({message!r:.100}, payload)")
            if isinstance(payload, Message):
                raise InvalidMessage("the payload is a qmq.Message, which holds its subject: give the message alone")
            if self.declared:
                self._check_declared(message, payload)
            return Message.of(message, payload, **{"codec": self._codec, **fields})
        if not isinstance(message, Message):
            raise not_a_message(message)
        if payload is not ABSENT:
            raise InvalidRequest("a qmq.Message holds its content: give the message alone, or a subject and a payload")
        if fields:
            raise InvalidRequest(f"{', '.join(fields)} of a qmq.Message are set in it: qmq.Message(…, …=…)")
        return message

    def filtered_message(self, message: Message | str, payload: object | Absent, fields: Mapping[str, Any]) -> Message:
        """Return the message of a call, after the filters. Raises: see `message`."""
        made = self.message(message, payload, fields)
        return self._filtered(made) if self._filters else made

    def messages(
        self, messages: Iterable[Message] | str, payloads: Iterable[object] | Absent, fields: Mapping[str, Any]
    ) -> Iterable[Message]:
        """Return the messages of a call for several, without the filters.

        Raises: see `message`; errors of a payload when it is read.
        """
        if isinstance(messages, str):
            if payloads is ABSENT or isinstance(payloads, str | bytes | Mapping):
                raise InvalidMessage(f"send several payloads as a list: ({messages!r:.100}, [payload, …])")
            if fields.get("id") is not None:
                raise InvalidRequest("id= would be the same for all messages: leave it out")
            subject = messages
            return (self.message(subject, payload, fields) for payload in payloads)
        if payloads is not ABSENT or fields:
            self.message(Message("a"), payloads, fields)
        return messages

    def filtered_messages(
        self, messages: Iterable[Message] | str, payloads: Iterable[object] | Absent, fields: Mapping[str, Any]
    ) -> Iterable[Message]:
        """Return the messages of a call for several, after the filters. Raises: see `messages`."""
        made = self.messages(messages, payloads, fields)
        return self._each(made) if self._filters else made

    def _each(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            yield self._filtered(message) if isinstance(message, Message) else message

    def _filtered(self, message: Message) -> Message:
        for filter_ in self._filters:
            message = filter_(message)
            if not isinstance(message, Message):
                raise InvalidMessage(
                    f"{filter_!r:.100} returned {message!r:.50}: a filter returns the qmq.Message to send"
                )
        return message


def _is_of(kind: Any, payload: object) -> bool:
    """Return whether a payload is of a type, judged by classes only: elements of a list are not checked."""
    if (origin := get_origin(kind)) in (Union, UnionType):
        return any(_is_of(part, payload) for part in get_args(kind))
    if origin is Annotated:
        return _is_of(get_args(kind)[0], payload)
    kind = dict if is_typeddict(kind) else origin or kind
    return not isinstance(kind, type) or isinstance(payload, (int, float) if kind is float else kind)


def payload_and_callback(
    message: object, rest: tuple[Any, ...], on_done: Any, *, is_optional: bool = False
) -> tuple[Any, Any]:
    """Return payload and callback of `send_nowait(message, on_done)` or `send_nowait(subject, payload, on_done)`.

    Args:
        rest: arguments behind the message or subject.
        is_optional: whether the callback may be missing; it is None then.
    """
    given = [*rest, *([] if on_done is ABSENT or on_done is None else [on_done])]
    payload = given.pop(0) if isinstance(message, str) and given else ABSENT
    if not given and is_optional:
        return payload, None
    if len(given) != 1:
        raise InvalidMessage("send a qmq.Message with on_done, or a subject with its payload and on_done")
    return payload, given[0]
