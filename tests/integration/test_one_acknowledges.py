"""Shell. Three copies, two metaservers, and a failover with a second fault: at most one broker acknowledges.

Producers send to every broker all the time. In the end all copies have every acknowledged message, and no old master
acknowledged a message sent after its successor's first acknowledgement.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import pytest
from sqlalchemy import create_engine, make_url, select

from qmq.deploy.control import broker_state, manage, read_copy
from qmq.deploy.processes import module_command, suspend
from qmq.errors import QmqError
from qmq.metaserver.storage.tables import broker_sighting
from qmq.remoting.commands import Command
from qmq.remoting.connection import connect
from qmq.types import Endpoint
from tests.integration.broker_behind_cables import CABLES
from tests.integration.cluster_world import produce_body
from tests.integration.installation_world import HOST, TOKEN, Installation, end
from tests.support.cable import cable_to
from tests.support.waiting import until

PAUSE_S = 0.005
"""Pause between two requests to one broker."""
CHOICE = b"UPDATE broker_group SET term"
"""Begin of the transaction that promotes a slave."""


class Acknowledged(NamedTuple):
    id: str
    sent_s: float
    acknowledged_s: float


class Cabled(Installation):
    """Installation with cables between metaservers and database, and from brokers to brokers and metaservers."""

    def __init__(self, folder, server, stack):
        self._cable = lambda port: stack.enter_context(cable_to(port))
        self._server = server
        self.to_database, self.to_broker, self.to_metaserver = {}, {}, {}
        """By the name of the metaserver, of the connected broker, of the connecting broker."""
        super().__init__(folder, server.create_database(), copies=3)
        self._engine = create_engine(self.database)
        stack.callback(self._engine.dispose)
        ports = {str(broker.place["syncPort"]): self.to_broker[broker.name].port for broker in self.brokers}
        for broker in self.brokers:
            self.to_metaserver[broker.name] = to_metaserver = {
                service.grpc.rpartition(":")[2]: self._cable(int(service.grpc.rpartition(":")[2]))
                for service in self.metaservers
            }
            mine = ports | {port: cable.port for port, cable in to_metaserver.items()}
            broker.environ = {CABLES: json.dumps(mine)}

    def _service(self, name, module, settings):
        if module == "metaserver":
            cable = self.to_database[name] = self._cable(self._server.port)
            url = make_url(self.database).set(port=cable.port).render_as_string(hide_password=False)
            settings |= {"failover": True, "database": url, "database_timeout_ms": 30_000}
        else:
            self.to_broker[name] = self._cable(settings["sync_port"])
        service = super()._service(name, module, settings)
        if module == "broker":
            service.command = module_command("tests.integration.broker_behind_cables", service.command[-1])
        return service

    def state(self, broker):
        return broker_state(f"{HOST}:{broker.control}", TOKEN)

    def in_sync(self):
        """Return the number of slaves in sync, by the master's state."""
        return max((len(state.in_step) for broker in self.brokers if (state := self.state(broker))), default=0)

    def all_metaservers_know(self):
        """Wait until each metaserver has read the master's report, so that each may promote."""
        until(self._is_stored, "a metaserver stored that the master accepts produces")
        for action, writable in (("MarkReadonlyBrokerGroup", False), ("UnMarkReadonlyBrokerGroup", True)):
            manage(self.url, TOKEN, action, brokerGroup="g1")  # the report stored before this change is read with it
            for service in self.metaservers:
                until(lambda url=service.url, writable=writable: self.writable(url) == writable, "it is read")

    def _is_stored(self):
        with self._engine.connect() as connection:
            report = connection.scalar(select(broker_sighting.c.state_json).where(broker_sighting.c.hostname == "b0"))
        return (json.loads(report or "null") or {}).get("writable")

    def logs(self):
        return "".join(service.log.read_text() for service in self.metaservers)

    def failovers(self):
        return [row for row in self.look(self.url, "AuditTrail")["rows"] if row["action"] == "Failover"]


class Producers:
    """One producer for each broker, on a thread's loop; `acknowledged` and `refused` by the broker's name."""

    def __init__(self, brokers):
        self.acknowledged = {broker.name: [] for broker in brokers}
        self.refused = dict.fromkeys(self.acknowledged, 0)
        self._brokers, self._is_over = brokers, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    @property
    def answered(self):
        return {name: len(acknowledged) + self.refused[name] for name, acknowledged in self.acknowledged.items()}

    @property
    def count(self):
        return {name: len(acknowledged) for name, acknowledged in self.acknowledged.items()}

    async def _run(self):
        async with asyncio.TaskGroup() as tasks:
            for broker in self._brokers:
                tasks.create_task(self._send_all_the_time(broker, tasks))

    async def _send_all_the_time(self, broker, tasks):
        endpoint, number, connection = Endpoint(HOST, broker.place["servePort"]), 0, None
        try:
            while not self._is_over.is_set():
                with suppress(QmqError):
                    if connection is None or not connection.is_open:
                        connection, _ = await connect(
                            endpoint, handler=_Client(), token=TOKEN, app="test", packet_bytes_max=1 << 20, timeout_s=1
                        )
                    number += 1
                    tasks.create_task(self._send(broker.name, connection, number))
                await asyncio.sleep(PAUSE_S)
        finally:
            if connection is not None:
                connection.close()

    async def _send(self, name, connection, number):
        """Many requests are in flight at a time, so a master that waits for its slaves still gets new ones."""
        sent_s = time.monotonic()
        try:
            await connection.request(Command.PRODUCE, produce_body("s", {}, name=f"{name}-{number}"))
            self.acknowledged[name].append(Acknowledged(f"{name}-{number}-0", sent_s, time.monotonic()))
        except QmqError:
            self.refused[name] += 1


