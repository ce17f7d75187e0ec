"""Shell. Rows that running processes renew: heartbeats of brokers and metaservers, acknowledged points, leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, Row, and_, bindparam, delete, insert, or_, select, true, update
from sqlalchemy.exc import IntegrityError

from qmq.metaserver.model import BrokerKey, LeaseRow, MetaserverRow, Points, ReplicaState, SightingRow
from qmq.metaserver.storage.sql import BadRows, checked, chunks, from_json, now_ms, to_json
from qmq.metaserver.storage.tables import acknowledged_point, broker_sighting, lease, meta_version, metaserver
from qmq.replication.identity import Point
from qmq.types import Epoch

_sightings = broker_sighting.c


def load_sightings(connection: Connection, after: int, bad: BadRows) -> list[SightingRow]:
    """Read the sightings that changed after that version; with 0, all."""
    sightings = []
    for row in connection.execute(select(broker_sighting).where(_sightings.changed > after)):
        try:
            sightings.append(_sighting(row))
        except (ValueError, TypeError, KeyError) as error:
            bad.note("broker_sighting", f"{row.hostname}:{row.serve_port}", error)
    return sightings


def store_sightings(connection: Connection, rows: Sequence[SightingRow], changed: int) -> None:
    """Store the rows that begin a session or belong to the stored one."""
    stored = _sessions(connection, [row.key for row in rows])
    new: dict[BrokerKey, dict[str, Any]] = {}
    old: dict[BrokerKey, dict[str, Any]] = {}
    for row in rows:
        if row.begins or stored.get(row.key) == row.session:
            (new if row.key in new or row.key not in stored else old)[row.key] = _sighting_values(row, changed)
            stored[row.key] = row.session
    if new:
        connection.execute(insert(broker_sighting), list(new.values()))
    if old:
        parameters = [{f"new_{key}": value for key, value in values.items()} for values in old.values()]
        connection.execute(_update_sightings, parameters)


def store_beat(connection: Connection, row: MetaserverRow) -> None:
    """Write a metaserver's counter. The rest of its row is constant while its process runs."""
    update_time = now_ms()
    if connection.execute(_beat, {"own": row.id, "beat": row.beat, "update_time": update_time}).rowcount == 0:
        values = {
            "id": row.id,
            "http_address": row.http_address,
            "grpc_address": row.grpc_address,
            "beat": row.beat,
            "version": row.version,
            "update_time": update_time,
        }
        connection.execute(insert(metaserver), checked(metaserver, values))


def load_metaservers(connection: Connection) -> list[MetaserverRow]:
    rows = connection.execute(_metaservers)
    return [MetaserverRow(row.id, row.http_address, row.grpc_address, row.beat, row.version) for row in rows]


def look(connection: Connection) -> tuple[set[str], dict[str, int]]:
    """Read the ids of all metaservers and the versions. They share a statement, which costs more than its rows."""
    rows = connection.execute(_ids_and_versions).all()
    return {row.id for row in rows}, {row.name: row.version for row in rows}


def remove_metaserver(connection: Connection, id: str) -> None:
    connection.execute(delete(metaserver).where(metaserver.c.id == id))


def _sessions(connection: Connection, keys: Sequence[BrokerKey]) -> dict[BrokerKey, str]:
    stored = {}
    for chunk in chunks(sorted({key.hostname for key in keys})):
        columns = select(_sightings.hostname, _sightings.serve_port, _sightings.session)
        rows = connection.execute(columns.where(_sightings.hostname.in_(chunk)))
        stored.update({BrokerKey(row.hostname, row.serve_port): row.session for row in rows})
    return stored


def _sighting(row: Row[Any]) -> SightingRow:
    return SightingRow(
        key=BrokerKey(row.hostname, row.serve_port),
        session=row.session,
        metaserver=row.metaserver,
        incarnation=row.incarnation,
        up=bool(row.up),
        state=_parse_state(row.state_json),
        changed=row.changed,
    )


