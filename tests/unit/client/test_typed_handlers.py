"""Shell. Payloads from `send` to the handler: arguments, dead letters, unreadable bodies, replies, routers."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import fast_depends
import pytest

import qmq
import qmq.blocking
import qmq.testing
from qmq import payloads
from qmq.client import unreadable
from qmq.client.parameters import BoundHandler
from qmq.payloads import codec as registry
from tests.support.waiting import consuming

if TYPE_CHECKING:
    from qmq import ReceivedMessage as Delivered


@dataclasses.dataclass
class Order:
    id: int
    price: Decimal = Decimal("1.10")


@dataclasses.dataclass
class Invoice:
    order: int


ORDER = Order(1, Decimal("2.50"))
WRONG = qmq.Message("order", body=b'{"id": "x"}', content_type="application/json")
LISTEN: dict[str, Any] = {"group": "billing", "start": "earliest"}


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setenv("QMQ_METASERVER", "http://127.0.0.1:9")


async def handled(broker: qmq.testing.Broker, handler: Any, *messages: Any, **options: Any) -> None:
    """Send messages or payloads, and handle them until all are consumed."""
    async with qmq.Producer(app="a") as producer:
        consumer = qmq.Consumer(app="a", producer=producer)
        consumer.listen("order", **(LISTEN | options))(handler)
        for message in messages:
            given = (message,) if isinstance(message, qmq.Message) else ("order", message)
            (await producer.send(*given)).check()
        async with consuming(consumer):
            await broker.wait_until_consumed("order", "billing")


# Arguments.


class Recorder:
    """Handlers of all kinds; `calls` holds their arguments."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def payload(self, order: Order) -> None:
        self.calls.append((order,))

    async def both(self, message: qmq.ReceivedMessage, order: Order) -> None:
        self.calls.append((order, message.subject))

    async def unannotated_message(self, order: Order, message) -> None:
        self.calls.append((order, message.subject))

    def blocking(self, order: Order) -> None:
        self.calls.append((order,))

    async def with_default(self, order: Order, seats: int = 3) -> None:
        self.calls.append((order, seats))

    async def optional(self, order: Order | None) -> None:
        self.calls.append((order,))

    def __call__(self, order: Order, /) -> None:
        self.calls.append((order,))


def _with_session(session: str, order: Order, calls: list[Any]) -> None:
    calls.append((order, session))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("payload", (ORDER,)),
        ("both", (ORDER, "order")),
        ("unannotated_message", (ORDER, "order")),
        ("blocking", (ORDER,)),
        ("with_default", (ORDER, 3)),
        ("optional", (ORDER,)),
        ("__call__", (ORDER,)),
    ],
)
async def test_annotations_choose_the_arguments(qmq_broker, name, expected):
    recorder = Recorder()
    await handled(qmq_broker, recorder if name == "__call__" else getattr(recorder, name), ORDER)
    assert recorder.calls == [expected]


async def test_partial_handler_is_typed(qmq_broker):
    calls: list[Any] = []
    await handled(qmq_broker, partial(_with_session, "s", calls=calls), ORDER)
    assert calls == [(ORDER, "s")]


async def test_list_of_payloads_keeps_its_order(qmq_broker):
    calls: list[Any] = []

    async def handler(orders: list[Order], messages: list[qmq.ReceivedMessage]) -> None:
        calls.append((orders, [message.decode(Order) for message in messages]))

    await handled(qmq_broker, handler, *[Order(number) for number in range(3)], batch=10)
    assert [order.id for orders, _ in calls for order in orders] == [0, 1, 2]
    assert all(orders == again for orders, again in calls)


def test_handlers_of_messages_stay_as_they_are():
    async def annotated(message: qmq.ReceivedMessage) -> None: ...
    async def base(message: qmq.Message) -> None: ...
    async def unannotated(message) -> None: ...
    async def anything(message: Any) -> None: ...
    async def only_checked(message: Delivered) -> None: ...
    async def maybe(message: qmq.ReceivedMessage | None) -> None: ...
    async def messages(messages: list[qmq.ReceivedMessage]) -> None: ...
    async def either(given: qmq.ReceivedMessage | list[qmq.ReceivedMessage]) -> None: ...

    only_checked.__annotations__["message"] = "qmq.client.received.ReceivedMessage"
    for handler in (annotated, base, unannotated, anything, only_checked, maybe, print, [].append):
        assert BoundHandler(handler).call is handler
    assert BoundHandler(messages, is_batch=True).call is messages
    for is_batch in (False, True):
        assert BoundHandler(either, is_batch=is_batch).call is either


