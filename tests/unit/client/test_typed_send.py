"""Shell. Payloads and filters in every call that sends, and messages as a stream."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import aclosing
from typing import Annotated, Any, TypedDict

import pytest

import qmq
import qmq.blocking
from qmq import payloads
from qmq.blocking.otel import TracedProducer as BlockingTracedProducer
from qmq.client.outgoing import ABSENT, Outgoing
from qmq.errors import CallError
from qmq.message import EXPIRES_AFTER
from qmq.otel import TracedProducer


@dataclasses.dataclass
class Order:
    id: int


FIELDS: dict[str, Any] = {
    "properties": {"n": 1},
    "tags": {"paid"},
    "order_key": "k",
    "retries_max": 3,
    "expires_after": 9,
}


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setenv("QMQ_METASERVER", "http://127.0.0.1:9")


def stamped(message: qmq.Message) -> qmq.Message:
    message.properties = {**message.properties, "stamp": "s"}
    return message


async def by_callback(send_nowait: Callable[..., object], *given: Any, **fields: Any) -> Any:
    receipt: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    send_nowait(*given, receipt.set_result, **fields)
    return await receipt


SENDS: dict[str, Callable[[Any], Any]] = {
    "message": lambda producer: producer.send(qmq.Message.of("a", Order(1), **FIELDS)),
    "send": lambda producer: producer.send("a", Order(1), **FIELDS),
    "send_many": lambda producer: producer.send_many("a", [Order(1)], **FIELDS),
    "nowait": lambda producer: by_callback(producer.send_nowait, "a", Order(1), **FIELDS),
}


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", SENDS)
async def test_payload_and_fields_are_sent(qmq_broker, name, is_traced):
    async with qmq.Producer(app="a", filters=[stamped]) as producer:
        await SENDS[name](TracedProducer(producer) if is_traced else producer)
        await producer.flush()
    (message,) = qmq_broker.messages("a")
    assert message.decode(Order) == Order(1)
    assert message.content_type == "application/json"
    assert (message["n"], message["stamp"], message.tags, message.order_key) == (1, "s", {"paid"}, "k")
    assert (message.retries_max, message[EXPIRES_AFTER]) == (3, "9000")


BLOCKING_SENDS: dict[str, Callable[[Any], Any]] = {
    "send": lambda producer: producer.send("a", Order(1), **FIELDS),
    "send_many": lambda producer: producer.send_many("a", [Order(1)], **FIELDS),
    "nowait": lambda producer: producer.send_nowait("a", Order(1), **FIELDS).result(20),
    "nowait with callback": lambda producer: producer.send_nowait("a", Order(1), print, **FIELDS).result(20),
}


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("name", BLOCKING_SENDS)
def test_blocking_producer_sends_payload_and_fields(qmq_blocking_broker, name, is_traced):
    with qmq.blocking.Producer(app="a", filters=[stamped]) as producer:
        BLOCKING_SENDS[name](BlockingTracedProducer(producer) if is_traced else producer)
    (message,) = qmq_blocking_broker.messages("a")
    assert message.decode(Order) == Order(1)
    assert (message["stamp"], message.tags) == ("s", {"paid"})


async def test_delayed_payload_is_sent(qmq_broker):
    async with qmq.Producer(app="a") as producer:
        receipt = await producer.send("a", Order(1), delay=60, key="k")
        assert receipt.is_stored
        qmq_broker.advance(61)
    assert [message.decode(Order) for message in await qmq_broker.wait_until_stored("a")] == [Order(1)]


async def test_codec_of_the_producer_is_the_default(qmq_broker):
    async with qmq.Producer(app="a", codec=payloads.Msgpack()) as producer:
        await producer.send("a", Order(1))
        await producer.send("a", Order(2), codec=payloads.Json())
    types = [message.content_type for message in qmq_broker.messages("a")]
    assert types == ["application/msgpack", "application/json"]


async def test_null_is_a_payload(qmq_broker):
    async with qmq.Producer(app="a") as producer:
        await producer.send("a", None)
    assert qmq_broker.messages("a")[0].body == b"null"


async def test_filter_may_replace_and_refuse_a_message(qmq_broker):
    def elsewhere(message: qmq.Message) -> qmq.Message:
        if "refused" in message:
            raise qmq.InvalidMessage("refused here")
        return message.copy_to("b")

    async with qmq.Producer(app="a", filters=[stamped, elsewhere]) as producer:
        await producer.send_many([qmq.Message("a")])
        with pytest.raises(qmq.InvalidMessage, match="refused here"):
            await producer.send(qmq.Message("a", {"refused": 1}))
    assert (len(qmq_broker.messages("a")), qmq_broker.messages("b")[0]["stamp"]) == (0, "s")


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda outgoing: outgoing.filtered_message("a", ABSENT, {}), r"a subject with its payload: \('a', payload\)"),
        (
            lambda outgoing: outgoing.filtered_message("a", qmq.Message("a"), {}),
            "the payload is a qmq.Message, .*message alone",
        ),
        (
            lambda outgoing: outgoing.filtered_message(qmq.Message("a"), Order(1), {}),
            "holds its content: give the message alone",
        ),
        (
            lambda outgoing: outgoing.filtered_message(qmq.Message("a"), ABSENT, {"tags": "t"}),
            "tags of a qmq.Message are set",
        ),
        (lambda outgoing: outgoing.filtered_message(Order(1), ABSENT, {}), "send a qmq.Message, not a Order"),
        (
            lambda outgoing: outgoing.filtered_messages("a", "payload", {}),
            r"several payloads as a list: \('a', \[payload",
        ),
        (lambda outgoing: outgoing.filtered_messages("a", [1], {"id": "x"}), "id= would be the same for all"),
        (
            lambda outgoing: list(outgoing.filtered_messages("a", [object()], {})),
            "a object has no form in JSON: send a dataclass",
        ),
    ],
)
def test_wrong_arguments_show_the_remedy(call, remedy):
    with pytest.raises(CallError, match=remedy):
        call(Outgoing(None, []))


def test_wrong_filters_show_the_remedy():
    async def coroutine(message: qmq.Message) -> qmq.Message:
        return message

    with pytest.raises(qmq.InvalidRequest, match="a filter of the producer is a plain function"):
        qmq.Producer(app="a", filters=[coroutine])  # type: ignore[list-item]
    with pytest.raises(qmq.InvalidMessage, match="returned None: a filter returns the qmq.Message to send"):
        Outgoing(None, [lambda message: None]).filtered_message(qmq.Message("a"), ABSENT, {})  # type: ignore[arg-type, return-value]


async def test_order_key_is_named_to_those_that_use_key(qmq_broker):
    async with qmq.Producer(app="a") as producer:
        with pytest.raises(qmq.InvalidRequest, match="Messages of one order have order_key="):
            await producer.send("a", Order(1), key="k")
        with pytest.raises(qmq.InvalidMessage, match="a subject with its payload and on_done"):
            producer.send_nowait("a", Order(1))


# Streams.

STREAM: dict[str, Any] = {"group": "g", "start": "earliest"}


async def test_next_step_of_a_stream_acks(qmq_broker):
    found: list[int] = []
    consumer = qmq.Consumer(app="a")
    async with qmq.Producer(app="a") as producer:
        await producer.send_many("a", range(3))
    async for message in consumer.stream("a", **STREAM):
        found.append(message.decode(int))
        if len(found) == 3:
            consumer.stop()  # the loop goes on: its next step acks this message
    assert found == [0, 1, 2]
    await qmq_broker.wait_until_consumed("a", "g")


async def test_message_of_a_failed_step_comes_again(qmq_broker):
    async with qmq.Producer(app="a") as producer:
        await producer.send_many("a", range(2))
    with pytest.raises(ZeroDivisionError):
        async with aclosing(qmq.Consumer(app="a").stream("a", **STREAM)) as messages:  # type: ignore[type-var]
            async for message in messages:
                1 / message.decode(int)
    async with aclosing(qmq.Consumer(app="a").stream("a", **STREAM)) as messages:  # type: ignore[type-var]
        async for message in messages:
            assert message.decode(int) in (0, 1)
            if message.decode(int) == 0:
                assert message.times == 2
                break


def test_wrong_arguments_of_a_stream_raise_at_the_call():
    with pytest.raises(qmq.InvalidRequest, match="retries_max is a whole number"):
        qmq.Consumer(app="a").stream("a", group="g", retries_max="3")  # type: ignore[arg-type]


@dataclasses.dataclass
class Invoice(Order): ...


class Fields(TypedDict):
    n: int


@pytest.mark.parametrize(
    ("kinds", "good", "bad"),
    [
        ([Order], Invoice(1), {"id": 1}),
        ([Invoice, str], "text", Order(1)),
        ([list[Order]], [1], (1,)),
        ([Order | None], None, 1),
        ([Annotated[int, "whole"]], 1, 1.5),
        ([float], 1, "1"),
        ([Fields], {}, []),
    ],
)
def test_payload_is_of_a_declared_type(kinds, good, bad):
    outgoing = Outgoing(None, [])
    for kind in kinds:
        outgoing.declare("a", kind, "")
    outgoing._check_declared("a", good)
    with pytest.raises(qmq.InvalidMessage, match=f"'a' is declared with .*, and the payload is {type(bad).__name__}"):
        outgoing.message("a", bad, {})
    outgoing.message("b", 1, {})
    outgoing.declare("a", None, "")
    outgoing._check_declared("a", bad)


@pytest.mark.parametrize("send", [*SENDS.values()][1:])
async def test_payload_of_another_type_is_refused(send):
    async with qmq.Producer(app="a") as producer:
        producer.declare("a", Invoice)
        with pytest.raises(qmq.InvalidMessage, match="is declared with Invoice, and the payload is Order"):
            await send(producer)


def test_wrong_declarations_are_refused():
    for producer in (qmq.Producer(app="a"), qmq.blocking.Producer(app="a")):
        with pytest.raises(qmq.InvalidName, match="'a/b' contains '/'"):
            producer.declare("a/b", Order)
        with pytest.raises(qmq.InvalidRequest, match="about= is a sentence about the message, not 7"):
            producer.declare("a", Order, about=7)
        with pytest.raises(qmq.InvalidRequest, match="payload_type {'n': 1} is no type: give a class"):
            producer.declare("a", {"n": 1})
