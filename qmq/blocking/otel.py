"""Shell. OpenTelemetry for producers without an event loop; see qmq.otel.

Consumers use the filter `qmq.otel.Tracing`: a handler runs in its thread within the span.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack, overload

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from qmq.blocking.producer import Producer
from qmq.client.batch import OnReceipt, Receipt, Receipts
from qmq.client.delay import DelayArguments
from qmq.client.outgoing import ABSENT, Absent, MessageFields, SendFields, payload_and_callback
from qmq.client.producer import read_delay
from qmq.message import Message
from qmq.otel import Sending, end_with, inject, note


class TracedProducer(Sending):
    """Producer for threads that adds spans and a context to messages; it wraps a `qmq.blocking.Producer`.

    The context is that of the calling thread. The wrapped producer is opened and closed as usual.
    """

    def __init__(self, producer: Producer, *, tracer_provider: TracerProvider | None = None) -> None:
        super().__init__(tracer_provider)
        self._producer = producer

    @overload
    def send(self, message: Message, **delay: Unpack[DelayArguments]) -> Receipt: ...

    @overload
    def send(self, message: Message, *, session: object) -> Future[Receipt]: ...

    @overload
    def send(self, subject: str, payload: object, /, **fields: Unpack[SendFields]) -> Receipt: ...

    @overload
    def send(
        self, subject: str, payload: object, /, *, session: object, **fields: Unpack[MessageFields]
    ) -> Future[Receipt]: ...

    def send(
        self,
        message: Message | str,
        payload: object | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipt | Future[Receipt]:
        """Send a message; see `Producer.send`. With a session, the spans end with the outcome, after the commit."""
        message = self._producer._outgoing.message(message, payload, fields)
        if session is not None:
            read_delay(delay, at, key, session)
            with self._until_known(message) as end:
                later = self._producer.send(message, session=session)
                later.add_done_callback(partial(end_with, end))
                return later
        with self._sending({"subject": message.subject}) as (span, carrying):
            inject(message, trace.set_span_in_context(span))
            receipt = self._producer.send(message, delay=delay, at=at, key=key)
            note(receipt, span, carrying)
            return receipt

    @overload
    def send_many(self, messages: Iterable[Message], **delay: Unpack[DelayArguments]) -> Receipts: ...

    @overload
    def send_many(self, subject: str, payloads: Iterable[object], /, **fields: Unpack[SendFields]) -> Receipts: ...

    def send_many(
        self,
        messages: Iterable[Message] | str,
        payloads: Iterable[object] | Absent = ABSENT,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipts:
        """Send messages; see `Producer.send_many`."""
        made = self._producer._outgoing.messages(messages, payloads, fields)
        with self._sending_many(made) as (carrying, note_all):
            note_all(receipts := self._producer.send_many(carrying, delay=delay, at=at, key=key))
            return receipts

    @overload
    def send_nowait(
        self, message: Message, on_done: OnReceipt | None = None, **delay: Unpack[DelayArguments]
    ) -> Future[Receipt]: ...

    @overload
    def send_nowait(
        self, subject: str, payload: object, on_done: OnReceipt | None = None, /, **fields: Unpack[SendFields]
    ) -> Future[Receipt]: ...

    def send_nowait(
        self,
        message: Message | str,
        *rest: Any,
        on_done: OnReceipt | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Future[Receipt]:
        """Queue a message; see `Producer.send_nowait`. The spans end with the future."""
        payload, callback = payload_and_callback(message, rest, on_done, is_optional=True)
        made = self._producer._outgoing.message(message, payload, fields)
        with self._until_known(made) as end:
            future = self._producer.send_nowait(made, callback, delay=delay, at=at, key=key)
        future.add_done_callback(partial(end_with, end))
        return future
