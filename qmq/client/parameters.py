"""Shell. Arguments of handlers, chosen by the annotations of their parameters.

| annotation | argument |
|---|---|
| none, `ReceivedMessage`, `Message`, `Any`, `object` | the message |
| another type | the payload, decoded as this type |
| `list[…]` of these, of a handler with `batch` | the messages, or their payloads, in the same order |
| `Depends(…)` of fast-depends, as default or in `Annotated` | the result of that function |

A parameter with a default keeps it. Annotations are read when the handler is registered.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qmq.client.received import ReceivedMessage
from qmq.errors import InvalidPayload, InvalidRequest, UnreadablePayload
from qmq.message import Message

Call = Callable[[Any], Any]
"""Takes a message, or a list of messages, and calls the handler."""
Reject = Callable[[ReceivedMessage, Exception], None]
"""Takes a message of a list if its payload cannot be decoded; called in the handler's thread."""

_LISTS = {list, Sequence, Iterable, Collection}
_OF_MESSAGE = re.compile(r"(\w+\[)?([\w.]*\.)?(ReceivedMessage|Message)\]?")
"""Annotation of a message, accepted although undefined at run time: it may be an import below TYPE_CHECKING."""


class BoundHandler:
    """Handler that is called with the arguments of its annotations.

    Raises:
        InvalidRequest: the parameters do not fit the table of this module; the text names the remedy.
    """

    def __init__(self, handler: Callable[..., Any], *, is_batch: bool = False, is_blocking: bool = False) -> None:
        self._handler = handler
        self._is_batch = is_batch
        self._is_blocking = is_blocking
        self._payload = self._message = ""
        self._decode: Callable[[Any], Any] | None = None
        self._is_injected = False
        self.reject: Reject | None = None
        """Set by the listener. Without it, a list with an unreadable message fails as a whole."""
        if (parameters := _parameters_of(handler)) is not None:
            self._read(parameters)

    @property
    def is_typed(self) -> bool:
        """Whether the handler takes a payload."""
        return self._decode is not None

    @property
    def payload_type(self) -> Any:
        """Type of the payload (of its elements for a list), or None if the handler takes no payload."""
        return getattr(self._decode, "kind", None)

    @property
    def result_type(self) -> Any:
        """Annotation of the result; Any if it is missing or cannot be resolved."""
        kind = getattr(_function_of(self._handler), "__annotations__", {}).get("return", Any)
        if isinstance(kind, str):
            try:
                return _resolved(self._handler, kind)
            except Exception:
                return Any
        return kind

    @property
    def about(self) -> str:
        """Docstring of the handler."""
        return inspect.getdoc(_function_of(self._handler)) or ""

    @property
    def call(self) -> Call:
        """Function for the listener: the handler itself if messages are its only arguments."""
        if self._decode is None and not self._is_injected:
            return self._handler
        handler = _injected(self._handler) if self._is_injected else self._handler
        return partial(self._call_with_list if self._is_batch else self._call_with_message, handler)

    def decoded(self, message: ReceivedMessage) -> Any:
        """Return the payload of a message; raises InvalidPayload or UnreadablePayload."""
        assert self._decode is not None
        return self._decode(message)

    def _read(self, parameters: Sequence[inspect.Parameter]) -> None:
        needed = []
        for parameter in parameters:
            if _is_dependency(self._handler, parameter):
                self._is_injected = True
            elif parameter.default is parameter.empty and parameter.kind not in _VARIABLE:
                needed.append(parameter)
        if self._is_injected and not needed:
            return
        names = self._names(needed)
        if self._payload:
            from qmq.payloads.codec import Decoder  # an import of qmq loads no codec

            try:
                self._decode = Decoder(names[self._payload])
            except InvalidRequest as error:
                raise self._wrong(f"parameter {self._payload!r}: {error}; a dependency needs Depends(…)") from None
        elif len(needed) != 1 and not (not needed and any(map(_takes_position, parameters))):
            given = "a list of messages" if self._is_batch else "the message"
            raise self._wrong(f"must take one argument, {given}, and its payload if there is another")

    def _names(self, needed: Sequence[inspect.Parameter]) -> dict[str, Any]:
        """Choose the parameters of message and payload; return the types of the payload by parameter."""
        found: dict[str, Any] = {}
        for parameter in needed:
            if parameter.kind is parameter.KEYWORD_ONLY and not self._is_injected:
                raise self._wrong(f"must take one argument, the message, and {parameter.name!r} is given by name only")
            kind, is_message = self._kind(parameter)
            if is_message:
                if self._message:
                    raise self._wrong(
                        f"must take one argument, the message: {self._message!r} and {parameter.name!r} would be "
                        "messages. Annotate the payload with its type"
                    )
                self._message = parameter.name
            elif self._payload:
                raise self._wrong(
                    f"parameters {self._payload!r} and {parameter.name!r} would be payloads, and a message has one: "
                    "use one class with these fields, a default, or Depends(…)"
                )
            else:
                self._payload, found[parameter.name] = parameter.name, kind
        self._positions = [parameter.name for parameter in needed]
        return found

    def _kind(self, parameter: inspect.Parameter) -> tuple[Any, bool]:
        """Return the annotation of a parameter (of its elements for a list), and whether it is a message."""
        kind = parameter.annotation
        if isinstance(kind, str):
            try:
                kind = _resolved(self._handler, kind)
            except Exception as error:
                if _OF_MESSAGE.fullmatch(kind):
                    return ReceivedMessage, True
                raise self._wrong(
                    f"the annotation {kind!r} of {parameter.name!r} has no meaning here ({error}): define or import "
                    "its type in the module, above the handler and not below TYPE_CHECKING"
                ) from None
        if not self._is_batch:
            return kind, _is_message(kind)
        if kind in (parameter.empty, Any, object, list) or _is_message(kind):
            return kind, True
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) not in _LISTS or not arguments:
            raise self._wrong(f"with batch= it takes a list: annotate {parameter.name!r} with list[…], not {kind!r}")
        return arguments[0], _is_message(arguments[0])

    def _wrong(self, text: str) -> InvalidRequest:
        return InvalidRequest(f"the handler {self._handler!r:.100} is wrong: {text}")

    # Calls.

    def _call_with_message(self, handler: Callable[..., Any], message: ReceivedMessage) -> Any:
        values = {self._message: message, self._payload: self._decode and self._decode(message)}
        return self._called(handler, values, message)

    def _call_with_list(self, handler: Callable[..., Any], messages: list[ReceivedMessage]) -> Any:
        payloads: list[Any] = []
        if self._decode is not None:
            kept: list[ReceivedMessage] = []
            for message in messages:
                try:
                    payloads.append(self._decode(message))
                    kept.append(message)
                except (InvalidPayload, UnreadablePayload) as error:
                    if self.reject is None:
                        raise
                    self.reject(message, error)
            messages = kept
        if not messages:
            return None if self._is_blocking else _nothing()
        return self._called(handler, {self._message: messages, self._payload: payloads}, messages)

    def _called(self, handler: Callable[..., Any], values: dict[str, Any], given: Any) -> Any:
        if not self._is_injected:
            return handler(*[values[name] for name in self._positions])
        named = {name: value for name, value in values.items() if name}
        return handler(**({"message" if not self._is_batch else "messages": given} | named))


