"""Shell. `qmq hello` receives exactly its own message, beside any other content of the subject."""

from __future__ import annotations

import asyncio

import pytest

import qmq
import qmq.testing
from qmq.deploy import hello


async def test_hello_finds_its_message_behind_others(capsys):
    async with qmq.testing.Broker() as broker:
        async with qmq.Producer(metaserver=broker.metaserver, app="shop") as producer:
            assert (await producer.send_many(qmq.Message(hello.SUBJECT) for _ in range(250))).all_stored
        await hello.hello(broker.metaserver, "any")
    printed = capsys.readouterr().out.splitlines()
    own = printed[1].partition(" id ")[2]
    assert len(printed) == 253 and printed[0] == "sent: stored" and printed[-1].endswith(f" id {own}")


def test_hello_fails_without_its_message(monkeypatch):
    monkeypatch.setattr(hello, "WAIT_S", 0.3)

    async def test() -> None:
        async with qmq.testing.Broker() as broker:
            other = qmq.Consumer(metaserver=broker.metaserver, app="other")
            async with other.pull(hello.SUBJECT, group="hello", exclusive=True):
                await broker.wait_until_subscribed(hello.SUBJECT, "hello")
                await hello.hello(broker.metaserver, "any")

    with pytest.raises(SystemExit, match="qmq Lag"):
        asyncio.run(test())
