"""Shell. Leases: who of several processes acts. A row per name, changed by compare-and-set alone; no clock is asked."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.model import LeaseRow
from qmq.metaserver.storage.sql import checked, now_ms
from qmq.metaserver.storage.tables import lease

_columns = lease.c
# Made once, as they are asked for again and again; the first one each second.
_keep = update(lease).where(
    _columns.name == bindparam("named"),
    _columns.node == bindparam("holder"),
    _columns.term == bindparam("known_term"),
    _columns.beat == bindparam("known_beat"),
)
_find = select(lease).where(_columns.name == bindparam("named")).with_for_update()
_change = update(lease).where(_columns.name == bindparam("named"))


def hold(connection: Connection, wish: LeaseRow, *, take: bool, release: bool) -> LeaseRow:
    """Raise the beat if `wish.node` holds the lease; else take it if nobody does, or, with `take`, if it still is
    (`wish.term`, `wish.beat`); give it back with `release`. Returns the row as it is then.
    """
    if not release and (kept := _keep_on(connection, wish)):
        return kept
    named = {"named": wish.name}
    row = connection.execute(_find, named).first()
    if row is None:
        values = {"name": wish.name, "node": "", "address": "", "term": 0, "beat": 0, "update_time": now_ms()}
        try:
            with connection.begin_nested():
                connection.execute(insert(lease).values(**checked(lease, values)))
        except IntegrityError:
            pass  # another one was first
        row = connection.execute(_find, named).one()
    term, beat, node, address = row.term, row.beat, row.node, row.address
    if node == wish.node:
        beat, node = beat + 1, "" if release else node
    elif not release and (not node or (take and (term, beat) == (wish.term, wish.beat))):
        term, beat, node = term + 1, 0, wish.node
    else:
        return _row(row)
    address = wish.address if node == wish.node else ""
    values = {"node": node, "address": address, "term": term, "beat": beat, "update_time": now_ms()}
    connection.execute(_change, checked(lease, values) | named)
    return LeaseRow(wish.name, node, term, beat, address)


def _keep_on(connection: Connection, wish: LeaseRow) -> LeaseRow | None:
    """Raise the beat of who holds the lease and says how the row is; None: it is not so."""
    row = LeaseRow(wish.name, wish.node, wish.term, wish.beat + 1, wish.address)
    known = {"named": wish.name, "holder": wish.node, "known_term": wish.term, "known_beat": wish.beat}
    values = checked(lease, {"beat": row.beat, "address": row.address, "update_time": now_ms()})
    return row if connection.execute(_keep, values | known).rowcount else None


def load(connection: Connection) -> list[LeaseRow]:
    return [_row(row) for row in connection.execute(select(lease).order_by(_columns.name))]


def _row(row: object) -> LeaseRow:
    fields = ("name", "node", "term", "beat", "address", "update_time")
    return LeaseRow(*(getattr(row, field) for field in fields))