async def test_types_of_a_function_are_found(qmq_broker):
    @dataclasses.dataclass
    class Local:
        id: int

    found: list[Any] = []
    consumer = qmq.Consumer(app="a")

    @consumer.listen("order", **LISTEN)
    async def handler(order: Local) -> None:
        found.append(order)

    async with qmq.Producer(app="a") as producer, consuming(consumer):
        await producer.send("order", Local(1))
        await qmq_broker.wait_until_consumed("order", "billing")
    assert found == [Local(1)]


def _two_payloads(order: Order, invoice: Invoice) -> None: ...
def _undefined(order: Undefined) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def _no_list(order: Order) -> None: ...
def _session(order: Order, session: memoryview) -> None: ...
def _unknown(session: memoryview) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "remedy"),
    [
        (_two_payloads, {}, "'order' and 'invoice' would be payloads, and a message has one: use one class"),
        (_undefined, {}, "'Undefined' of 'order' has no meaning here .*define or import its type in the module"),
        (_no_list, {"batch": 5}, r"with batch= it takes a list: annotate 'order' with list\[…\]"),
        (_session, {}, r"'order' and 'session' would be payloads.*Depends\(…\)"),
        (_unknown, {}, r"'session': memoryview is no type .*register a codec .*Depends\(…\)"),
    ],
)
@pytest.mark.parametrize("make", [lambda: qmq.Consumer(app="a", metaserver="x"), qmq.Router])
def test_wrong_parameters_are_refused_at_registration(make, handler, options, remedy):
    with pytest.raises(qmq.InvalidRequest, match=remedy):
        make().listen("order", group="g", **options)(handler)


# Bodies that cannot be decoded.


async def test_invalid_body_is_a_dead_letter_at_once(qmq_broker):
    recorder = Recorder()
    await handled(qmq_broker, recorder.payload, ORDER, WRONG, ORDER)
    (dead,) = qmq_broker.dead_letters("order", "billing")
    assert dead["qmq_deadReason"] == "id: 'x' is not a whole number"
    assert (dead["qmq_times"], dead.body) == ("1", WRONG.body)
    assert recorder.calls == [(ORDER,), (ORDER,)]


@pytest.mark.parametrize("most_once", [False, True])
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_invalid_body_leaves_its_neighbours_in_the_list(qmq_broker, most_once, is_blocking):
    found: list[int] = []

    async def handler(orders: list[Order]) -> None:
        found.extend(order.id for order in orders)

    def blocking(orders: list[Order]) -> None:
        found.extend(order.id for order in orders)

    messages = (Order(1), WRONG, Order(2))
    await handled(qmq_broker, blocking if is_blocking else handler, *messages, batch=10, most_once=most_once)
    assert sorted(found) == [1, 2]
    assert len(qmq_broker.dead_letters("order", "billing")) == 1


async def test_invalid_body_is_a_dead_letter_before_its_ack(qmq_broker):
    recorder = Recorder()
    await handled(qmq_broker, recorder.payload, WRONG, ORDER, most_once=True)
    assert len(qmq_broker.dead_letters("order", "billing")) == 1
    assert recorder.calls == [(ORDER,)]


class Backwards:
    content_type = "text/x-backwards"
    calls = 0

    def encode(self, value: Any, /) -> bytes:
        return str(value)[::-1].encode()

    def decode(self, data: bytes, type: Any, /) -> Any:
        self.calls += 1
        if self.calls < 3:
            raise qmq.UnreadablePayload("key 'new' is not here yet")
        return data.decode()[::-1]


@pytest.fixture
def _forget_codecs(monkeypatch):
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(registry, "_own", set())
    yield
    registry._find.cache_clear()


