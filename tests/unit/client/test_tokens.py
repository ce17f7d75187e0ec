"""Shell. Tokens that are rotated, revoked or wrong, and clients that reach no broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import qmq
from qmq.access import TokenFile
from qmq.client import puller, route_watch, subscription
from qmq.errors import AccessError, MissingRight, NotServed
from qmq.remoting.commands import Command
from tests.support.waiting import until_async
from tests.unit.client import world
from tests.unit.client.world import (
    TOKEN,
    LocalBroker,
    LocalMetaserver,
    cluster,
    consumer_of,
    fill,
    ns,
    producer_of,
    pull_all,
)

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(route_watch, "RETRY_S_MAX", 0.02)
    monkeypatch.setattr(route_watch, "ANSWER_TIMEOUT_S", 0.1)
    monkeypatch.setattr(route_watch, "REJECTED_S", 0.1)


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """File of QMQ_TOKEN_FILE, with the valid token."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    monkeypatch.setenv("QMQ_TOKEN_FILE", str(path))
    monkeypatch.delenv("QMQ_TOKEN", raising=False)
    return path


def revoke(monkeypatch, broker: LocalBroker, metaserver: LocalMetaserver | None, *, valid: str = "new") -> None:
    """Reject the token, cut its connections, and end the metaserver's streams; None: its streams stay for a while."""
    monkeypatch.setattr(world, "TOKEN", valid)
    broker.cut()
    if metaserver is not None:
        metaserver.notify()


def consumer(metaserver: LocalMetaserver) -> qmq.Consumer:
    return qmq.Consumer(metaserver=metaserver.url, app="test", consumer_id="c1")


async def test_rotated_file_is_read_again(monkeypatch, file, metaserver, broker):
    async with consumer(metaserver).pull("a", group="g", start="earliest") as puller:
        fill(broker, range(1))
        assert ns(await pull_all(puller, 1)) == [0]
        file.write_text("new")
        revoke(monkeypatch, broker, metaserver)
        fill(broker, range(1, 2))
        assert ns(await pull_all(puller, 1)) == [1]


async def test_file_is_read_again_after_a_refusal(file, metaserver):
    file.write_text("old")
    async with qmq.Producer(metaserver=metaserver.url, app="test") as producer:
        file.write_text(TOKEN)
        receipt = await producer.send(qmq.Message("a", {}))
        while not receipt.is_stored:  # the first connection may have had the old token
            assert isinstance(receipt.error, AccessError)
            receipt = await producer.send(qmq.Message("a", {}))


@pytest.mark.parametrize("is_rotated", [True, False], ids=["another token", "the same"])
async def test_missing_right_of_an_old_token_is_repeated(monkeypatch, file, is_rotated):
    """A token with more rights is in the file already, and the connection has the one before."""
    right = MissingRight("token 'shop' may not produce to 'a'")
    async with cluster("g1") as (metaserver, [broker]), qmq.Producer(metaserver=metaserver.url, app="test") as producer:
        assert (await producer.send(qmq.Message("a", {"n": "0"}))).is_stored
        if is_rotated:
            file.write_text("new")
            monkeypatch.setattr(world, "TOKEN", "new")

        def refuse_once(connection, packet, attempt) -> bool:
            broker.on_produce = lambda *_: False
            connection.refuse(packet, right)
            return True

        broker.on_produce = refuse_once
        receipt = await producer.send(qmq.Message("a", {"n": "1"}))
        assert receipt.is_stored if is_rotated else receipt.error.args == right.args


async def test_subscribe_is_repeated_with_the_new_token(monkeypatch, file, metaserver, broker):
    fill(broker, range(1))
    rights = iter([MissingRight("may not consume"), None])
    refusal = broker.refusal
    is_first = lambda packet: packet.code == Command.SUBSCRIBE and next(rights, None)
    monkeypatch.setattr(broker, "refusal", lambda packet: is_first(packet) or refusal(packet))
    broker.holds = {Command.SUBSCRIBE}
    async with consumer(metaserver).pull("a", group="g", start="earliest") as pulling:
        await until_async(lambda: broker.held)
        file.write_text("new")
        monkeypatch.setattr(world, "TOKEN", "new")
        broker.holds, held = set(), broker.held
        for connection, packet in held:
            broker.packet_received(connection, packet)
        assert ns(await pull_all(pulling, 1)) == [0]


async def test_wrong_token_ends_run(file, metaserver):
    file.write_text("wrong")
    listening = consumer(metaserver)
    listening.listen("a", group="g")(print)
    with pytest.raises(AccessError, match=f"unknown token; put a valid token into {file}"):
        await asyncio.wait_for(listening.run(), WAIT_S)


@pytest.mark.parametrize("has_stream", [False, True], ids=["stream ended", "stream open"])
async def test_revoked_token_ends_a_pull(monkeypatch, has_stream, metaserver, broker):
    fill(broker, range(1))
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
        assert ns(await pull_all(puller, 1)) == [0]
        revoke(monkeypatch, broker, None if has_stream else metaserver)
        with pytest.raises(AccessError, match="rejects the token: unknown token"):
            await asyncio.wait_for(puller.pull(1, timeout=1_000), WAIT_S)


