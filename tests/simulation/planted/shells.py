"""Planted bugs of shells, which the scenarios of cores do not run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from qmq.broker.positions import GroupBegins
from qmq.client.backlog import GroupBatches
from qmq.client.batch import Batch, Stored, Unknown
from qmq.client.group_session import GroupSession
from qmq.client.listener import Listener
from qmq.client.numbered_sender import NumberedSender
from qmq.client.received import ReceivedMessage
from qmq.client.route_watch import RouteWatch
from qmq.client.routes import SubjectRoute
from qmq.client.sender import Sender
from qmq.delayserver.flights import Flights
from qmq.errors import OutcomeUnknown
from qmq.log import Commit
from qmq.log.disk import RealDisk
from qmq.outbox.courier import Courier
from qmq.outbox.drain_plan import Attempt
from qmq.outbox.statements import Statements
from qmq.outbox.table import Rows
from qmq.outbox.unit import Item, Unit, Written
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from qmq.replication.clocks import DueClock
from qmq.server.meta_link import MetaLink
from qmq.server.service import Service, _MasterLink
from qmq.watchdog.leader import Drain
from tests.simulation.bugs import Patch, bug


@bug("shells")
def commit_is_reported_before_it_is_written() -> list[Patch]:
    def commit(self: Service[Any], commit: Commit) -> None:
        self._loop.call_soon(self.guarded, partial(self.node.committed, commit))
        self._disk_thread.submit(self._perform, commit)

    return [mock.patch.object(Service, "commit", commit)]


@bug("shells")
def sync_does_nothing() -> list[Patch]:
    return [mock.patch.object(RealDisk, "sync", lambda self, name: None)]


@bug("shells", favoured="disk_fails")
def failed_disk_ends_nothing() -> list[Patch]:
    return [mock.patch.object(Service, "fail", lambda self, error: None)]


@bug("shells")
def lost_link_to_the_master_is_not_noticed() -> list[Patch]:
    def connection_lost(self: _MasterLink, connection: Connection, reason: str) -> None:
        self._service.guarded(lambda: self._service.node.link_lost(connection))

    return [mock.patch.object(_MasterLink, "connection_lost", connection_lost)]


@bug("shells")
def answer_goes_to_the_oldest_request() -> list[Patch]:
    original = Connection._answered

    def answered(self: Connection, packet: Packet) -> None:
        original(self, packet._replace(opaque=next(iter(self._waiting), packet.opaque)))

    return [mock.patch.object(Connection, "_answered", answered)]


@bug("shells", first=4, favoured="reset")
def batch_is_forgotten_with_its_connection() -> list[Patch]:
    original = Sender._answered

    def answered(self: Sender, group: Any, connection: Connection, batch: Any, answer: Any) -> None:
        original(self, group, connection, batch, answer)
        if isinstance(answer, OutcomeUnknown) and batch.result is None:
            group.batches.release(batch)

    return [mock.patch.object(Sender, "_answered", answered)]


@bug("shells", first=2, favoured="pause")
def repeat_gets_a_new_number() -> list[Patch]:
    original = GroupBatches.next_repeat

    def next_repeat(self: GroupBatches) -> Batch | None:
        if (batch := original(self)) is not None:
            del self._unresolved[batch.number]
            batch.number, self._next_number = self._next_number, self._next_number + 1
            self._unresolved[batch.number] = batch
        return batch

    return [mock.patch.object(GroupBatches, "next_repeat", next_repeat)]


@bug("shells", first=5, favoured="swap")
def roles_are_taken_once() -> list[Patch]:
    original = MetaLink._assign

    def assign(self: MetaLink, message: Any) -> None:
        if not self._has_part:
            original(self, message)

    return [mock.patch.object(MetaLink, "_assign", assign)]


@bug("shells", first=6, favoured="swap")
def routes_are_taken_once() -> list[Patch]:
    original = RouteWatch._take

    def take(self: RouteWatch, routes: list[SubjectRoute]) -> None:
        original(self, [route for route in routes if route.subject not in self._held])

    return [mock.patch.object(RouteWatch, "_take", take)]


@bug("shells", first=4, favoured="reset")
def session_is_opened_once() -> list[Patch]:
    original = GroupSession.opened

    def opened(self: GroupSession) -> None:
        if not self.history:
            original(self)

    return [mock.patch.object(GroupSession, "opened", opened)]


@bug("shells", favoured="kill")
def message_is_done_before_it_is_handled() -> list[Patch]:
    original = Listener._take

    def take(self: Listener, subscription: Any) -> list[ReceivedMessage]:
        taken = original(self, subscription)
        for message in taken:
            message._done()
        return taken

    return [mock.patch.object(Listener, "_take", take)]


@bug("shells")
def delayed_messages_are_sent_a_second_early() -> list[Patch]:
    return [mock.patch.object(DueClock, "offset_ms", property(lambda self: self._offset_ms + 1000))]


@bug("shells", first=7)
def plans_of_earlier_masters_are_forgotten() -> list[Patch]:
    return [mock.patch.object(Flights, "resume", lambda self, *_: None)]


@bug("shells", first=22, favoured="isolate")
def delayed_batch_is_forgotten_with_its_connection() -> list[Patch]:
    original = NumberedSender._end

    def end(self: NumberedSender, group: Any, flight: Any, answer: Any) -> None:
        if isinstance(answer, Unknown):
            flight.done = lambda _: None
        original(self, group, flight, answer)

    return [mock.patch.object(NumberedSender, "_end", end)]


@bug("shells")
def messages_are_sent_before_their_commit() -> list[Patch]:
    original = Unit.write

    def write(self: Unit, items: list[Item], rows_of: Callable[[str], Rows]) -> None:
        original(self, items, rows_of)
        items[0].courier.committed(Written(self._database, items, None))

    return [mock.patch.object(Unit, "write", write)]


@bug("shells", first=12, favoured="kill")
def row_goes_before_its_message() -> list[Patch]:
    original = Courier._deliver

    async def deliver(self: Courier, written: Written) -> None:
        await self._delete(written.database, written.rows or [])
        await original(self, written)

    return [mock.patch.object(Courier, "_deliver", deliver)]


@bug("shells", first=4, favoured="kill")
def watchdog_takes_sent_for_stored() -> list[Patch]:
    original = Drain._send

    def send(self: Drain, attempt: Attempt) -> None:
        original(self, attempt)
        self._answered(attempt, Stored(0, attempt.batch.count))

    return [mock.patch.object(Drain, "_send", send)]


@bug("shells", first=137, favoured="kill")
def claims_of_a_dead_watchdog_stay() -> list[Patch]:
    return [mock.patch.object(Statements, "_read_claims", lambda self, work: [])]


@bug("shells", joins=True)
def group_begins_anew_on_each_broker_group() -> list[Patch]:
    return [mock.patch.object(GroupBegins, "_must_ask", lambda self, f: False)]
