"""Shell. Which metaserver gets the heartbeats of which broker, and the metaservers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, true, update

from qmq.metaserver.model import BrokerKey, MetaserverRow, ReplicaState, SightingRow
from qmq.metaserver.storage.sql import BadRows, checked, chunks, from_json, now_ms, to_json
from qmq.metaserver.storage.tables import broker_sighting, meta_version, metaserver

_columns = broker_sighting.c


def load_sightings(connection: Connection, after: int, bad: BadRows) -> list[SightingRow]:
    """Read what changed after that version; with 0, all."""
    sightings = []
    for row in connection.execute(select(broker_sighting).where(_columns.changed > after)):
        try:
            sightings.append(_sighting(row))
        except (ValueError, TypeError, KeyError) as error:
            bad.note("broker_sighting", f"{row.hostname}:{row.serve_port}", error)
    return sightings


def store_sightings(connection: Connection, rows: Sequence[SightingRow], changed: int) -> None:
    """Store each row that begins a session, and each that goes on with the session that is stored."""
    stored = _sessions(connection, [row.key for row in rows])
    new: dict[BrokerKey, dict[str, Any]] = {}
    old: dict[BrokerKey, dict[str, Any]] = {}
    for row in rows:
        if row.begins or stored.get(row.key) == row.session:
            (new if row.key in new or row.key not in stored else old)[row.key] = _values(row, changed)
            stored[row.key] = row.session
    if new:
        connection.execute(insert(broker_sighting), list(new.values()))
    if old:
        parameters = [{f"new_{key}": value for key, value in values.items()} for values in old.values()]
        connection.execute(_update_each, parameters)


def beat(connection: Connection, row: MetaserverRow) -> None:
    """Write a metaserver's row, which shows that it lives. Nothing else in it changes while its process lives."""
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
    """Read the ids of all metaservers, and the versions, at once: a statement costs more than its rows."""
    rows = connection.execute(_ids_and_versions).all()
    return {row.id for row in rows}, {row.name: row.version for row in rows}


def remove_metaserver(connection: Connection, id: str) -> None:
    connection.execute(delete(metaserver).where(metaserver.c.id == id))


def _sessions(connection: Connection, keys: Sequence[BrokerKey]) -> dict[BrokerKey, str]:
    stored = {}
    for chunk in chunks(sorted({key.hostname for key in keys})):
        asked = select(_columns.hostname, _columns.serve_port, _columns.session).where(_columns.hostname.in_(chunk))
        stored.update({BrokerKey(row.hostname, row.serve_port): row.session for row in connection.execute(asked)})
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
    """Read what `_values` wrote; raises ValueError, TypeError or KeyError for anything else."""
    words = from_json(text)
    if words is None:
        return None
    if not isinstance(words, dict):
        raise TypeError("a state is an object")
    last_term, last_boot, flushed_end = map(int, words.get("reach", (0, 0, 0)))  # of who has no part, it stays so
    return ReplicaState(
        role=int(words["role"]),
        term=int(words["term"]),
        boot=int(words["boot"]),
        readonly_reasons=tuple(str(reason) for reason in words["readonlyReasons"]),
        writable=words["writable"] is True,
        durability=str(words["durability"]),
        incarnation=str(words["incarnation"]),
        in_step=_in_step(words),
        known_term=int(words.get("knownTerm", 0)),  # an older version does not write it, nor what follows
        last_term=last_term,
        last_boot=last_boot,
        flushed_end=flushed_end,
    )


def _in_step(words: dict[str, Any]) -> tuple[str, ...]:
    """A version that knows one slave wrote it alone, and an empty word for none."""
    if "inStep" in words:
        return tuple(map(str, words["inStep"]))
    return (str(words["slaveIncarnation"]),) if words["slaveIncarnation"] else ()


def _values(row: SightingRow, changed: int) -> dict[str, Any]:
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
        "slaveIncarnation": state.in_step[0] if state.in_step else "",  # for versions that know one slave
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


_update_each = (
    update(broker_sighting)
    .where(_columns.hostname == bindparam("new_hostname"), _columns.serve_port == bindparam("new_serve_port"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("session", "metaserver", "incarnation", "up", "state_json", "changed")
        }
    )
)

# Made once: these are asked for each second.
_beat = update(metaserver).where(metaserver.c.id == bindparam("own"))
_metaservers = select(metaserver).order_by(metaserver.c.id)
_ids_and_versions = select(metaserver.c.id, meta_version.c.name, meta_version.c.version).join_from(
    metaserver, meta_version, true()
)
