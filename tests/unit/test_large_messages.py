"""Core. A large message is copied once to be encoded and once to be received: its body is no block among others."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from types import SimpleNamespace

import pytest

from qmq.broker.browse import Browse, Filter
from qmq.client.backlog import Backlog, QueuedMessage, SubjectQueue
from qmq.client.batch import Batch, MessageIds
from qmq.client.bulk import encode_run
from qmq.client.group_session import _cut
from qmq.client.journal import _digests
from qmq.client.link import Link
from qmq.codec import batch_blocks, encode_labels, encode_message, join_batch, label_of, without_body
from qmq.errors import OutcomeUnknown
from qmq.message import Message
from qmq.message_sizes import LARGE_BYTES_MIN
from qmq.redrive.dead_letters import DeadLetters
from qmq.remoting.commands import Command, Piece
from qmq.remoting.connection import Connection
from tests.unit.broker.test_browse import add
from tests.unit.log.logs import Copy

BODY = bytes(range(256)) * (32 << 10)
DATA = encode_message(Message("s", {"n": "1"}, body=BODY, id="i"), 0)
SMALL = encode_message(Message("s", {"n": "1"}, body=b"x", id="i"), 0)


@contextmanager
def copies_at_most(most: float) -> Iterator[None]:
    """Fail if the block takes more memory at a time than `most` bodies."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * len(BODY), f"{peak / len(BODY):.2f} bodies"


def test_encoding_copies_the_body_once():
    with copies_at_most(1.1):
        encode_message(Message("s", {"n": "1"}, body=BODY, id="i"), 0)


def test_queued_message_is_a_block_of_its_batch():
    queue = SubjectQueue("s", Backlog(10, 1 << 30))
    queue.add(QueuedMessage(DATA, "i", 1_000, lambda _: None, label_of({"t"}, None)))
    with copies_at_most(0.1):
        batch = queue.next_batch(1 << 20)
    assert any(block is DATA for block in batch.blocks)
    assert b"".join(batch.blocks) == join_batch([DATA]) + encode_labels([label_of({"t"}, None)])


def test_small_messages_share_a_block():
    assert batch_blocks([SMALL] * 1_000) == [join_batch([SMALL] * 1_000)]


def test_many_sends_the_body_itself():
    with copies_at_most(0.1):
        run = encode_run("s", [Message("s", body=BODY)], ids=MessageIds("p"), now_ms=0)
    assert any(block is BODY for block in run.blocks)


def test_connection_writes_a_large_part_by_itself():
    """`asyncio` joins the lines of a packet before Python 3.12."""
    written: list[bytes | memoryview] = []
    connection = Connection(SimpleNamespace(), 1 << 20)  # type: ignore[arg-type]
    connection._transport = SimpleNamespace(write=written.append)  # type: ignore[assignment]
    connection.push(Command.FRAMES, b"head", b"", DATA, memoryview(DATA)[:LARGE_BYTES_MIN], b"end")
    with_objects = [part.obj for part in written if isinstance(part, memoryview)]
    assert with_objects == [DATA, DATA] and with_objects[0] is DATA
    assert [len(part) for part in written[1:]] == [4, len(DATA), LARGE_BYTES_MIN, 3]


def test_broker_that_takes_bytes_is_not_silent():
    link = Link("g1", owner=SimpleNamespace(), routing=SimpleNamespace(), token="t", app="a")  # type: ignore[arg-type]
    link.connection = connection = SimpleNamespace(unsent_bytes=100)  # type: ignore[assignment]
    link.progressed(0.0)
    assert not link.is_late(4.0, 5.0)
    connection.unsent_bytes = 50
    assert not link.is_late(6.0, 5.0) and not link.is_late(11.0, 5.0)
    connection.unsent_bytes = 70  # the application sends more, and the broker takes nothing
    assert link.is_late(11.1, 5.0)
    link.progressed(11.2)
    assert not link.is_late(16.0, 5.0)


@pytest.mark.parametrize("step, result", [(LARGE_BYTES_MIN, "answer"), (1_000, "OutcomeUnknown")])
async def test_redrive_waits_while_bytes_move(monkeypatch, step, result):
    """Answers to heartbeats are bytes, too, and no progress."""
    monkeypatch.setattr("qmq.redrive.dead_letters.ANSWER_S", 0.001)

    class Slow:
        unsent_bytes = 0

        def __init__(self) -> None:
            self.answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
            self._reads = 0

        def request(self, command: Command, *parts: bytes) -> asyncio.Future[memoryview]:
            return self.answer

        @property
        def received_bytes(self) -> int:
            self._reads += 1
            if self._reads == 5:
                self.answer.set_result(memoryview(b"answer"))
            return self._reads * step

    letters = DeadLetters("g1", "s", "g", "", "")
    letters._connection = Slow()  # type: ignore[assignment]
    with nullcontext() if result == "answer" else pytest.raises(OutcomeUnknown):
        assert bytes(await letters._ask(Command.PULL)) == b"answer"


def test_received_message_is_copied_once():
    body = join_batch([DATA])
    with copies_at_most(1.1):
        cut = _cut([Piece(7, 5, 1, 0, 1, memoryview(body))])
    assert (cut.encoded, cut.sequences, cut.bytes) == ([DATA], [5], len(DATA))
    assert cut.searched == [without_body(DATA)] and len(cut.searched[0]) < 100


def test_small_messages_are_searched_at_once():
    cut = _cut([Piece(7, 5, 2, 0, 1, memoryview(join_batch([SMALL, SMALL])))])
    assert (cut.encoded, cut.searched) == ([SMALL, SMALL], [SMALL + SMALL])


@pytest.mark.parametrize(
    "data",
    [pytest.param(b"\x08garbage", id="garbage"), pytest.param(DATA[:30], id="cut"), pytest.param(b"", id="none")],
)
def test_invalid_message_is_searched_whole(data):
    assert without_body(data) == data


def test_journal_copies_no_large_message():
    blocks = [*batch_blocks([DATA]), encode_labels([1])]
    batch = Batch("s", ["i"], blocks, 0, lambda _: None, flags=2)
    with copies_at_most(0.1):
        digests = list(_digests(batch))
    assert digests == [sha256(DATA).hexdigest()]


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 40])
def test_journal_hashes_messages_over_any_blocks(cut):
    whole = join_batch([SMALL])
    for blocks in ([whole], [whole[:8], whole[8 : 8 + cut], whole[8 + cut :]]):
        assert list(_digests(Batch("s", ["i"], blocks, 0, lambda _: None))) == [sha256(SMALL).hexdigest()]


def test_browse_searches_no_large_body():
    """No other thread of the broker runs during a search: 1.3 ms a MiB."""
    copy = Copy.begun()
    add(copy, Message("s", {"n": "1"}, body=BODY, id="i"))
    for wanted in (Filter(), Filter(id="i"), Filter(properties={"n": "1"}), Filter(id="other")):
        browse = Browse(copy.log, "s", copy.log.end, 0, 9, wanted=wanted)
        frames = copy.log.stored.read_bodies(browse.next_frames())
        with copies_at_most(0.1):
            for _ in browse.look_through(frames):
                pass
        found = [(message.id, message.bytes, dict(message.properties)) for message in browse.found]
        assert found == ([] if wanted.id == "other" else [("i", len(DATA), {"n": "1"})])
