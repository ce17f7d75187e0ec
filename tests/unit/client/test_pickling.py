"""Shell. Messages, errors and clients that are pickled for another process, or copied."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib import import_module

import pytest

import qmq
import qmq.blocking
from qmq import errors
from qmq.errors import ClientClosed, QmqError
from qmq.reply import Requester
from tests.unit.client.world import fill, pulling

WAYS = (lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy)

PACKAGES = "errors", "ledger", "settings", "watchdog.settings", "delayserver.schedule.segment", "audit.copies"
for name in PACKAGES:  # subclasses outside of qmq.errors
    import_module(f"qmq.{name}")

OF_ARGUMENTS: dict[type[QmqError], QmqError] = {
    errors.RetryLater: errors.RetryLater(3.5),
    errors.CorruptFrame: errors.CorruptFrame(7, "checksum"),
    errors.ForeignSegment: errors.ForeignSegment(7, 9),
    errors.Overloaded: errors.Overloaded("full", "connections_max"),
    errors.SubjectFull: errors.SubjectFull("full", "lag", "a"),
    import_module("qmq.settings").InvalidSettings: import_module("qmq.settings").InvalidSettings(["one", "two"]),
}
"""Errors with more arguments than a text."""


def tree(root: type[QmqError]) -> list[type[QmqError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in tree(child) if cls.__module__.startswith("qmq"))]


@pytest.mark.parametrize("cls", tree(QmqError), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
def test_every_error_survives(cls: type[QmqError], way: Callable):
    error = OF_ARGUMENTS.get(cls)
    if error is None:
        error = cls.__new__(cls, "text")  # constructors outside of the client take other arguments
        vars(error).update(limit="field")
    error.add_note("a note")
    again = way(error)
    assert type(again) is cls and (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_retry_at_a_time_survives():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert pickle.loads(pickle.dumps(qmq.RetryLater(at=at))).at == at


class Late(qmq.RetryLater):
    """An application's error."""

    def __init__(self, order: str, *, minutes: int) -> None:
        super().__init__(60 * minutes)
        self.order = order


def test_error_of_an_application_survives():
    again = pickle.loads(pickle.dumps(Late("A-1", minutes=2)))
    assert (again.order, again.delay_s, str(again)) == ("A-1", 120, "retry in 120 s")


# Messages.


def facts_of(message: qmq.ReceivedMessage) -> tuple:
    """Return all that a handler may read."""
    return (
        (message.subject, message.sequence, message.id, dict(message.properties), set(message.tags)),
        (message.order_key, message.retries_max, message.expires_after, message.created_ms, message.due_ms),
        (message.times, message.group, message.broker_group, message.source, message.pull_sequence),
        (message.is_suspected, message.is_decided, message.is_dropped, message.expires_ms),
    )


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("way", WAYS, ids=["pickle", "copy", "deepcopy"])
async def test_received_message_survives(way: Callable, is_read: bool):
    async with pulling() as (broker, puller):
        fill(broker, range(2), tags={"t"}, order_key="k", retries_max=7, expires_after=3_000_000_000)
        (message,) = await puller.pull(1, timeout=60)
        if is_read:
            facts_of(message)
        assert facts_of(way(message)) == facts_of(message)


async def test_changes_of_a_message_survive():
    async with pulling(1) as (_, puller):
        (message,) = await puller.pull(1, timeout=60)
        message.properties = {"n": "changed"}
        again = pickle.loads(pickle.dumps(message))
        assert again["n"] == "changed" and not again.is_decided
        await message.ack()
        assert pickle.loads(pickle.dumps(message)).is_decided


async def test_pickled_message_is_decided_at_home():
    async with pulling(1) as (_, puller):
        (message,) = await puller.pull(1, timeout=60)
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(message))))
        for decide in (again.ack_nowait, again.nack_nowait, lambda: again.dead_letter_nowait("no")):
            with pytest.raises(ClientClosed, match="Decide the original"):
                decide()
        with pytest.raises(ClientClosed, match="Decide the original"):
            await puller.ack([again])
        copy.copy(message).ack_nowait()
        assert message.is_decided, "a copy in the same process has the session"


def work(message: qmq.ReceivedMessage) -> str:
    if message.times > 1:
        raise qmq.RetryLater(5)
    return f"{message['n']} {message.id}"


async def test_message_travels_to_a_process_pool():
    async with pulling(1) as (_, puller):
        (message,) = await puller.pull(1, timeout=60)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(work, message).result() == "0 g1-0"
            message._piece.times = 2
            assert pool.submit(work, message).exception().delay_s == 5


# Clients.


async def test_clients_name_why_they_stay():
    async with pulling() as (_, puller):
        used = puller._home
        with pytest.raises(TypeError, match="A puller cannot be pickled: .* Make one in the other process"):
            pickle.dumps(puller)
        with pytest.raises(TypeError, match="A consumer with listeners or pullers cannot be pickled"):
            pickle.dumps(used)
    with pytest.raises(TypeError, match="A consumer with listeners or pullers"):
        pickle.dumps(used)
    with pytest.raises(TypeError, match="A requester"):
        pickle.dumps(Requester(object(), used, reply_subject="a"))


async def test_opened_producer_names_why_it_stays():
    producer = qmq.Producer(metaserver="http://127.0.0.1:9", app="test", token="t")
    assert pickle.loads(pickle.dumps(producer))._app == "test"
    async with producer:
        with pytest.raises(TypeError, match="An opened producer cannot be pickled"):
            pickle.dumps(producer)
    with pytest.raises(TypeError, match="An opened producer"):
        copy.deepcopy(producer)


def test_blocking_clients_travel_or_name_why_not():
    options = {"metaserver": "http://127.0.0.1:9", "app": "test", "token": "t"}
    producer, consumer = qmq.blocking.Producer(**options), qmq.blocking.Consumer(**options)
    for client in (producer, consumer):
        pickle.loads(pickle.dumps(client))
    with pytest.raises(TypeError, match="A requester"):
        pickle.dumps(qmq.blocking.Requester(producer, consumer, reply_subject="a"))
    with pytest.raises(TypeError, match="A puller"):
        pickle.dumps(consumer.pull("a", group="g"))
    consumer.listen("a", group="g")(print)
    with pytest.raises(TypeError, match="A consumer with listeners"):
        pickle.dumps(consumer)