@pytest.mark.usefixtures("_forget_codecs")
@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("most_once", [False, True])
async def test_unreadable_body_waits_for_its_key(qmq_broker, monkeypatch, caplog, batch, most_once):
    monkeypatch.setattr(unreadable, "WAIT_S", 0.05)
    found: list[Any] = []

    async def single(text: str, message: qmq.ReceivedMessage) -> None:
        found.append((text, message.times))

    async def several(texts: list[str], messages: list[qmq.ReceivedMessage]) -> None:
        found.extend((text, message.times) for text, message in zip(texts, messages))

    async with qmq.Producer(app="a") as producer:
        consumer = qmq.Consumer(app="a")
        consumer.listen("order", **LISTEN, retries_max=1, batch=batch, most_once=most_once)(
            several if batch else single
        )
        await producer.send("order", "abc", codec=payloads.register(Backwards()))
        async with consuming(consumer):
            await qmq_broker.wait_until_consumed("order", "billing")
    assert found == [("abc", 1)]
    assert qmq_broker.dead_letters("order", "billing") == []
    assert "it stays in its group" in caplog.text and "key 'new' is not here yet" in caplog.text


@pytest.mark.usefixtures("_forget_codecs")
async def test_unreadable_body_goes_back_when_the_consumer_stops(qmq_broker):
    recorder = Recorder()
    async with qmq.Producer(app="a") as producer:
        await producer.send("order", "abc", codec=Backwards())
        consumer = qmq.Consumer(app="a")
        consumer.listen("order", **LISTEN, retries_max=1)(recorder.payload)
        listener = consumer.listeners["order", "billing"]
        async with consuming(consumer):
            while not listener.unreadable_messages:
                await asyncio.sleep(0.01)
    async with qmq.Consumer(app="a").pull("order", **LISTEN) as puller:
        (message,) = await puller.pull(1, timeout=20)
        assert (message.times, message.is_suspected) == (1, False)
        with pytest.raises(qmq.UnreadablePayload):
            message.decode(str)
        await puller.ack([message])


async def test_filter_may_upcast_an_older_payload(qmq_broker):
    recorder = Recorder()

    async def upcast(message: qmq.ReceivedMessage, handle: Any) -> None:
        if message.get_int("version", 1) == 1:
            old = message.decode(dict[str, int])
            message.body, message.content_type = payloads.encode(Order(old["number"]))
        await handle(message)

    old = qmq.Message.of("order", {"number": 7})
    new = qmq.Message.of("order", Order(8), {"version": 2})
    await handled(qmq_broker, recorder.payload, old, new, filters=[upcast])
    assert recorder.calls == [(Order(7),), (Order(8),)]


# Results.


async def test_reply_is_stored_before_the_ack(qmq_broker):
    async def invoiced(order: Order) -> Invoice:
        return Invoice(order.id)

    await handled(qmq_broker, invoiced, ORDER, reply_to="invoice")
    (reply,) = qmq_broker.messages("invoice")
    assert reply.decode(Invoice) == Invoice(1)


async def test_returned_messages_are_sent(qmq_broker):
    def blocking(order: Order) -> list[qmq.Message]:
        return [qmq.Message.of(f"invoice.{number}", Invoice(order.id), {"n": number}) for number in range(2)]

    await handled(qmq_broker, blocking, ORDER)
    assert [qmq_broker.messages(f"invoice.{number}")[0].decode(Invoice) for number in range(2)] == [Invoice(1)] * 2


async def test_reply_keeps_its_id_when_its_message_is_handled_again(qmq_broker):
    refused = []

    async def invoiced(order: Order, message: qmq.ReceivedMessage) -> list[qmq.Message]:
        if not refused:
            refused.append(True)
            return [qmq.Message.of("invoice", 1), qmq.Message("in/valid")]
        return [qmq.Message.of("invoice", 1)]

    await handled(qmq_broker, invoiced, ORDER, retry_delay=timedelta(milliseconds=10))
    first, second = qmq_broker.messages("invoice")
    assert first.id == second.id
    assert qmq_broker.dead_letters("order", "billing") == []


async def test_returned_message_without_a_producer_fails(qmq_broker):
    async def invoiced(order: Order) -> qmq.Message:
        return qmq.Message.of("invoice", order.id)

    async with qmq.Producer(app="a") as producer:
        await producer.send("order", ORDER)
    consumer = qmq.Consumer(app="a")
    consumer.listen("order", **LISTEN, retries_max=1)(invoiced)
    async with consuming(consumer):
        await qmq_broker.wait_until_consumed("order", "billing")
    (dead,) = qmq_broker.dead_letters("order", "billing")
    assert "is not sent: see Consumer(producer=…)" in str(dead["qmq_deadReason"])


