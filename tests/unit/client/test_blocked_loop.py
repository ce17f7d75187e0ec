"""Shell. A handler that blocks its event loop is named in the log, and in the reason of its dead letter."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import qmq
from qmq.client import blocked_loop
from qmq.testing import Broker
from tests.support.waiting import consuming, until_async

LINES = "handler blocks its event loop", "task blocks the event loop"


class Noted(logging.Handler):
    """Lines of the monitor; `seen` is set by the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.seen = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.seen.set()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    monkeypatch.setattr(blocked_loop, "LOOK_S", 0.005)
    monkeypatch.setattr(blocked_loop, "BLOCKED_S", 0.02)
    handler = Noted()
    blocked_loop.log.addHandler(handler)
    yield handler
    blocked_loop.log.removeHandler(handler)


async def handle_one(handle: Callable[[qmq.ReceivedMessage], object], group: str, **terms: object) -> list[qmq.Message]:
    """Send one message to the handler until it is settled; return its dead letters."""
    async with Broker() as broker, qmq.Producer(metaserver=broker.metaserver, app="test") as producer:
        await producer.send(qmq.Message("s", id="m-1"))
        consumer = qmq.Consumer(metaserver=broker.metaserver, app="test")
        consumer.listen("s", group=group, start="earliest", **terms)(handle)
        async with consuming(consumer):
            await broker.wait_until_consumed("s", group)
        return broker.dead_letters("s", group)


def block(noted: Noted) -> None:
    assert noted.seen.wait(20), "the line of the log ends the block"


@pytest.mark.parametrize("error", [None, ValueError("late")])
async def test_blocking_handler_is_named_while_it_blocks(noted: Noted, error: Exception | None) -> None:
    async def on_order(message: qmq.ReceivedMessage) -> None:
        block(noted)
        if error is not None:
            raise error

    letters = await handle_one(on_order, f"named-{error}", retries_max=1)
    line = noted.lines[0]
    assert line.startswith(LINES[0]) and "on_order subject=s " in line and "id=m-1 sequence=0 messages=1" in line
    assert re.search(r"blocked_s=\d+ at=\S+/test_blocked_loop.py:\d+\(on_order\)>\S+/threading.py:\d+\(wait\)$", line)
    reason = r"delivered once; ValueError\('late'\); its handler blocked the event loop for \d+ s or longer at /\S+"
    assert [bool(re.fullmatch(reason, str(letter["qmq_deadReason"]))) for letter in letters] == [True] * bool(error)


async def test_blocking_task_of_a_handler_is_named(noted: Noted) -> None:
    async def part() -> None:
        block(noted)

    async def on_order(message: qmq.ReceivedMessage) -> None:
        await asyncio.gather(part())

    await handle_one(on_order, "parts")
    assert noted.lines[0].startswith(LINES[1]) and "test_blocked_loop.py" in noted.lines[0]


async def test_waiting_handler_is_not_named(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that computes for long and yields, nor a plain function."""
    asked, suspicion = set[object](), blocked_loop._suspect
    monkeypatch.setattr(blocked_loop, "BLOCKED_S", 20.0)

    def suspect(*about: object) -> object:
        if (found := suspicion(*about)).asked_s is not None:
            asked.add(found)
        return found

    async def yields(message: qmq.ReceivedMessage) -> None:
        while sum(found.has_run for found in list(asked)) < 3:
            computed_s = time.monotonic() + 0.02  # several looks: one between two calls sees no task
            while time.monotonic() < computed_s:
                pass
            await asyncio.sleep(0)

    monkeypatch.setattr(blocked_loop, "_suspect", suspect)
    await handle_one(yields, "yields")
    await handle_one(lambda message: threading.Event().wait(0.1), "plain")
    assert noted.lines == []


async def test_handler_of_a_process_that_stood_still_is_not_named(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_loop, "STILL_S", 0.0)

    async def on_order(message: qmq.ReceivedMessage) -> None:
        noted.seen.wait(0.2)

    await handle_one(on_order, "still")
    assert noted.lines == []


async def test_monitor_ends_with_the_last_worker(noted: Noted) -> None:
    await handle_one(lambda message: None, "last")
    await until_async(lambda: blocked_loop.MONITOR._thread is None)
    assert not blocked_loop.MONITOR._calls
