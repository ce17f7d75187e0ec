"""Shell. Leases: who of several processes acts. A row per name, changed by compare-and-set alone; no clock is asked."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.db.limits import checked
from qmq.metaserver.db.rows import now_ms
from qmq.metaserver.db.tables import lease
from qmq.metaserver.model import LeaseRow

_columns = lease.c


def hold(connection: Connection, wish: LeaseRow, *, take: bool, release: bool) -> LeaseRow:
    """Raise the beat if `wish.node` holds the lease; else take it if nobody does, or, with `take`, if it still is
    (`wish.term`, `wish.beat`); give it back with `release`. Returns the row as it is then.
    """
    is_named = _columns.name == wish.name
    row = connection.execute(select(lease).where(is_named).with_for_update()).first()
    if row is None:
        values = {"name": wish.name, "node": "", "address": "", "term": 0, "beat": 0, "update_time": now_ms()}
        try:
            with connection.begin_nested():
                connection.execute(insert(lease).values(**checked(lease, values)))
        except IntegrityError:
            pass  # another one was first
        row = connection.execute(select(lease).where(is_named).with_for_update()).one()
    term, beat, node, address = row.term, row.beat, row.node, row.address
    if node == wish.node:
        beat, node = beat + 1, "" if release else node
    elif not release and (not node or (take and (term, beat) == (wish.term, wish.beat))):
        term, beat, node = term + 1, 0, wish.node
    else:
        return _row(row)
    address = wish.address if node == wish.node else ""
    values = {"node": node, "address": address, "term": term, "beat": beat, "update_time": now_ms()}
    connection.execute(update(lease).where(is_named).values(**checked(lease, values)))
    return LeaseRow(wish.name, node, term, beat, address)


def load(connection: Connection) -> list[LeaseRow]:
    return [_row(row) for row in connection.execute(select(lease).order_by(_columns.name))]


def _row(row: object) -> LeaseRow:
    fields = ("name", "node", "term", "beat", "address", "update_time")
    return LeaseRow(*(getattr(row, field) for field in fields))
