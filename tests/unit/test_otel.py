"""Shell. Spans over an in-memory broker: one trace from producer to consumer, and every span ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import qmq
from qmq.errors import InvalidMessage
from qmq.otel import TracedProducer, Tracing, extract, inject
from qmq.outbox.schema import create_statements
from qmq.testing import Broker

SEND, CARRY, PROCESS, ACK = "Qmq.Produce.Send", "Qmq.QueueSender.Send", "Qmq.Consume.Process", "Qmq.Consume.Ack"


class Spans(SpanProcessor):
    """Keeps ended spans in order, and counts open ones."""

    def __init__(self):
        self.ended = []
        self.open = set()

    def on_start(self, span, parent_context=None):
        self.open.add(span.context.span_id)

    def on_end(self, span):
        self.open.remove(span.context.span_id)
        self.ended.append(span)

    def named(self, name):
        return [span for span in self.ended if span.name == name]


class Traced:
    """Broker, and a producer with and without spans, of either library."""

    def __init__(self, broker, producer, traced):
        self.broker = broker
        self.plain = producer
        self.spans = Spans()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(self.spans)
        self.producer = traced(producer, tracer_provider=self.provider)
        self.tracing = Tracing(tracer_provider=self.provider)

    def codes(self):
        return [span.status.status_code for span in self.spans.named(SEND)]

    def check_ends(self):
        assert self.spans.open == set(), "spans that never ended"
        assert trace.get_current_span() is trace.INVALID_SPAN, "a span that stayed active"


class World(Traced):
    """Also a consumer for the test's listeners."""

    def __init__(self, broker, producer):
        super().__init__(broker, producer, TracedProducer)
        self.consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")

    def pass_all(self):
        """Listen with a handler that does nothing."""
        self.consumer.listen("order", group="g", start="earliest", filters=[self.tracing])(handle)

    async def consume(self, subject="order", group="g"):
        """Run the consumer until the group has settled all messages."""
        running = asyncio.create_task(self.consumer.run())
        await self.broker.wait_until_consumed(subject, group)
        running.cancel()
        await asyncio.wait([running])


@asynccontextmanager
async def world():
    async with Broker() as broker:
        async with qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
            w = World(broker, producer)
            yield w
        w.check_ends()


async def handle(message):
    pass


def is_child(span, parent):
    return span.parent.span_id == parent.context.span_id and span.context.trace_id == parent.context.trace_id


async def test_one_trace_from_producer_to_ack():
    async with world() as w:
        w.pass_all()
        receipt = await w.producer.send(qmq.Message("order", {"n": "1"}))
        await w.consume()
        (send,), (carry,), (process,), (ack,) = (w.spans.named(name) for name in (SEND, CARRY, PROCESS, ACK))
        assert is_child(carry, send) and is_child(process, send) and is_child(ack, process)
        identity = {"subject": "order", "messageId": receipt.message_id}
        assert dict(send.attributes) == identity | {"messaging.system": "qmq", "outcome": "stored"}
        assert dict(carry.attributes) == {"broker": "test"}
        assert dict(process.attributes) == identity | {"messaging.system": "qmq", "times": 1}
        assert dict(ack.attributes) == identity | {"consumerGroup": "g", "outcome": "ack"}


async def test_transaction_spans_end_with_the_outcome(tmp_path):
    database = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    with database.begin() as connection:
        for statement in create_statements("sqlite"):
            connection.execute(text(statement))
    async with world() as w:
        with Session(database) as session:
            later = await w.producer.send(qmq.Message("order", id="1"), session=session)
            assert w.spans.named(SEND) == []
            session.commit()
            await later
            refused = await w.producer.send(qmq.Message("order", id="2"), session=session)
            session.rollback()
            await refused
            with pytest.raises(InvalidMessage):
                await w.producer.send(qmq.Message("order", {"qmq_x": "1"}), session=session)
        await asyncio.sleep(0)
        outcomes = [span.attributes.get("outcome") for span in w.spans.named(SEND)]
        assert sorted(map(str, outcomes)) == ["None", "refused", "stored"]
        assert w.broker.messages("order")[0].get("qtrace_traceparent")
    database.dispose()


async def test_handler_runs_in_its_span():
    async with world() as w:
        tracer = w.provider.get_tracer("application")

        @w.consumer.listen("order", group="coroutine", start="earliest", filters=[w.tracing])
        async def coroutine(message):
            with tracer.start_as_current_span("coroutine's own"):
                await asyncio.sleep(0)

        @w.consumer.listen("order", group="thread", start="earliest", filters=[w.tracing])
        def thread(message):
            with tracer.start_as_current_span("thread's own"):
                pass

        await w.producer.send(qmq.Message("order", {"n": "1"}))
        running = asyncio.create_task(w.consumer.run())
        for group in ("coroutine", "thread"):
            await w.broker.wait_until_consumed("order", group)
        running.cancel()
        await asyncio.wait([running])
        for name in ("coroutine's own", "thread's own"):
            (own,) = w.spans.named(name)
            assert [process for process in w.spans.named(PROCESS) if is_child(own, process)]