def _parse_state(text: str) -> ReplicaState | None:
    """Parse the output of `_sighting_values`; raises ValueError, TypeError or KeyError for anything else."""
    words = from_json(text)
    if words is None:
        return None
    if not isinstance(words, dict):
        raise TypeError("a state is an object")
    last_term, last_boot, flushed_end = map(int, words.get("reach", (0, 0, 0)))  # constant while the broker has no role
    return ReplicaState(
        role=int(words["role"]),
        term=int(words["term"]),
        boot=int(words["boot"]),
        readonly_reasons=tuple(str(reason) for reason in words["readonlyReasons"]),
        writable=words["writable"] is True,
        durability=str(words["durability"]),
        incarnation=str(words["incarnation"]),
        in_step=_in_step(words),
        known_term=int(words.get("knownTerm", 0)),  # missing from an older version, as are the following
        last_term=last_term,
        last_boot=last_boot,
        flushed_end=flushed_end,
        has_offsets=False,
    )


def _in_step(words: dict[str, Any]) -> tuple[str, ...]:
    """Return the slaves in sync. Versions with one slave wrote one name, empty for none."""
    if "inStep" in words:
        return tuple(map(str, words["inStep"]))
    return (str(words["slaveIncarnation"]),) if words["slaveIncarnation"] else ()


def _sighting_values(row: SightingRow, changed: int) -> dict[str, Any]:
    state = row.state
    words = state and {
        "role": int(state.role),
        "term": state.term,
        "boot": state.boot,
        "readonlyReasons": list(state.readonly_reasons),
        "writable": state.writable,
        "durability": state.durability,
        "incarnation": state.incarnation,
        "inStep": list(state.in_step),
        "knownTerm": state.known_term,
        "reach": list(state.reach),
        "slaveIncarnation": state.in_step[0] if state.in_step else "",  # for versions with one slave
    }
    values = {
        "hostname": row.key.hostname,
        "serve_port": row.key.serve_port,
        "session": row.session,
        "metaserver": row.metaserver,
        "incarnation": row.incarnation,
        "up": row.up,
        "state_json": to_json(words),
        "changed": changed,
    }
    return checked(broker_sighting, values)


_update_sightings = (
    update(broker_sighting)
    .where(_sightings.hostname == bindparam("new_hostname"), _sightings.serve_port == bindparam("new_serve_port"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("session", "metaserver", "incarnation", "up", "state_json", "changed")
        }
    )
)

# Compiled once, as they run each second.
_beat = update(metaserver).where(metaserver.c.id == bindparam("own"))
_metaservers = select(metaserver).order_by(metaserver.c.id)
_ids_and_versions = select(metaserver.c.id, meta_version.c.name, meta_version.c.version).join_from(
    metaserver, meta_version, true()
)


_points = acknowledged_point.c
ACCEPTED = ""
"""Incarnation of the row by which an operator accepted the loss of older points."""


def load_points(connection: Connection, group: str) -> Points:
    """Return the points of a group's copies, without accepted losses."""
    rows = list(connection.execute(select(acknowledged_point).where(acknowledged_point.c.group_name == group)))
    accepted_term = max((row.term for row in rows if row.incarnation == ACCEPTED), default=0)
    points = {
        row.incarnation: Point(Epoch(row.term, row.boot), row.log_end, int(row.chain, 16))
        for row in rows
        if row.incarnation != ACCEPTED and row.term >= accepted_term
    }
    return Points(points, accepted_term)


def store_points(connection: Connection, points: Mapping[tuple[str, str], Point]) -> None:
    """Store the point of each (group, incarnation), unless a newer one is stored.

    A few statements for all: one per row took 1.4 s of CPU each second for 2,000 groups, these take 0.1.
    """
    stored = _stored_points(connection, {group for group, _ in points})
    new: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for key, point in sorted(points.items()):
        (old if key in stored else new).append(_point_values(key, point))
    if new:
        connection.execute(insert(acknowledged_point), new)
    if old:
        connection.execute(_raise_each, [{f"new_{name}": value for name, value in values.items()} for values in old])


def accept_loss(connection: Connection, group: str, term: int) -> None:
    """Store that an operator accepted, in `term`, the loss of older points."""
    store_points(connection, {(group, ACCEPTED): Point(Epoch(term, 0), 0, 0)})


