"""Shell. OpenTelemetry for producers without an event loop; see qmq.otel.

Consumers use the filter `qmq.otel.Tracing`: a handler runs in its thread within the span.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import Unpack, overload

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from qmq.blocking.producer import Producer
from qmq.client.batch import OnReceipt, Receipt, Receipts
from qmq.client.delay import DelayArguments
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

    def send(
        self, message: Message, *, session: object = None, **delay: Unpack[DelayArguments]
    ) -> Receipt | Future[Receipt]:
        """Send a message; see `Producer.send`. With a session, the spans end with the outcome, after the commit."""
        if session is not None:
            read_delay(**delay, session=session)
            with self._until_known(message) as end:
                later = self._producer.send(message, session=session)
                later.add_done_callback(partial(end_with, end))
                return later
        with self._sending({"subject": message.subject}) as (span, carrying):
            inject(message, trace.set_span_in_context(span))
            receipt = self._producer.send(message, **delay)
            note(receipt, span, carrying)
            return receipt

    def send_many(self, messages: Iterable[Message], **delay: Unpack[DelayArguments]) -> Receipts:
        """Send messages; see `Producer.send_many`."""
        with self._sending_many(messages) as (carrying, note_all):
            note_all(receipts := self._producer.send_many(carrying, **delay))
            return receipts

    def send_nowait(
        self, message: Message, on_done: OnReceipt | None = None, **delay: Unpack[DelayArguments]
    ) -> Future[Receipt]:
        """Queue a message; see `Producer.send_nowait`. The spans end with the future."""
        with self._until_known(message) as end:
            future = self._producer.send_nowait(message, on_done, **delay)
        future.add_done_callback(partial(end_with, end))
        return future