async def test_each_delivery_has_a_span():
    async with world() as w:
        errors = [ValueError("bad"), qmq.RetryLater(1.0), qmq.DeadLetter("broken")]

        @w.consumer.listen("order", group="g", start="earliest", filters=[w.tracing])
        async def handle(message):
            raise errors[message.times - 1]

        await w.producer.send(qmq.Message("order", {"n": "1"}))
        await w.consume()
        (send,), processes = w.spans.named(SEND), w.spans.named(PROCESS)
        assert all(is_child(process, send) for process in processes)
        assert [process.attributes["times"] for process in processes] == [1, 2, 3]
        assert [process.status.status_code for process in processes] == [
            StatusCode.ERROR,
            StatusCode.UNSET,
            StatusCode.ERROR,
        ]
        assert [event.name for process in processes for event in process.events] == [
            "exception",
            "retry",
            "exception",
        ]
        assert [ack.attributes["outcome"] for ack in w.spans.named(ACK)] == ["nack", "nack", "dead letter"]


async def test_a_cancelled_handler_ends_its_span():
    async with world() as w:
        began = asyncio.Event()

        async def handle(message):
            began.set()
            await asyncio.Event().wait()

        message = await received(w, qmq.Message("order", {"n": "1"}))
        handling = asyncio.create_task(w.tracing(message, handle))
        await began.wait()
        handling.cancel()
        await asyncio.wait([handling])
        assert handling.cancelled()
        assert [span.name for span in w.spans.ended] == [ACK, PROCESS]
        assert w.spans.named(ACK)[0].attributes["outcome"] == "nack"


async def test_no_ack_span_without_auto_ack():
    async with world() as w:
        tracing = Tracing(acks=False, tracer_provider=w.provider)
        await tracing(await received(w, qmq.Message("order", {"n": "1"})), handle)
        assert [span.name for span in w.spans.ended] == [PROCESS]


async def received(w, message):
    """Send a message without a span and pull it."""
    await w.plain.send(message)
    async with w.consumer.pull(message.subject, group="puller", start="earliest") as puller:
        (message,) = await puller.pull(1, timeout=30.0)
        await puller.ack([message])
        return message


async def test_message_without_context_starts_a_trace():
    async with world() as w:
        with w.provider.get_tracer("application").start_as_current_span("unrelated"):
            await w.tracing(await received(w, qmq.Message("order", {"n": "1"})), handle)
        assert w.spans.named(PROCESS)[0].parent is None


async def test_delayed_message_keeps_its_trace():
    async with world() as w:

        @w.consumer.listen("order", group="g", start="earliest", filters=[w.tracing])
        async def handle(message):
            assert message.due_ms is not None

        (await w.producer.send(qmq.Message("order", {"n": "1"}), delay=60)).check()
        assert (await w.producer.send_many([qmq.Message("order")], delay=60)).all_stored
        receipts = []
        w.producer.send_nowait(qmq.Message("order"), receipts.append, delay=60, key="k")
        await w.plain.flush()
        assert receipts[0].due_ms is not None
        with pytest.raises(qmq.InvalidRequest, match="commit"):
            await w.producer.send(qmq.Message("order"), session=object(), delay=1)
        w.broker.advance(61)
        await w.consume()
        sent, processed = ({span.context.trace_id for span in w.spans.named(name)} for name in (SEND, PROCESS))
        assert len(w.spans.named(PROCESS)) == 3 and processed <= sent


async def test_send_many_has_one_span():
    async with world() as w:
        w.pass_all()
        messages = [qmq.Message("order", {"n": str(n)}) for n in range(30)] + [
            qmq.Message("order", {"x": "x" * 40_000})
        ]
        await w.producer.send_many(iter(messages))
        await w.consume()
        (send,), processes = w.spans.named(SEND), w.spans.named(PROCESS)
        assert len(processes) == 30 and all(is_child(process, send) for process in processes)
        assert (send.attributes["messages"], send.attributes["messages.not_stored"]) == (31, 1)
        assert send.status.status_code is StatusCode.ERROR


async def test_spans_end_with_the_outcome():
    async with world() as w:
        receipts = asyncio.Queue()
        w.producer.send_nowait(qmq.Message("order", {"n": "1"}), receipts.put_nowait)
        assert (await receipts.get()).is_stored
        w.broker.refuse_next(InvalidMessage("not today"))
        w.producer.send_nowait(qmq.Message("order", {"n": "2"}), receipts.put_nowait)
        assert not (await receipts.get()).is_stored
        with pytest.raises(InvalidMessage):
            w.producer.send_nowait(qmq.Message("order", {"n": object()}), receipts.put_nowait)
        assert len(w.spans.named(CARRY)) == 3
        w.broker.refuse_next(InvalidMessage("not today"))
        assert not (await w.producer.send(qmq.Message("order", {"n": "1"}))).is_stored
        with pytest.raises(InvalidMessage):
            await w.producer.send(qmq.Message("order", {"n": object()}))
        assert w.codes() == [StatusCode.UNSET, *[StatusCode.ERROR] * 4]


def test_context_is_set_in_prefixed_properties():
    provider = TracerProvider(shutdown_on_exit=False)
    mine = {"n": 1, "qtrace_old": "of an earlier sender"}
    message = qmq.Message("order", mine)
    with provider.get_tracer("application").start_as_current_span("mine") as span:
        inject(message)
    assert set(message.properties) == {"n", "qtrace_traceparent"}
    assert mine == {"n": 1, "qtrace_old": "of an earlier sender"}
    carried = trace.get_current_span(extract(message)).get_span_context()
    assert (carried.trace_id, carried.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)


async def test_without_provider_messages_are_unchanged():
    async with Broker() as broker, qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
        message = qmq.Message("order", {"n": "1"})
        assert (await TracedProducer(producer).send(message)).is_stored
        assert message.properties == {"n": "1"}


def test_opentelemetry_is_imported_on_use_only():
    code = """
import sys, qmq
qmq.Producer, qmq.Consumer
sys.exit(any(name.partition(".")[0] == "opentelemetry" for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
