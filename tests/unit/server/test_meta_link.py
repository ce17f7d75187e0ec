"""Shell. A broker and a metaserver that refuses it or does not answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from qmq.broker.settings import BrokerSettings
from qmq.errors import DiskFailed, NotServed, OperatorError
from qmq.log import RealDisk
from qmq.proto import qmq_pb2 as pb
from qmq.replication.assignment import Assignment
from qmq.replication.identity import IdentityFile
from qmq.server import meta_link
from qmq.server.meta_link import RETRIES_S, MetaLink
from qmq.server.patience import SILENT_S, SILENT_S_MAX, Patience
from qmq.server.service import Service
from qmq.types import Role
from tests.simulation.loop import VirtualLoop

SETTINGS = BrokerSettings(hostname="g1-a", data="unused", token="t")


class Node:
    is_of_another, owner = False, ""

    def __init__(self, error=None):
        self.started, self.error = 0, error
        self.lost = []

    def lose_part(self, why):
        self.lost.append(why)

    def start_without_metaserver(self):
        if self.error is not None:
            raise self.error
        self.started += 1
        return True


def refusal(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="because")


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        pytest.param(NotServed("nobody answers"), 1, id="not reached"),
        pytest.param(refusal(grpc.StatusCode.UNAVAILABLE), 1, id="its database is away"),
        pytest.param(refusal(grpc.StatusCode.FAILED_PRECONDITION), 0, id="not added, or another disk"),
        pytest.param(refusal(grpc.StatusCode.ALREADY_EXISTS), 0, id="another process has this part"),
        pytest.param(refusal(grpc.StatusCode.UNAUTHENTICATED), 0, id="wrong token"),
        pytest.param(OperatorError("this data directory belongs to g1-b"), 0, id="a directory of another broker"),
    ],
)
def test_which_errors_let_a_broker_start_alone(error, starts):
    node = Node()
    link = MetaLink(SimpleNamespace(node=node, guarded=lambda call: call()), SETTINGS)
    link.failed(error)
    link.start_alone()
    assert node.started == starts
    is_taken = isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert node.lost == (["because"] if is_taken else []), "the part of another process ends at once"


def test_disk_failure_while_starting_alone_ends_the_process():
    """I15. Otherwise the broker would have no part until a metaserver answers."""
    ended: list[BaseException] = []
    service = SimpleNamespace(node=Node(DiskFailed("no space left")), fail=ended.append, _stir=lambda: None)
    service._run_guarded = partial(Service._run_guarded, service)
    service.guarded = partial(Service.guarded, service)
    MetaLink(service, SETTINGS).start_alone()
    assert [str(error) for error in ended] == ["no space left"]


@pytest.mark.parametrize(
    ("served_s", "waits"),
    [
        pytest.param(0.01, list(RETRIES_S), id="another process with the same name registers again and again"),
        pytest.param(60, [0.0] * len(RETRIES_S), id="metaservers that end after a while"),
    ],
)
def test_retry_delay_grows_unless_served(monkeypatch, served_s, waits):
    """Two machines with copies of one broker's disk would end each other's heartbeats without a pause."""
    link, now, waited = MetaLink(SimpleNamespace(node=Node()), SETTINGS), 100.0, []

    async def find():
        return "127.0.0.1:9"

    async def live(stub):
        nonlocal now
        link.served(now)
        now += served_s
        raise refusal(grpc.StatusCode.ABORTED)

    async def sleep(seconds):
        waited.append(seconds)
        if len(waited) == len(waits):
            raise asyncio.CancelledError

    async def body():
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)
        await link.run()

    monkeypatch.setattr(link, "_find", find)
    monkeypatch.setattr(link, "_live", live)
    monkeypatch.setattr(meta_link.asyncio, "sleep", sleep)
    monkeypatch.setattr(meta_link.random, "uniform", lambda low, high: 1.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body())
    assert waited == waits


async def test_register_reports_begins_until_assigned(tmp_path):
    """Also after it started with its remembered part, which may be of an earlier term."""

    disk = RealDisk(tmp_path)
    node = SimpleNamespace(
        identity=IdentityFile(disk, new_incarnation="disk a"),
        is_of_another=False,
        assignment=None,
        remembered_elsewhere=lambda points, **words: None,
    )
    node.assign = lambda assignment: setattr(node, "assignment", assignment)
    service = SimpleNamespace(node=node, guarded=lambda call: call(), state_changed=asyncio.Event())
    link, begins = MetaLink(service, SETTINGS), []

    class Stub:
        answer = pb.Assignment()

        async def Register(self, identity, **words):
            begins.append(identity.begins)
            return self.answer

        async def Heartbeat(self, beats, **words):
            return
            yield

    stub = Stub()
    node.assignment = Assignment("g1", 4, Role.MASTER)  # it started with its remembered part
    for answer in (pb.Assignment(), pb.Assignment(broker_group="g1", term=5), pb.Assignment()):
        stub.answer = answer
        with pytest.raises(NotServed):
            await link._live(stub)
    assert begins == [True, True, False]
    disk.close()


class Meta:
    """Metaserver on virtual time: answers each heartbeat after `answers_s`, and none from `silent_at_s` on."""

    def __init__(self, loop, *, answers_s=0.0, silent_at_s=float("inf")):
        self.loop, self.answers_s, self.silent_at_s = loop, answers_s, silent_at_s
        self.part = pb.Assignment(broker_group="g1", term=5)
        self.registers_s = []

    async def Register(self, identity, *, timeout, **words):
        self.registers_s.append(timeout)
        return self.part

    async def Heartbeat(self, beats, **words):
        async for _ in beats:
            await asyncio.sleep(self.answers_s)
            if self.loop.time() >= self.silent_at_s:
                await asyncio.Event().wait()
            yield pb.Assignment(clock_ms=1)


def leaves(monkeypatch, meta_of, *, lives=1, pause_s=None, most_s=300.0, after_s=0.0, loop=None):
    """Return how long a broker stays with each metaserver, beginning at 1000 s; run for `after_s` more."""
    loop, found = loop or VirtualLoop(1), []

    async def test() -> None:
        monkeypatch.setattr(meta_link, "state_message", lambda *_: pb.BrokerState())
        value = SimpleNamespace(group="", incarnation="disk a", known_term=0)
        identity = SimpleNamespace(value=value, instance="place 1")
        node = SimpleNamespace(identity=identity, record_metaserver_clock=lambda clock_ms: None)
        link = MetaLink(SimpleNamespace(node=node, state_changed=asyncio.Event()), SETTINGS)
        monkeypatch.setattr(link, "_assign", lambda message: None)
        if pause_s is not None:
            loop.call_at(1000 + pause_s[0], lambda: setattr(loop, "now_s", 1000 + pause_s[1]))
        for _ in range(lives):
            began, meta = loop.time(), meta_of(loop)
            try:
                async with asyncio.timeout(most_s):
                    await link._live(meta)
            except (NotServed, TimeoutError):
                found.append(loop.time() - began)
        await asyncio.sleep(after_s)

    try:
        loop.run_until_complete(test())
    finally:
        loop.abandon()
    return found


@pytest.mark.parametrize(
    ("silent_at_s", "leaves_s"),
    [
        pytest.param(1000, 2, id="it never answered"),
        pytest.param(1004, 6, id="from a heartbeat on"),
        pytest.param(1004.1, 7, id="from the moment after an answer on"),
    ],
)
def test_silent_metaserver_is_left_after_two_seconds(monkeypatch, silent_at_s, leaves_s):
    (stayed_s,) = leaves(monkeypatch, lambda loop: Meta(loop, silent_at_s=silent_at_s))
    assert stayed_s == pytest.approx(leaves_s)


def test_slow_metaservers_get_more_patience(monkeypatch):
    """The next metaserver may be as busy. Each answer takes three seconds here."""
    stayed_s = leaves(monkeypatch, lambda loop: Meta(loop, answers_s=3.0), lives=3)
    assert stayed_s == [pytest.approx(2), 300, 300]


def test_paused_broker_reads_pending_answers_first(monkeypatch):
    (stayed_s,) = leaves(monkeypatch, lambda loop: Meta(loop, answers_s=1.0), pause_s=(0.5, 60.0), most_s=120.0)
    assert stayed_s >= 120


def test_patience_shrinks_after_quick_answers():
    patience = Patience()
    for _ in range(4):
        patience.leave()
    assert patience.limit_s == SILENT_S_MAX
    limits = []
    for second in range(0, 60, 3):
        patience.asked(second)
        patience.answered(second + (0.1 if second >= 30 else 2.0))
        limits.append(patience.limit_s)
    assert limits[:3] == [SILENT_S_MAX, SILENT_S_MAX, 4.0]
    assert set(limits[3:10]) == {4.0}, "answers take half of that"
    assert limits[-1] == SILENT_S


def test_heartbeats_end_with_their_stream(monkeypatch):
    """As in gRPC, a task of its own reads them. A late heartbeat would start a timer for the ended stream."""
    loop, beats_s, errors = VirtualLoop(1), [], []
    loop.set_exception_handler(lambda _, context: errors.append(context))

    class Failing(Meta):
        async def read(self, beats):
            async for _ in beats:
                beats_s.append(loop.time())

        async def Heartbeat(self, beats, **words):
            self.reader = loop.create_task(self.read(beats))
            await asyncio.sleep(0.5)
            yield pb.Assignment(clock_ms=1)

    meta = Failing(loop)
    leaves(monkeypatch, lambda _: meta, loop=loop, after_s=10.0)
    assert beats_s == [1000]
    assert errors == []
    assert meta.reader.done()


def test_heartbeat_every_second_and_on_change(monkeypatch):
    loop, beats = VirtualLoop(1), []

    async def test() -> None:
        service = SimpleNamespace(state_changed=asyncio.Event())
        link = MetaLink(service, SETTINGS)
        monkeypatch.setattr(meta_link, "state_message", lambda *_: pb.BrokerState())
        async with asyncio.timeout(None) as silence, aclosing(link._beats(link.stub, silence)) as states:
            async for _ in states:
                beats.append(loop.time())
                link._patience.answered(loop.time())
                if loop.time() == 1001:
                    loop.call_at(1001.4, service.state_changed.set)
                if loop.time() >= 1003:
                    return

    try:
        loop.run_until_complete(test())
    finally:
        loop.abandon()
    assert beats == [1000, 1001, 1001.4, 1002, 1003], "and at once on a state change"


def test_clock_answer_changes_no_part(monkeypatch):
    clocks, parts = [], []
    node = SimpleNamespace(record_metaserver_clock=clocks.append)
    link = MetaLink(SimpleNamespace(node=node), SETTINGS)
    monkeypatch.setattr(link, "_assign", lambda message: parts.append(message.term))
    older = pb.Assignment(term=5, clock_ms=3)
    for message in (pb.Assignment(term=5, clock_ms=1), pb.Assignment(clock_ms=2), older, pb.Assignment(term=6)):
        link._assignment_received(message)
    assert clocks == [1, 2, 3]
    assert parts == [5, 6], "also if an older metaserver repeats the whole assignment"