def _stored_points(connection: Connection, groups: set[str]) -> set[tuple[str, str]]:
    asked = select(_points.group_name, _points.incarnation)
    return {
        (row.group_name, row.incarnation)
        for chunk in chunks(sorted(groups))
        for row in connection.execute(asked.where(_points.group_name.in_(chunk)))
    }


def _point_values(key: tuple[str, str], point: Point) -> dict[str, Any]:
    (term, boot), end, chain = point
    values = {"term": term, "boot": boot, "log_end": end, "chain": f"{chain:016x}", "update_time": now_ms()}
    return checked(acknowledged_point, {"group_name": key[0], "incarnation": key[1]} | values)


_term: BindParameter[int] = bindparam("new_term")
_boot: BindParameter[int] = bindparam("new_boot")
_end: BindParameter[int] = bindparam("new_log_end")
_raise_each = (
    update(acknowledged_point)
    .where(
        _points.group_name == bindparam("new_group_name"),
        _points.incarnation == bindparam("new_incarnation"),
        or_(
            _points.term < _term,
            and_(_points.term == _term, _points.boot < _boot),
            and_(_points.term == _term, _points.boot == _boot, _points.log_end < _end),
        ),
    )
    .values({name: bindparam(f"new_{name}") for name in ("term", "boot", "log_end", "chain", "update_time")})
)


_leases = lease.c
# Compiled once; the first one runs each second.
_keep_lease = update(lease).where(
    _leases.name == bindparam("named"),
    _leases.node == bindparam("holder"),
    _leases.term == bindparam("known_term"),
    _leases.beat == bindparam("known_beat"),
)
_find_lease = select(lease).where(_leases.name == bindparam("named")).with_for_update()
_change_lease = update(lease).where(_leases.name == bindparam("named"))


def hold_lease(connection: Connection, wish: LeaseRow, *, take: bool, release: bool) -> LeaseRow:
    """Renew, take or release a lease; return its row afterwards.

    The holder `wish.node` raises the beat. Another node takes a free lease or, with `take`, one that is still at
    (`wish.term`, `wish.beat`). With `release` the holder frees it.
    """
    if not release and (kept := _keep_on(connection, wish)):
        return kept
    named = {"named": wish.name}
    row = connection.execute(_find_lease, named).first()
    if row is None:
        values = {"name": wish.name, "node": "", "address": "", "term": 0, "beat": 0, "update_time": now_ms()}
        try:
            with connection.begin_nested():
                connection.execute(insert(lease).values(**checked(lease, values)))
        except IntegrityError:
            pass  # another transaction was first
        row = connection.execute(_find_lease, named).one()
    term, beat, node, address = row.term, row.beat, row.node, row.address
    if node == wish.node:
        beat, node = beat + 1, "" if release else node
    elif not release and (not node or (take and (term, beat) == (wish.term, wish.beat))):
        term, beat, node = term + 1, 0, wish.node
    else:
        return _lease(row)
    address = wish.address if node == wish.node else ""
    values = {"node": node, "address": address, "term": term, "beat": beat, "update_time": now_ms()}
    connection.execute(_change_lease, checked(lease, values) | named)
    return LeaseRow(wish.name, node, term, beat, address)


def _keep_on(connection: Connection, wish: LeaseRow) -> LeaseRow | None:
    """Raise the beat if `wish` equals the stored row and names its holder; otherwise return None."""
    row = LeaseRow(wish.name, wish.node, wish.term, wish.beat + 1, wish.address)
    known = {"named": wish.name, "holder": wish.node, "known_term": wish.term, "known_beat": wish.beat}
    values = checked(lease, {"beat": row.beat, "address": row.address, "update_time": now_ms()})
    return row if connection.execute(_keep_lease, values | known).rowcount else None


def load_leases(connection: Connection) -> list[LeaseRow]:
    return [_lease(row) for row in connection.execute(select(lease).order_by(_leases.name))]


def _lease(row: object) -> LeaseRow:
    fields = ("name", "node", "term", "beat", "address", "update_time")
    return LeaseRow(*(getattr(row, field) for field in fields))
