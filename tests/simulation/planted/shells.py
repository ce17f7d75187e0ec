"""Planted bugs of shells, which the scenarios of cores do not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

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
from qmq.log.disk import RealDisk
from qmq.outbox.courier import Courier
from qmq.outbox.drain_plan import Attempt, DrainPlan
from qmq.outbox.statements import Statements
from qmq.outbox.table import Rows
from qmq.outbox.unit import Item, Unit, Written
from qmq.remoting.connection import Connection
from qmq.remoting.packet import Packet
from qmq.replication.clocks import DueClock
from qmq.server.meta_link import MetaLink
from qmq.server.service import Service, _MasterLink
from qmq.watchdog.leader import Drain
from tests.simulation.bugs import bug, plant

plant("shells", "sync does nothing", patch.object(RealDisk, "sync", lambda self, name: None))
plant(
    "shells",
    "failed disk ends nothing",
    patch.object(Service, "fail", lambda self, error: None),
    favoured="disk_fails",
)


@bug("shells", _MasterLink, "connection_lost")
def lost_link_to_the_master_is_not_noticed(self: _MasterLink, connection: Connection, reason: str) -> None:
    self._service.guarded(lambda: self._service.node.link_lost(connection))


@bug("shells", Connection, "_answered")
def answer_goes_to_the_oldest_request(real: Any, self: Connection, packet: Packet) -> None:
    real(self, packet._replace(opaque=next(iter(self._waiting), packet.opaque)))


@bug("shells", Sender, "_answered", first=4, favoured="reset")
def batch_is_forgotten_with_its_connection(
    real: Any, self: Sender, group: Any, connection: Connection, batch: Any, answer: Any
) -> None:
    real(self, group, connection, batch, answer)
    if isinstance(answer, OutcomeUnknown) and batch.result is None:
        group.batches.release(batch)


@bug("shells", GroupBatches, "next_repeat", first=2, favoured="pause")
def repeat_gets_a_new_number(real: Any, self: GroupBatches) -> Batch | None:
    if (batch := real(self)) is not None:
        del self._unresolved[batch.number]
        batch.number, self._next_number = self._next_number, self._next_number + 1
        self._unresolved[batch.number] = batch
    return batch


@bug("shells", MetaLink, "_assign", first=5, favoured="swap")
def roles_are_taken_once(real: Any, self: MetaLink, message: Any) -> None:
    if not self._has_part:
        real(self, message)


@bug("shells", RouteWatch, "_take", first=6, favoured="swap")
def routes_are_taken_once(real: Any, self: RouteWatch, routes: list[SubjectRoute]) -> None:
    real(self, [route for route in routes if route.subject not in self._held])


@bug("shells", GroupSession, "opened", first=4, favoured="reset")
def session_is_opened_once(real: Any, self: GroupSession) -> None:
    if not self.history:
        real(self)


@bug("shells", Listener, "_take", favoured="kill")
def message_is_done_before_it_is_handled(real: Any, self: Listener, subscription: Any) -> list[ReceivedMessage]:
    taken = real(self, subscription)
    for message in taken:
        message._done()
    return taken


plant(
    "shells",
    "delayed messages are sent a second early",
    patch.object(DueClock, "offset_ms", property(lambda self: self._offset_ms + 1000)),
)
plant(
    "shells",
    "plans of earlier masters are forgotten",
    patch.object(Flights, "resume", lambda self, *_: None),
    first=7,
)


@bug("shells", NumberedSender, "_end", first=22, favoured="isolate")
def delayed_batch_is_forgotten_with_its_connection(
    real: Any, self: NumberedSender, group: Any, flight: Any, answer: Any
) -> None:
    if isinstance(answer, Unknown):
        flight.done = lambda _: None
    real(self, group, flight, answer)


@bug("shells", Unit, "write")
def messages_are_sent_before_their_commit(
    real: Any, self: Unit, items: list[Item], rows_of: Callable[[str], Rows]
) -> None:
    real(self, items, rows_of)
    items[0].courier.committed(Written(self._database, items, None))


@bug("shells", Courier, "_deliver", first=12, favoured="kill")
async def row_goes_before_its_message(real: Any, self: Courier, written: Written) -> None:
    await self._delete(written.database, written.rows or [])
    await real(self, written)


@bug("shells", Drain, "_send", first=4, favoured="kill")
def watchdog_takes_sent_for_stored(real: Any, self: Drain, attempt: Attempt) -> None:
    real(self, attempt)
    self._answered(attempt, Stored(0, attempt.batch.count))


@bug("shells", Statements, "_parking", first=3)
def row_is_parked_without_a_reason(real: Any, self: Statements) -> str:
    return str(real(self)).replace(":reason", "substr(:reason, 1, 0)")


# Its rows are sent again in another batch.
plant(
    "shells",
    "watchdog releases an unknown batch",
    patch.object(DrainPlan, "_repeat_delay_ms", lambda self, claim: self._release(claim, "?") or 0),
    first=66,
    favoured="kill",
)
plant(
    "shells",
    "claims of a dead watchdog stay",
    patch.object(Statements, "_read_claims", lambda self, work: []),
    first=137,
    favoured="kill",
)
plant(
    "shells",
    "group begins anew on each broker group",
    patch.object(GroupBegins, "_must_ask", lambda self, f: False),
    joins=True,
)
