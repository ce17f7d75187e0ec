"""Shell. Beginners' mistakes raise at the call, with the remedy in the text."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import qmq
import qmq.blocking
import qmq.testing
from qmq.blocking.background import Background
from qmq.client.delay import delay_of, schedule_request, target_of
from qmq.codec import batch_encoder
from qmq.remoting import commands
from qmq.subjects import check_subject
from tests.support.ports import free_ports
from tests.unit.client.world import TOKEN

NOWHERE = "http://127.0.0.1:9"


def producer(**options: Any) -> qmq.Producer:
    return qmq.Producer(**{"metaserver": NOWHERE, "app": "test", "token": TOKEN} | options)


def consumer(**options: Any) -> qmq.Consumer:
    return qmq.Consumer(**{"metaserver": NOWHERE, "app": "test", "token": TOKEN} | options)


async def handler(message: qmq.ReceivedMessage) -> None: ...


CLIENTS = [qmq.Producer, qmq.Consumer, qmq.blocking.Producer, qmq.blocking.Consumer]


@pytest.mark.parametrize("make", CLIENTS)
@pytest.mark.parametrize("address", [None, "", "ftp://10.0.0.1", "http://", 8080])
def test_invalid_metaserver_address_shows_an_example(make, address):
    with pytest.raises(qmq.InvalidRequest, match="http://mq1:8080"):
        make(metaserver=address, app="test", token=TOKEN)


@pytest.mark.parametrize("address", ["10.0.0.1:8080", "http://10.0.0.1:8080", "https://qmq.example.com", "localhost"])
def test_short_addresses_are_completed(address):
    producer(metaserver=address)


@pytest.mark.parametrize("name", ["timeout_s", "answer_timeout_s"])
@pytest.mark.parametrize("seconds", ["3", -1, 0, float("nan"), None])
def test_impossible_timeout_is_refused_by_name(name, seconds):
    with pytest.raises(qmq.InvalidRequest, match=rf"^{name} is seconds, more than 0"):
        producer(**{name: seconds})


@pytest.mark.parametrize("seconds", ["3", -1, float("nan")])
def test_drain_time_is_zero_or_more(seconds):
    consumer(drain_s=0)
    with pytest.raises(qmq.InvalidRequest, match="^drain_s is seconds, 0 or more"):
        consumer(drain_s=seconds)


PRODUCER_CALLS: dict[str, Callable[[qmq.Producer], Awaitable[object]]] = {
    "send": lambda client: client.send(qmq.Message("a")),
    "send delayed": lambda client: client.send(qmq.Message("a"), delay=1),
    "send_many": lambda client: client.send_many([qmq.Message("a")]),
    "send_nowait": lambda client: asyncio.sleep(0, client.send_nowait(qmq.Message("a"), print)),
    "flush": lambda client: client.flush(),
    "close": lambda client: client.close(),
    "cancel": lambda client: client.cancel(subject="a", key="k"),
    "list_recurring": lambda client: client.list_recurring(subject="a"),
}


@pytest.mark.parametrize("name", sorted(PRODUCER_CALLS.keys() - {"close"}))
async def test_unopened_and_closed_producers_raise(name):
    client = producer()
    for remedy in ("async with", "was closed"):
        with pytest.raises(qmq.ClientClosed, match=remedy):
            await PRODUCER_CALLS[name](client)
        async with client:
            pass


@pytest.mark.parametrize("wrong", [{"orderNo": 42}, "paid", None])
async def test_other_types_are_not_sent(wrong):
    async with producer() as client:
        with pytest.raises(qmq.InvalidMessage, match="send a qmq.Message"):
            await client.send(wrong)
        with pytest.raises(qmq.InvalidMessage, match="send a qmq.Message"):
            await client.send_many([wrong])
        with pytest.raises(qmq.InvalidMessage, match="send a qmq.Message"):
            client.send_nowait(wrong, print)


async def test_one_message_is_not_taken_for_several():
    """It has `[name]`, by which Python would iterate over it."""

    async with producer() as client:
        with pytest.raises(TypeError, match="not iterable"):
            await client.send_many(qmq.Message("a", {"n": "1"}))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lambda: qmq.Message("a", "paid"), "properties are a dict"),
        (lambda: qmq.Message("a", [("n", 1)]), "properties are a dict"),
        (lambda: qmq.Message("a", {"n": {"deep": 1}}), "Message.of_json"),
        (lambda: qmq.Message("a", {"n": "x" * 32_768}), "32768 bytes.*set_large"),
        (lambda: qmq.Message("a", {"n": "\ud800"}), "not valid Unicode"),
        (lambda: qmq.Message("a", {"n": datetime(2026, 1, 1)}), "astimezone"),
        (lambda: qmq.Message("a", tags=["pay", ""]), "a tag is a str that is not blank, not ''"),
    ],
    ids=["a text as properties", "a list as properties", "a dict within", "long", "half a letter", "no zone", "no tag"],
)
async def test_invalid_content_shows_the_remedy(message: Callable[[], qmq.Message], says: str):
    async with producer() as client:
        with pytest.raises(qmq.InvalidMessage, match=says) as sent:
            await client.send(message())
        (receipt,) = await client.send_many([message()])
        assert receipt.outcome is qmq.Outcome.REFUSED
        assert receipt.reason.partition(": ")[2] == str(sent.value).partition(": ")[2]


async def test_a_wrong_address_is_named_in_the_receipt():
    """Gap of QMQ, section 10: the first look-up blocks without limit."""
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with producer(metaserver=address, timeout_s=0.3) as client:
        receipt = await client.send(qmq.Message("a"))
    assert receipt.outcome is qmq.Outcome.REFUSED
    assert isinstance(receipt.error, qmq.NoRoute)
    assert f"the metaserver at {address} sent no route: " in receipt.reason


async def test_consumer_id_and_listener_are_needed():
    with pytest.raises(qmq.InvalidName):
        consumer(consumer_id="a\nb")
    with pytest.raises(qmq.InvalidRequest, match="listen"):
        await consumer().run()


def test_decorator_without_arguments_raises():
    with pytest.raises(qmq.InvalidName, match="subject is a str"):
        consumer().listen(handler)  # type: ignore[arg-type]


def test_uncallable_handler_is_refused():
    async def none() -> None: ...

    async def two(message: qmq.ReceivedMessage, session: object) -> None: ...

    def named(*, message: qmq.ReceivedMessage) -> None: ...

    for function in (none, two, named):
        with pytest.raises(qmq.InvalidRequest, match="must take one argument, the message"):
            consumer().listen("a", group="g")(function)  # type: ignore[arg-type]
    with pytest.raises(qmq.InvalidRequest, match="must take one argument, a list of messages"):
        consumer().listen("a", group="g", batch=2)(none)  # type: ignore[arg-type]


def test_handler_may_have_default_parameters():
    async def more(message: qmq.ReceivedMessage, *rest: object, seats: int = 1, **others: object) -> None: ...

    class Tickets:
        async def on_order(self, message: qmq.ReceivedMessage) -> None: ...

        async def __call__(self, message: qmq.ReceivedMessage) -> None: ...

    def with_session(session: object, message: qmq.ReceivedMessage) -> None: ...

    for function in (
        more,
        Tickets().on_order,
        Tickets(),
        partial(with_session, None),
        print,
        [].append,
        lambda _: None,
    ):
        consumer().listen("a", group="g")(function)


@pytest.mark.parametrize("way", ["listen", "pull"])
def test_a_broadcast_with_a_group_is_refused(way):
    with pytest.raises(qmq.InvalidRequest, match="leave out group="):
        getattr(consumer(), way)("a", group="g", broadcast=True)


@pytest.mark.parametrize("way", ["listen", "pull"])
@pytest.mark.parametrize("name", ["retries_max", "prefetch_messages", "prefetch_bytes", "unacked_max"])
@pytest.mark.parametrize("wrong", [1000 / 2, "500", True])
def test_message_counts_are_whole_numbers(way, name, wrong):
    """Regression: half of a thousand is a float, with which a worker failed at its first long list."""
    with pytest.raises(qmq.InvalidRequest, match=f"^{name} is a whole number"):
        getattr(consumer(), way)("a", group="g", **{name: wrong})


@pytest.mark.parametrize("wrong", [1000 / 2, "500", True, 0, -1, 10_001])
def test_handler_counts_are_whole_numbers(wrong):
    for name in ("concurrency", "batch"):
        with pytest.raises(qmq.InvalidRequest, match=f"^{name} is a whole number"):
            consumer().listen("a", group="g", **{name: wrong})
    client = consumer()
    client.listen("a", group="g")(handler)
    with pytest.raises(qmq.InvalidRequest, match="^concurrency is a whole number"):
        client.listeners["a", "g"].concurrency = wrong


@pytest.mark.parametrize("wrong", ["5", timedelta(days=2), timedelta(seconds=-1), float("nan")])
def test_the_pause_between_attempts_is_at_most_a_day(wrong):
    with pytest.raises(qmq.InvalidRequest, match="a delay is 0 to 86400 s, or a timedelta, not"):
        consumer().listen("a", group="g", retry_delay=wrong)
    consumer().listen("a", group="g", retry_delay=timedelta(minutes=5))


async def test_reason_must_be_a_str():
    """Regression: it failed when the nack was sent; after four of these the consumer sent none."""

    async with qmq.testing.Broker() as broker:
        async with qmq.Producer(metaserver=broker.metaserver, app="a") as sender:
            await sender.send(qmq.Message("a"))
        client = qmq.Consumer(metaserver=broker.metaserver, app="a")
        async with client.pull("a", group="g", start="earliest") as puller:
            (message,) = await puller.pull(1, timeout=60)
            for refuse in (message.nack, message.dead_letter, message.nack_nowait, message.dead_letter_nowait):
                with pytest.raises(qmq.InvalidRequest, match="a reason is a str, not ValueError"):
                    if asyncio.iscoroutine(done := refuse(ValueError("no"))):  # type: ignore[arg-type]
                        await done
            assert not message.is_decided
            await puller.ack([message])


async def _from_another_loop(call: Callable[[], Awaitable[object]]) -> object:
    """Await a call on the event loop of another thread."""
    return await asyncio.wait_for(asyncio.to_thread(lambda: asyncio.run(_awaited(call))), 20)


async def _awaited(call: Callable[[], Awaitable[object]]) -> object:
    return await call()


@pytest.mark.parametrize("name", PRODUCER_CALLS)
async def test_producer_rejects_another_event_loop(name):
    async with producer(timeout_s=1) as client:
        with pytest.raises(qmq.InvalidRequest, match="outside the event loop that opened it"):
            await _from_another_loop(lambda: PRODUCER_CALLS[name](client))


async def test_send_nowait_rejects_a_thread_without_loop():
    async with producer() as client:
        with pytest.raises(qmq.InvalidRequest, match="outside the event loop"):
            await asyncio.to_thread(client.send_nowait, qmq.Message("a"), print)


async def test_consumer_rejects_another_event_loop():
    client = consumer()
    client.listen("b", group="g")(handler)
    async with client.pull("a", group="g") as puller:
        for call in (lambda: puller.pull(1, timeout=1), puller.flush, lambda: puller.__aexit__(None, None, None)):
            with pytest.raises(qmq.InvalidRequest, match="outside the event loop"):
                await _from_another_loop(call)
        with pytest.raises(qmq.InvalidRequest, match="outside the event loop"):
            await _from_another_loop(client.run)


def _sent(message: qmq.Message) -> object:
    return batch_encoder("a", 1)(message)


BLANK: dict[str, tuple[str, Callable[[str], object]]] = {
    "metaserver of a producer": ("HTTP address", lambda text: producer(metaserver=text)),
    "metaserver of a consumer": ("HTTP address", lambda text: consumer(metaserver=text)),
    "app of a producer": ("app is blank", lambda text: producer(app=text)),
    "app of a consumer": ("app is blank", lambda text: consumer(app=text)),
    "token of a producer": ("token is blank", lambda text: producer(token=text)),
    "token of a consumer": ("token is blank", lambda text: consumer(token=text)),
    "consumer id": ("consumer id", lambda text: consumer(consumer_id=text)),
    "outbox table": ("not the name of a table", lambda text: producer(outbox_table=text)),
    "subject of a listener": ("subject", lambda text: consumer().listen(text, group="g")),
    "subject of a puller": ("subject", lambda text: consumer().pull(text, group="g")),
    "group of a listener": ("consumer group", lambda text: consumer().listen("a", group=text)),
    "group of a puller": ("consumer group", lambda text: consumer().pull("a", group=text)),
    "group of a broadcast": ("broadcast's group", lambda text: consumer().pull("a", group=text, broadcast=True)),
    "tag of a listener": ("not blank", lambda text: consumer().listen("a", group="g", tags=[text])),
    "tag of a message": ("not blank", lambda text: _sent(qmq.Message("a", id="m", tags=[text]))),
    "order key": ("not blank", lambda text: _sent(qmq.Message("a", id="m", order_key=text))),
    "subject of a message": ("subject", lambda text: check_subject(text)),
    "key of a delayed message": ("not blank", lambda text: delay_of(1, None, text, now_ms=1)),
    "key of a cancellation": ("key", lambda text: target_of(None, "a", None, text)),
    "name of a schedule": ("name of a recurring schedule", lambda text: _schedule(name=text)),
    "owner of a schedule": ("owner of a recurring schedule", lambda text: _schedule(owner=text)),
    "group of the broker in memory": ("group", lambda text: qmq.testing.Broker(group=text)),
}


def _schedule(**fields: str) -> object:
    texts = {"name": "n", "cron": "0 8 * * *", "timezone": "UTC", "owner": "o"} | fields
    return commands.encode_recur(schedule_request(qmq.Message("a"), **texts))


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
@pytest.mark.parametrize("name", BLANK)
def test_blank_text_is_refused_by_name(name, text):
    match, call = BLANK[name]
    with pytest.raises(qmq.QmqError, match=match):
        call(text)


# Threads and sockets of gevent or eventlet: clients hung past every timeout.


def patch(monkeypatch, library: str, *names: str) -> None:
    """Load a stand-in for the module in which the library reports replaced modules."""
    module, function = {
        "gevent": ("gevent.monkey", "is_module_patched"),
        "eventlet": ("eventlet.patcher", "is_monkey_patched"),
    }[library]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: names.__contains__}))


@pytest.mark.parametrize("library, name", [("gevent", "threading"), ("gevent", "socket"), ("eventlet", "thread")])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_client_is_rejected_beside_green_threads(monkeypatch, client, library, name):
    patch(monkeypatch, library, name)
    with pytest.raises(qmq.InvalidRequest, match=f"^{library} has replaced .* use threads"):
        client(metaserver=NOWHERE, app="test", token=TOKEN)


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
async def test_client_made_before_the_patch_is_rejected(monkeypatch, library):
    opened, listening = producer(), consumer()
    listening.listen("a", group="g")(print)
    puller = listening.pull("b", group="g")
    patch(monkeypatch, library, "select")
    for opens in (opened.__aenter__, puller.__aenter__, listening.run):
        with pytest.raises(qmq.InvalidRequest, match=library):
            await opens()
    with pytest.raises(qmq.InvalidRequest, match=library):
        Background()


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_loaded_library_that_replaced_nothing_is_accepted(monkeypatch, library):
    patch(monkeypatch, library, "time", "subprocess")
    for client in CLIENTS:
        client(metaserver=NOWHERE, app="test", token=TOKEN)