async def test_rejection_lasts_before_a_client_ends(monkeypatch, metaserver, broker):
    """A new token reaches all metaservers within a second or two."""
    monkeypatch.setattr(route_watch, "REJECTED_S", 1_000)
    monkeypatch.setattr(world, "TOKEN", "not yet there")
    fill(broker, range(1))
    client = qmq.Consumer(metaserver=metaserver.url, app="test", token=TOKEN)
    async with client.pull("a", group="g", start="earliest") as puller:
        await until_async(lambda: "unknown token" in puller.trouble)
        monkeypatch.setattr(world, "TOKEN", TOKEN)
        assert ns(await pull_all(puller, 1)) == [0]


async def test_revoked_token_ends_waiting_sends(monkeypatch):
    async with cluster("g1") as (metaserver, [broker]), producer_of(metaserver, timeout_s=1_000) as producer:
        broker.holds.add(Command.PRODUCE)
        sent = asyncio.create_task(producer.send(qmq.Message("a", {})))
        await until_async(lambda: len(broker.held) == 1)
        revoke(monkeypatch, broker, None)
        receipt = await asyncio.wait_for(sent, WAIT_S)
        assert receipt.outcome is qmq.Outcome.UNKNOWN and "rejects the token" in receipt.reason
        receipt = await asyncio.wait_for(producer.send(qmq.Message("a", {})), WAIT_S)
        assert receipt.outcome is qmq.Outcome.REFUSED and isinstance(receipt.error, AccessError)


async def test_broker_that_rejects_a_valid_token_ends_nothing(monkeypatch):
    """The metaserver decides: the broker may belong to another installation."""
    monkeypatch.setattr(route_watch, "REPEAT_S", 0.0)
    async with cluster("g1", "g2") as (metaserver, [broker, stranger]):
        monkeypatch.setattr(stranger, "_authenticate", lambda at, packet: at.refuse(packet, AccessError("unknown")))
        fill(broker, range(1))
        async with consumer_of(metaserver).pull("a", group="g", start="earliest") as puller:
            assert ns(await pull_all(puller, 1)) == [0]
            metaserver.requests.clear()
            await until_async(lambda: len([ask for ask in metaserver.requests if "a" in ask.subjects]) > 2)
            assert puller.trouble == "g2: unknown"
            fill(broker, range(1, 2))
            assert ns(await pull_all(puller, 1)) == [1]


# Without a broker.


async def test_pull_without_a_broker_raises(monkeypatch, metaserver, broker):
    """An empty result would mean that all messages were read."""
    monkeypatch.setattr(puller, "CUT_OFF_S", 0.2)
    await broker.stop()
    async with consumer_of(metaserver).pull("a", group="g") as pulling:
        await until_async(lambda: "Connect call failed" in pulling.trouble)
        with pytest.raises(NotServed, match=r"no broker group is connected: g1: .*Connect call failed"):
            await pulling.pull(1, timeout=0.01)
        assert await pulling.pull(1, timeout=0) == [], "it returns prefetched messages only"


async def test_pull_without_a_metaserver_raises(monkeypatch):
    monkeypatch.setattr(puller, "CUT_OFF_S", 0.2)
    client = qmq.Consumer(metaserver="http://127.0.0.1:9", app="test", token=TOKEN)
    async with client.pull("a", group="g") as pulling:
        with pytest.raises(NotServed, match="the metaserver at http://127.0.0.1:9 sent no route"):
            await pulling.pull(1, timeout=0.01)


async def test_timeout_begins_after_the_connection(metaserver, broker):
    broker.holds = {Command.SUBSCRIBE}
    fill(broker, range(1))
    async with consumer_of(metaserver).pull("a", group="g", start="earliest") as pulling:
        pulled = asyncio.create_task(pulling.pull(1, timeout=0.01))
        await until_async(lambda: broker.held)
        assert not pulled.done()
        broker.release()
        assert ns(await pulled) == [0]


async def test_pull_of_an_unknown_subject_returns_none():
    async with cluster() as (metaserver, _), consumer_of(metaserver).pull("a", group="g") as pulling:
        assert await pulling.pull(1, timeout=0.01) == [] and not pulling.trouble


async def test_consumer_names_why_it_is_cut_off(monkeypatch, metaserver, broker):
    monkeypatch.setattr(subscription, "TROUBLE_S", 1_000)
    await broker.stop()
    listening = consumer_of(metaserver)
    listening.listen("a", group="g")(print)
    running = asyncio.create_task(listening.run())
    await until_async(lambda: "Connect call failed" in listening.cut_off)
    assert listening.cut_off.startswith("a: g1: ")
    await broker.start(broker.port)
    await until_async(lambda: not listening.cut_off)
    await broker.stop()
    await until_async(lambda: listening.listeners["a", "g"].trouble)
    assert not listening.cut_off, "a restart of a broker takes seconds"
    monkeypatch.setattr(subscription, "TROUBLE_S", 0.0)
    assert listening.cut_off.startswith("a: g1: ")
    listening.stop()
    await running
    assert not listening.cut_off


# The file.


def test_token_file_outlives_its_replacement(file, monkeypatch, caplog):
    monkeypatch.chdir(file.parent)
    token = TokenFile(Path("token"), TOKEN)
    monkeypatch.chdir("/")
    file.unlink()
    assert token.read() == TOKEN and f"file={file}" in caplog.text
    file.write_text("new\n")
    file.chmod(0o600)
    assert token.read() == "new"
