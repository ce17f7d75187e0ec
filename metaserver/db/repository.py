"""Shell. Every question and change of the metaserver to its database; each method is one transaction.

The methods block; the loop calls them on a thread. No rule of routing or roles is here, only compare-and-set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from sqlalchemy import Engine, delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from metaserver.db.tables import BrokerRow, GroupRow, ReadonlyRow, RouteRow
from metaserver.model import NORMAL, Broker, BrokerKey, Directory, Group, ReadonlyMark, Route
from metaserver.roles import RoleChange
from qmq.errors import OperatorError
from qmq.types import Role


class StaleTerm(OperatorError):
    """Somebody else changed the group since it was read. Nothing was changed now; look, then decide again."""

    def __init__(self, group: str) -> None:
        super().__init__(f"somebody else changed {group} at this moment; look at its brokers, then repeat")


class Repository:
    """The metaserver's tables. Created by main with an engine whose schema is up to date."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ping(self) -> None:
        """Raise when the database does not answer."""
        with Session(self._engine) as session:
            session.execute(text("SELECT 1"))

    def load(self) -> Directory:
        """Read groups, brokers and marks as of one moment."""
        with Session(self._engine) as session:
            groups = {row.group_name: _group(session, row) for row in session.scalars(select(GroupRow))}
            marks = {ReadonlyMark(row.subject, row.broker_group) for row in session.scalars(select(ReadonlyRow))}
        return Directory(groups, frozenset(marks))

    def load_routes(self) -> list[Route]:
        with Session(self._engine) as session:
            return [_route(row) for row in session.scalars(select(RouteRow))]

    def change_roles(self, change: RoleChange) -> None:
        """Compare the term, raise it, set both roles at once.

        Raises:
            StaleTerm: the group is not what the decision was made on.
        """
        now = _now_ms()
        try:
            with Session(self._engine) as session, session.begin():
                self._raise_term(session, change, now)
                session.execute(delete(BrokerRow).where(BrokerRow.group_name == change.group))
                holders = [broker for broker in (change.master, change.slave) if broker]
                session.execute(insert(BrokerRow), [_broker_values(broker, now) for broker in holders])
        except IntegrityError:  # the same broker was added elsewhere, or the same group created, at this moment
            raise StaleTerm(change.group) from None

    def _raise_term(self, session: Session, change: RoleChange, now: int) -> None:
        if change.before is None:
            session.add(
                GroupRow(
                    group_name=change.group, kind=NORMAL, term=1, half_swapped=False, create_time=now, update_time=now
                )
            )
            session.flush()
            return
        raised = session.execute(
            update(GroupRow)
            .where(GroupRow.group_name == change.group, GroupRow.term == change.term)
            .values(term=change.term + 1, half_swapped=change.half_swapped, update_time=now)
        )
        brokers = _brokers(session, change.group)
        # Registrations change brokers without a new term; overwriting one would forget whose disk it is.
        if raised.rowcount != 1 or brokers != set(change.before.brokers):  # type: ignore[attr-defined]
            raise StaleTerm(change.group)

    def store_addresses(self, broker: Broker) -> None:
        """Store where a broker listens, as an operator says; its part stays."""
        self._update_broker(broker.key, ip=broker.ip, sync_port=broker.sync_port)

    def store_registration(self, broker: Broker) -> None:
        """Store what a broker said when it registered."""
        self._update_broker(
            broker.key,
            ip=broker.ip,
            sync_port=broker.sync_port,
            control_port=broker.control_port,
            metrics_port=broker.metrics_port,
            incarnation=broker.incarnation,
            complete=broker.complete,
        )

    def store_complete(self, broker: Broker, *, term: int, complete: bool) -> None:
        """Store whether a slave holds all that was acknowledged, unless its part or its disk changed meanwhile."""
        with Session(self._engine) as session, session.begin():
            terms = select(GroupRow.term).where(GroupRow.group_name == broker.group)
            if session.scalars(terms).one_or_none() == term:
                session.execute(
                    update(BrokerRow)
                    .where(
                        BrokerRow.hostname == broker.hostname,
                        BrokerRow.serve_port == broker.serve_port,
                        BrokerRow.role == Role.SLAVE,
                        BrokerRow.incarnation == broker.incarnation,
                    )
                    .values(complete=complete, update_time=_now_ms())
                )

    def _update_broker(self, key: BrokerKey, **values: object) -> None:
        with Session(self._engine) as session, session.begin():
            session.execute(
                update(BrokerRow)
                .where(BrokerRow.hostname == key.hostname, BrokerRow.serve_port == key.serve_port)
                .values(**values, update_time=_now_ms())
            )

    def store_route(self, subject: str, groups: Iterable[str], *, version: int) -> Route:
        """Create (version 0) or change a route if its version still is `version`; return what is stored afterwards."""
        now, names = _now_ms(), json.dumps(list(groups))
        try:
            with Session(self._engine) as session, session.begin():
                if version == 0:
                    session.add(
                        RouteRow(
                            subject_info=subject, broker_group_json=names, version=1, create_time=now, update_time=now
                        )
                    )
                else:
                    session.execute(
                        update(RouteRow)
                        .where(RouteRow.subject_info == subject, RouteRow.version == version)
                        .values(broker_group_json=names, version=version + 1, update_time=now)
                    )
        except IntegrityError:
            pass  # another metaserver was first: its route counts
        with Session(self._engine) as session:
            return _route(session.scalars(select(RouteRow).where(RouteRow.subject_info == subject)).one())

    def mark_readonly(self, mark: ReadonlyMark) -> None:
        """Store a mark; one that is there already stays."""
        try:
            with Session(self._engine) as session, session.begin():
                session.add(ReadonlyRow(subject=mark.subject, broker_group=mark.group, create_time=_now_ms()))
        except IntegrityError:
            pass

    def unmark_readonly(self, mark: ReadonlyMark) -> None:
        """Remove a mark; none is fine too."""
        with Session(self._engine) as session, session.begin():
            session.execute(
                delete(ReadonlyRow).where(ReadonlyRow.subject == mark.subject, ReadonlyRow.broker_group == mark.group)
            )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _brokers(session: Session, group: str) -> set[Broker]:
    return {_broker(row) for row in session.scalars(select(BrokerRow).where(BrokerRow.group_name == group))}


def _group(session: Session, row: GroupRow) -> Group:
    holders = {broker.role: broker for broker in _brokers(session, row.group_name)}
    return Group(
        name=row.group_name,
        term=row.term,
        master=holders.get(Role.MASTER),
        slave=holders.get(Role.SLAVE),
        update_time_ms=row.update_time,
        half_swapped=row.half_swapped,
    )


def _broker(row: BrokerRow) -> Broker:
    return Broker(
        group=row.group_name,
        role=Role(row.role),
        hostname=row.hostname,
        ip=row.ip,
        serve_port=row.serve_port,
        sync_port=row.sync_port,
        control_port=row.control_port,
        metrics_port=row.metrics_port,
        incarnation=row.incarnation,
        complete=row.complete,
    )


def _broker_values(broker: Broker, now: int) -> dict[str, object]:
    return {
        "group_name": broker.group,
        "role": int(broker.role),
        "hostname": broker.hostname,
        "ip": broker.ip,
        "serve_port": broker.serve_port,
        "sync_port": broker.sync_port,
        "control_port": broker.control_port,
        "metrics_port": broker.metrics_port,
        "incarnation": broker.incarnation,
        "complete": broker.complete,
        "create_time": now,
        "update_time": now,
    }


def _route(row: RouteRow) -> Route:
    return Route(row.subject_info, tuple(json.loads(row.broker_group_json)), row.version)