def test_reply_to_needs_a_producer():
    with pytest.raises(qmq.InvalidRequest, match=r"Consumer\(producer=…\)"):
        qmq.Consumer(app="a", metaserver="x").listen("order", group="g", reply_to="invoice")
    with pytest.raises(qmq.InvalidRequest, match="producer= is a qmq.Producer"):
        qmq.Consumer(app="a", metaserver="x", producer="invoice")  # type: ignore[arg-type]


async def test_run_opens_and_closes_the_producer(qmq_broker):
    producer = qmq.Producer(app="a")
    consumer = qmq.Consumer(app="a", producer=producer)

    @consumer.listen("order", **LISTEN, reply_to="invoice")
    async def invoiced(number: int) -> int:
        return number + 1

    async with qmq.Producer(app="a") as sender:
        await sender.send("order", 1)
    async with consuming(consumer):
        await qmq_broker.wait_until_consumed("order", "billing")
        assert producer.is_open
    assert not producer.is_open
    assert [message.decode(int) for message in qmq_broker.messages("invoice")] == [2]


def test_blocking_consumer_replies_with_a_blocking_producer(qmq_blocking_broker):
    router = qmq.Router()

    @router.listen("order", **LISTEN, reply_to="invoice")
    def invoiced(order: Order) -> Invoice:
        consumer.stop()
        return Invoice(order.id)

    with qmq.blocking.Producer(app="a") as producer:
        producer.send("order", ORDER, tags={"paid"})
        consumer = qmq.blocking.Consumer(app="a", producer=producer)
        consumer.include(router)
        consumer.run()
    (reply,) = qmq_blocking_broker.messages("invoice")
    assert reply.decode(Invoice) == Invoice(1)


# Dependencies.


def _log() -> list[Any]:
    raise AssertionError("replaced by each test")


async def _customer(order: Order, message: qmq.ReceivedMessage) -> str:
    return f"customer of {order.id} in {message.subject}"


async def _injected(
    order: Order, log: Annotated[list[Any], fast_depends.Depends(_log)], customer: str = fast_depends.Depends(_customer)
) -> None:
    log.append((order, customer))


async def test_dependencies_get_payload_and_message(qmq_broker):
    found: list[Any] = []
    with fast_depends.dependency_provider.scope(_log, lambda: found):
        await handled(qmq_broker, _injected, ORDER)
    assert found == [(ORDER, "customer of 1 in order")]


def _blocking_injected(orders: list[Order], log: Annotated[list[Any], fast_depends.Depends(_log)]) -> None:
    log.append(orders)


async def test_dependencies_of_a_blocking_list_handler(qmq_broker):
    found: list[Any] = []
    with fast_depends.dependency_provider.scope(_log, lambda: found):
        await handled(qmq_broker, _blocking_injected, ORDER, batch=5)
    assert found == [[ORDER]]


# Routers.


async def test_router_registers_its_handlers_with_consumers(qmq_broker):
    recorder, router = Recorder(), qmq.Router()
    consumer = qmq.Consumer(app="a")
    assert router.listen("order", **LISTEN)(recorder.payload) == recorder.payload
    consumer.include(router)
    router.listen("later", **LISTEN)(recorder.both)
    assert list(consumer.listeners) == [("order", "billing"), ("later", "billing")]
    async with qmq.Producer(app="a") as producer, consuming(consumer):
        await producer.send_many("order", [ORDER, ORDER])
        await qmq_broker.wait_until_consumed("order", "billing")
    assert recorder.calls == [(ORDER,), (ORDER,)]


def test_router_refuses_wrong_arguments_at_once():
    router = qmq.Router()
    with pytest.raises(qmq.InvalidName):
        router.listen("a/b", group="g")
    with pytest.raises(qmq.InvalidRequest, match="concurrency is a whole number"):
        router.listen("a", group="g", concurrency=0)
    with pytest.raises(qmq.InvalidRequest, match="takes a qmq.Router"):
        qmq.Consumer(app="a", metaserver="x").include(qmq.Consumer(app="a", metaserver="x"))  # type: ignore[arg-type]
    consumer = qmq.Consumer(app="a", metaserver="x")
    for _ in range(2):
        router.listen("a", group="g")(print)
    with pytest.raises(qmq.InvalidRequest, match="has a listener or puller for 'a' and group 'g' already"):
        consumer.include(router)