class _Client:
    def packet_received(self, connection, packet): ...

    def connection_lost(self, connection, reason): ...

    def writable_again(self, connection): ...


@pytest.fixture
def world(mariadb, tmp_path):
    with ExitStack() as stack:
        world = Cabled(tmp_path, mariadb, stack)
        try:
            yield world.start()
        finally:
            world.stop()


@contextmanager
def producing_to_all(world):
    """Run producers; check at the end that all copies are equal and have every acknowledged message."""
    until(lambda: world.in_sync() == 2, "both slaves are in sync")
    world.all_metaservers_know()
    with Producers(world.brokers) as producers:
        until(lambda: producers.count["b0"] > 20, "the master acknowledges")
        yield producers
        until(lambda: world.in_sync() == 2, "all three are in sync again")
        before = producers.count
        until(lambda: producers.count != before, "a master acknowledges")
    until(lambda: have_equal_ends(world), "equal copies")
    for broker in world.brokers:
        broker.signal(signal.SIGKILL)  # all at once, so that no broker begins a term without the others
    for broker in world.brokers:
        end(broker, signal.SIGKILL)
    first, *others = [read_copy(world.folder / broker.name / "data") for broker in world.brokers]
    assert all(other == first for other in others)
    stored = [id for _, _, id in first.messages]
    acknowledged_ids = [message.id for acknowledged in producers.acknowledged.values() for message in acknowledged]
    assert len(stored) == len(set(stored)) and set(acknowledged_ids) <= set(stored)


def have_equal_ends(world):
    states = [world.state(broker) for broker in world.brokers]
    return (
        all(states) and len({(end, state.chain) for state in states for end in (state.log_end, state.flushed_end)}) == 1
    )


def successor(world, producers):
    """Return the name of the slave that was promoted and acknowledges."""
    return until(
        lambda: next((name for name in ("b1", "b2") if producers.count[name] > 20), None), "a slave was promoted"
    )


def check_order(old, new):
    assert max(message.sent_s for message in old) < min(message.acknowledged_s for message in new)


def test_paused_metaserver_with_an_old_choice_is_refused(world):
    cables = world.to_database
    with producing_to_all(world) as producers:
        for cable in cables.values():
            cable.hold_at = CHOICE
        end(world.brokers[0], signal.SIGKILL)
        paused = until(lambda: next((m for m in world.metaservers if cables[m.name].is_holding.is_set()), None))
        suspend(paused.pid)
        try:
            for name in cables.keys() - {paused.name}:
                cables[name].hold_at = b""
                cables[name].deliver()
            new = successor(world, producers)
            term = world.state(world.brokers[int(new[1])]).term
        finally:
            paused.signal(signal.SIGCONT)
        cables[paused.name].deliver()
        world.brokers[0].start()
        before = producers.count[new]
        until(lambda: world.in_sync() == 2 and producers.count[new] > before + 100, "it goes on as the master")
        assert world.state(world.brokers[int(new[1])]).term == term and len(world.failovers()) == 1
        check_order(producers.acknowledged["b0"], producers.acknowledged[new])


def test_one_way_partition_leaves_one_acknowledging_master(world):
    """The old master receives from its slaves and clients, and its own packets are lost."""
    old = world.brokers[0]
    with producing_to_all(world) as producers:
        world.to_broker[old.name].swallow_answers = True
        for cable in world.to_metaserver[old.name].values():
            cable.swallow_questions = cable.swallow_answers = True
        new = successor(world, producers)
        for name in (old.name, new):
            answered = producers.answered[name]
            until(lambda name=name, answered=answered: producers.answered[name] > answered + 100, f"{name} answers")
        assert world.state(old).term < world.state(world.brokers[int(new[1])]).term, "it takes itself for the master"
        check_order(producers.acknowledged[old.name], producers.acknowledged[new])
        for cable in (world.to_broker[old.name], *world.to_metaserver[old.name].values()):
            cable.repair()
    check_order(producers.acknowledged[old.name], producers.acknowledged[new])
