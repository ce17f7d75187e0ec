"""Shell. Spans without an event loop: one trace from producer to handler, and every span ends."""

from __future__ import annotations

from threading import Thread

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

import qmq.blocking
from qmq.blocking.otel import TracedProducer
from qmq.errors import InvalidMessage
from qmq.testing import BlockingBroker
from tests.unit.test_otel import ACK, CARRY, PROCESS, SEND, Traced, is_child


@pytest.fixture
def world():
    with BlockingBroker() as broker, qmq.blocking.Producer(metaserver=broker.metaserver, app="test") as producer:
        world = Traced(broker, producer, TracedProducer)
        yield world
        producer.flush()
    world.check_ends()


def test_blocking_handler_runs_in_the_callers_trace(world):
    consumer, seen = qmq.blocking.Consumer(metaserver=world.broker.metaserver, app="test"), []

    @consumer.listen("order", group="g", start="earliest", filters=[world.tracing])
    def handle(message):
        seen.append(trace.get_current_span())

    with world.provider.get_tracer("application").start_as_current_span("mine") as mine:
        receipt = world.producer.send(qmq.Message("order", {"n": "1"}))
    running = Thread(target=consumer.run)
    running.start()
    world.broker.wait_until_consumed("order", "g")
    consumer.stop()
    running.join(30)
    (send,), (carry,), (process,), (ack,) = (world.spans.named(name) for name in (SEND, CARRY, PROCESS, ACK))
    assert is_child(send, mine) and is_child(carry, send) and is_child(process, send) and is_child(ack, process)
    assert [span.get_span_context() for span in seen] == [process.get_span_context()]
    assert send.attributes["messageId"] == process.attributes["messageId"] == receipt.message_id


def test_send_many_has_one_span(world):
    messages = [qmq.Message("order", {"n": str(n)}) for n in range(30)] + [qmq.Message("order", {"x": "x" * 40_000})]
    world.producer.send_many(iter(messages))
    (send,) = world.spans.named(SEND)
    assert (send.attributes["messages"], send.attributes["messages.not_stored"]) == (31, 1)
    traces = {message["qtrace_traceparent"].split("-")[1] for message in world.broker.messages("order")}
    assert traces == {f"{send.context.trace_id:032x}"}


def test_spans_end_with_the_outcome(world):
    receipts = []
    assert world.producer.send_nowait(qmq.Message("order", {"n": "1"}), receipts.append).result(10).is_stored
    world.broker.refuse_next(InvalidMessage("not today"))
    assert not world.producer.send_nowait(qmq.Message("order", {"n": "2"})).result(10).is_stored
    with pytest.raises(InvalidMessage):
        world.producer.send_nowait(qmq.Message("order", {"n": object()})).result(10)
    world.broker.refuse_next(InvalidMessage("not today"))
    assert not world.producer.send(qmq.Message("order", {"n": "1"})).is_stored
    world.producer._producer.close()
    with pytest.raises(qmq.ClientClosed):
        world.producer.send_nowait(qmq.Message("order", {"n": "3"}))
    assert world.codes() == [StatusCode.UNSET, *[StatusCode.ERROR] * 4]
    assert len(world.spans.named(CARRY)) == 5 and [receipt.is_stored for receipt in receipts] == [True]