async def _nothing() -> None: ...


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _takes_position(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def _parameters_of(handler: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None


def _is_message(kind: Any) -> bool:
    if kind in (inspect.Parameter.empty, Any, object) or isinstance(kind, typing.TypeVar):
        return True
    if isinstance(kind, type):
        return issubclass(kind, Message) or bool(getattr(kind, "_is_protocol", False))
    return any(isinstance(part, type) and issubclass(part, Message) for part in _parts(kind))


def _parts(kind: Any) -> Iterator[Any]:
    for part in typing.get_args(kind):
        yield part
        yield from _parts(part)


def _function_of(handler: Callable[..., Any]) -> Any:
    """Return the function behind a method, a partial, a wrapper, or an object with `__call__`."""
    inner: Any = handler
    while True:
        if isinstance(inner, partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__") or hasattr(inner, "__func__"):
            inner = getattr(inner, "__wrapped__", None) or inner.__func__
        elif hasattr(inner, "__globals__"):
            return inner
        else:
            inner = type(inner).__call__


def _resolved(handler: Callable[..., Any], text: str) -> Any:
    """Return the type that a string annotation of a handler names."""
    inner = _function_of(handler)

    names = _names_at_the_call()
    for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or ()):
        with suppress(ValueError):  # it has no value yet
            names[name] = cell.cell_contents
    holder = type("_Holder", (), {"__annotations__": {"kind": text}})
    return typing.get_type_hints(holder, inner.__globals__, names, include_extras=True)["kind"]


def _names_at_the_call() -> dict[str, Any]:
    """Return the local names where the handler is registered: it may be in the same function as its types."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("qmq."):
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


# Dependencies.


def _is_dependency(handler: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    """Return whether fast-depends provides the argument. A program that has not imported it has none."""
    if (library := sys.modules.get("fast_depends.dependencies")) is None:
        return False
    dependant: Any = library.Dependant
    if isinstance(parameter.default, dependant):
        return True
    kind = parameter.annotation
    if isinstance(kind, str):
        with suppress(Exception):  # the caller reports it
            kind = _resolved(handler, kind)
    return any(isinstance(mark, dependant) for mark in getattr(kind, "__metadata__", ()))


def _injected(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler with its dependencies. They may take the arguments of the handler, by name, and `message`
    (`messages` for a list).
    """
    from fast_depends import inject

    try:
        return inject(handler, cast=False)
    except Exception as error:
        raise InvalidRequest(f"fast-depends refuses the handler {handler!r:.100}: {error}") from error
