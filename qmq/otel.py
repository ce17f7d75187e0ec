"""Shell. OpenTelemetry: spans of messages that are sent, handled and acked, in one trace from end to end; numbers.

    Qmq.Produce.Send        a message, or a `send_many`, until its outcome: subject, messageId, outcome
      Qmq.QueueSender.Send  its transport to a broker group: broker
      Qmq.Consume.Process   its filters and handler, at each delivery: subject, messageId, times
        Qmq.Consume.Ack     the consumer's decision: subject, messageId, consumerGroup, outcome

The names are QMQ's. The context travels in properties with the prefix `qtrace_`. Without a tracer provider no span is
recorded, and the context of a received message is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack, overload

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider

from qmq.client.batch import OnReceipt, Outcome, Receipt, Receipts
from qmq.client.delay import DelayArguments
from qmq.client.handler import check_callable
from qmq.client.numbers import FAMILIES, METRIC_PREFIX, SUM, Kind, read
from qmq.client.outgoing import ABSENT, Absent, MessageFields, SendFields, payload_and_callback
from qmq.client.producer import Producer, read_delay
from qmq.client.received import ReceivedMessage
from qmq.errors import DeadLetter, RetryLater
from qmq.message import Message
from qmq.version import VERSION

PREFIX = "qtrace_"
SYSTEM = {"messaging.system": "qmq"}


def inject(message: Message, context: Context | None = None) -> None:
    """Set the context of `message` to `context`, by default the current one; replaces an earlier context."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    if carrier:
        own = {name: value for name, value in message.properties.items() if not name.startswith(PREFIX)}
        message.properties = own | {PREFIX + name: value for name, value in carrier.items()}


def extract(message: Message) -> Context:
    """Return the context of `message`; an empty one if it has none."""
    carrier = {
        name.removeprefix(PREFIX): str(value) for name, value in message.properties.items() if name.startswith(PREFIX)
    }
    return propagate.extract(carrier, Context())


End = Callable[[Receipt | BaseException | None], None]
"""Ends the spans of a message with its receipt, or with its error."""


class Sending:
    """Spans of a producer, for coroutines and for threads."""

    def __init__(self, tracer_provider: TracerProvider | None) -> None:
        self._tracer = _tracer(tracer_provider)

    @contextmanager
    def _until_known(self, message: Message) -> Iterator[End]:
        """Begin the spans of a message and set its context; yield the function that ends the spans. An exception ends
        them, too.
        """
        span = self._tracer.start_span("Qmq.Produce.Send", kind=SpanKind.PRODUCER, attributes=SYSTEM)
        span.set_attribute("subject", message.subject)
        context = trace.set_span_in_context(span)
        carrying = self._tracer.start_span("Qmq.QueueSender.Send", context)

        def end(receipt: Receipt | BaseException | None) -> None:
            if isinstance(receipt, Receipt):
                note(receipt, span, carrying)
            elif receipt is not None:
                span.set_status(StatusCode.ERROR, f"{type(receipt).__name__}: {receipt}")
            carrying.end()
            span.end()

        try:
            inject(message, context)
            yield end
        except BaseException as error:
            end(error)
            raise

    @contextmanager
    def _sending(self, attributes: dict[str, str]) -> Iterator[tuple[Span, Span]]:
        start = self._tracer.start_as_current_span
        with start("Qmq.Produce.Send", kind=SpanKind.PRODUCER, attributes=SYSTEM | attributes) as span:
            with start("Qmq.QueueSender.Send") as carrying:
                yield span, carrying

    @contextmanager
    def _sending_many(
        self, messages: Iterable[Message]
    ) -> Iterator[tuple[Iterator[Message], Callable[[Receipts], None]]]:
        """Begin the spans of a `send_many`; yield the messages with their context, and the function that records the
        receipts.
        """
        with self._sending({}) as (span, _):

            def note_all(receipts: Receipts) -> None:
                span.set_attribute("messages", len(receipts))
                if missing := len(receipts) - receipts.count_of(Outcome.STORED):
                    span.set_attribute("messages.not_stored", missing)
                    span.set_status(StatusCode.ERROR, f"{missing} messages are not stored")

            yield _injected(messages, trace.set_span_in_context(span)), note_all


class TracedProducer(Sending):
    """Producer that adds spans and a context to messages; it wraps one that is opened and closed as usual.

    A `send_many` has one span for all its messages: a million spans would fill the memory. Programs without an event
    loop use `qmq.blocking.otel.TracedProducer`.
    """

    def __init__(self, producer: Producer, *, tracer_provider: TracerProvider | None = None) -> None:
        super().__init__(tracer_provider)
        self._producer = producer

    @overload
    async def send(self, message: Message, **delay: Unpack[DelayArguments]) -> Receipt: ...

    @overload
    async def send(self, message: Message, *, session: object) -> asyncio.Future[Receipt]: ...

    @overload
    async def send(self, subject: str, payload: object, /, **fields: Unpack[SendFields]) -> Receipt: ...

    @overload
    async def send(
        self, subject: str, payload: object, /, *, session: object, **fields: Unpack[MessageFields]
    ) -> asyncio.Future[Receipt]: ...

    async def send(
        self,
        message: Message | str,
        payload: object | Absent = ABSENT,
        *,
        session: object = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipt | asyncio.Future[Receipt]:
        """Send a message; see `Producer.send`. With a session, the spans end with the outcome, after the commit."""
        message = self._producer._outgoing.message(message, payload, fields)
        if session is not None:
            read_delay(delay, at, key, session)
            return await self._send_in(session, message)
        with self._sending({"subject": message.subject}) as (span, carrying):
            inject(message, trace.set_span_in_context(span))
            receipt = await self._producer.send(message, delay=delay, at=at, key=key)
            note(receipt, span, carrying)
            return receipt

    @overload
    async def send_many(self, messages: Iterable[Message], **delay: Unpack[DelayArguments]) -> Receipts: ...

    @overload
    async def send_many(
        self, subject: str, payloads: Iterable[object], /, **fields: Unpack[SendFields]
    ) -> Receipts: ...

    async def send_many(
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
            note_all(receipts := await self._producer.send_many(carrying, delay=delay, at=at, key=key))
            return receipts

    @overload
    def send_nowait(self, message: Message, on_done: OnReceipt, **delay: Unpack[DelayArguments]) -> None: ...

    @overload
    def send_nowait(
        self, subject: str, payload: object, on_done: OnReceipt, /, **fields: Unpack[SendFields]
    ) -> None: ...

    def send_nowait(
        self,
        message: Message | str,
        *rest: Any,
        on_done: Any = ABSENT,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        **fields: Unpack[MessageFields],
    ) -> None:
        """Queue a message; see `Producer.send_nowait`. The spans end with the outcome."""
        payload, callback = payload_and_callback(message, rest, on_done)
        check_callable("on_done", callback)
        made = self._producer._outgoing.message(message, payload, fields)
        with self._until_known(made) as end:

            def done(receipt: Receipt) -> object:
                end(receipt)
                return callback(receipt)

            self._producer.send_nowait(made, done, delay=delay, at=at, key=key)

    async def _send_in(self, session: object, message: Message) -> asyncio.Future[Receipt]:
        with self._until_known(message) as end:
            later = await self._producer.send(message, session=session)
            later.add_done_callback(partial(end_with, end))
            return later


class Tracing:
    """Filter for `Consumer.listen`, best the first one: the handler runs in a span of the producer's trace.

    Args:
        acks: whether the end of the handler decides the message; False with `auto_ack=False`.
    """

    def __init__(self, *, acks: bool = True, tracer_provider: TracerProvider | None = None) -> None:
        self._acks = acks
        self._tracer = _tracer(tracer_provider)

    async def __call__(self, message: ReceivedMessage, handle: Callable[[ReceivedMessage], Awaitable[object]]) -> None:
        identity = {"subject": message.subject, "messageId": str(message.id)}
        with self._tracer.start_as_current_span(
            "Qmq.Consume.Process",
            extract(message),
            kind=SpanKind.CONSUMER,
            attributes=SYSTEM | identity | {"times": message.times},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            outcome = "nack"
            try:
                await handle(message)
                outcome = "ack"
            except RetryLater as later:
                span.add_event("retry", {"reason": str(later)})  # not a failure
                raise
            except BaseException as error:
                outcome = "dead letter" if isinstance(error, DeadLetter) else "nack"
                span.record_exception(error)
                span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
                raise
            finally:
                if self._acks:
                    decided = identity | {"consumerGroup": message.group, "outcome": outcome}
                    self._tracer.start_span("Qmq.Consume.Ack", attributes=decided).end()


def _injected(messages: Iterable[Message], context: Context) -> Iterator[Message]:
    for message in messages:
        inject(message, context)
        yield message


def end_with(end: End, future: asyncio.Future[Receipt] | Future[Receipt]) -> None:
    """End the spans with the result of a future."""
    end(None if future.cancelled() else future.exception() or future.result())


def note(receipt: Receipt, span: Span, carrying: Span) -> None:
    span.set_attributes({"messageId": receipt.message_id, "outcome": receipt.outcome.value})
    carrying.set_attribute("broker", receipt.broker_group)
    if not receipt.is_stored:
        for failed in (span, carrying):
            failed.set_status(StatusCode.ERROR, receipt.reason)


def observe(meter_provider: MeterProvider | None = None) -> None:
    """Export the numbers of this process's clients (qmq.client.numbers) as instruments of OpenTelemetry, read when the
    provider collects. A histogram is two counters: its number of calls and its seconds.
    """
    meter = metrics.get_meter("qmq", VERSION, meter_provider)
    for name, family in FAMILIES.items():
        if family.kind is Kind.HISTOGRAM:
            seconds, calls = partial(_observed, name, is_sum=True), partial(_observed, name, is_sum=False)
            meter.create_observable_counter(METRIC_PREFIX + name, [seconds], "s", family.help)
            meter.create_observable_counter(METRIC_PREFIX + name.replace("seconds", "calls"), [calls], "", family.help)
            continue
        create = meter.create_observable_counter if family.kind is Kind.COUNTER else meter.create_observable_gauge
        create(METRIC_PREFIX + name, [partial(_observed, name)], "", family.help)


def _observed(name: str, _: CallbackOptions, *, is_sum: bool | None = None) -> list[Observation]:
    """Return the values of one instrument: for a histogram, those of the buckets or of the sum."""
    values: dict[tuple[str, ...], float] = {}
    for sample in read():
        if sample.name == name and (is_sum is None or (sample.labels[-1] == SUM) is is_sum):
            labels = sample.labels if is_sum is None else sample.labels[:-1]
            values[labels] = values.get(labels, 0.0) + sample.value
    return [Observation(value, dict(zip(FAMILIES[name].labels, labels))) for labels, value in values.items()]


def _tracer(provider: TracerProvider | None) -> Tracer:
    return trace.get_tracer("qmq", VERSION, provider)
