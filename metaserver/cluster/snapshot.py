"""Shell. File from which a metaserver starts while the database is away.

    line 1   {"qmq_snapshot": FORMAT, "blake2b": digest of line 2}
    line 2   {"database": …, "saved_ms": …, "groups": [{…}], "routes": [[…]], …}     rows as in the tables, as JSON

It is replaced as a whole and fsynced, so there is always one complete file, even if several metaservers on one machine
share it. A damaged file, or one of another version or database, is not used. It holds hashes of tokens, so only its
owner may read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq.crc import of_known_fields
from qmq.metaserver.model import (
    Broker,
    BrokerKey,
    Directory,
    Group,
    Offline,
    ReadonlyMark,
    ReplicaState,
    Route,
    SightingRow,
    SubjectInfo,
    TokenRow,
)
from qmq.metaserver.storage.engine import name_of
from qmq.operator_limits import OperatorLimits
from qmq.types import Role

if TYPE_CHECKING:
    from qmq.metaserver.cluster.registry import Registry

log = logging.getLogger("qmq.metaserver")

FORMAT = 3
ROWS_AT_ONCE = 100
"""Rows encoded at a time: a millisecond in which no other thread runs."""


class BadSnapshot(Exception):
    """The file is damaged, or of another version or database. Do not use it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State that is needed to answer from memory."""

    database: str
    """Name of the database, without its password."""
    saved_ms: int
    """Since 1970."""
    directory: Directory
    routes: Mapping[str, Route]
    routes_version: int
    sightings: list[SightingRow]
    tokens: list[TokenRow]


class Snapshots:
    """The file of one metaserver. Created by main; used from the loop; writes on a thread of its own.

    Args:
        path: None: there is no file.
        database: URL of the database; its password is not written.
    """

    def __init__(self, path: Path | None, database: str) -> None:
        self._path = path
        self._database = name_of(database)
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._problem = ""

    async def save(self, registry: Registry) -> None:
        """Write the registry's state. A failure is logged, and the earlier file stays."""
        if self._path is None:
            return
        snapshot = Snapshot(
            self._database,
            time.time_ns() // 1_000_000,
            registry.directory,
            dict(registry.routes),
            registry.routes_version,
            registry.liveness.rows(),
            list(registry.tokens),
        )
        problem = ""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, write_snapshot, self._path, snapshot)
        except OSError as error:
            problem = str(error)
        if problem and problem != self._problem:
            log.error("snapshot not written, the earlier file stays: %s", problem)
        self._problem = problem

    def load(self, registry: Registry) -> bool:
        """Fill the registry from the file; False: there is no usable one."""
        snapshot = self.read()
        if snapshot is not None:
            self.serve(snapshot, registry)
        return snapshot is not None

    def read(self) -> Snapshot | None:
        """Return the content of the file; None: there is no usable one."""
        if self._path is None:
            return None
        try:
            return read_snapshot(self._path, database=self._database)
        except FileNotFoundError:
            return None
        except (OSError, BadSnapshot) as error:
            log.error("snapshot not used: %s", error)
            return None

    def serve(self, snapshot: Snapshot, registry: Registry) -> None:
        """Fill the registry from a snapshot."""
        registry.mirror.take_snapshot(snapshot)
        age_s = (time.time_ns() // 1_000_000 - snapshot.saved_ms) / 1000
        log.warning("serving from the snapshot path=%s age_s=%.0f routes=%d", self._path, age_s, len(snapshot.routes))


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the file and fsync it. Raises OSError."""
    body = _encode(_to_json(snapshot)).encode()
    head = json.dumps({"qmq_snapshot": FORMAT, "blake2b": hashlib.blake2b(body).hexdigest()}).encode()
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(head + b"\n" + body + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _encode(content: Mapping[str, Any]) -> str:
    """Write a JSON object a few rows at a time: encoding 100,000 routes at once would block the loop."""
    parts = []
    for name, value in content.items():
        if isinstance(value, Iterator):
            pieces = []
            while rows := list(islice(value, ROWS_AT_ONCE)):
                pieces.append(_dump(rows)[1:-1])
                time.sleep(0)  # yield to the loop's thread
            text = f"[{','.join(pieces)}]"
        else:
            text = _dump(value)
        parts.append(f"{_dump(name)}:{text}")
    return "{" + ",".join(parts) + "}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_snapshot(path: Path, *, database: str) -> Snapshot:
    """Read the file.

    Raises:
        OSError: the file cannot be read. BadSnapshot: it is unusable; the text holds the reason.
    """
    head, _, body = path.read_bytes().partition(b"\n")
    body = body.removesuffix(b"\n")
    try:
        described = json.loads(head)
        if described["qmq_snapshot"] != FORMAT:
            raise BadSnapshot(f"{path} is of version {described['qmq_snapshot']}, not {FORMAT}")
        if hashlib.blake2b(body).hexdigest() != described["blake2b"]:
            raise BadSnapshot(f"{path} is damaged: its digest is another one")
        snapshot = _from_json(json.loads(body))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadSnapshot(f"{path} is no snapshot: {type(error).__name__}: {error}") from None
    if name_of(snapshot.database) != database:
        raise BadSnapshot(f"{path} is of the database {snapshot.database}, not of {database}")
    return snapshot


def _values(row: Any) -> list[Any]:
    """Return the fields of a flat dataclass, in order."""
    return [getattr(row, field.name) for field in fields(row)]


def _to_json(snapshot: Snapshot) -> dict[str, Any]:
    directory = snapshot.directory
    return {
        "database": snapshot.database,
        "saved_ms": snapshot.saved_ms,
        "version": directory.version,
        "groups": (
            {**_named(group), "master": _optional(group.master), "slaves": [_named(slave) for slave in group.slaves]}
            for group in directory.groups.values()
        ),
        "marks": sorted(directory.marks),
        "offline": sorted(directory.offline),
        "limits": [limit._asdict() for limit in sorted(directory.limits)],
        "subjects": (_values(info) for info in directory.subjects.values()),
        "routes": (
            (route.subject, route.groups, route.version, route.changed, route.update_time_ms)
            for route in snapshot.routes.values()
        ),
        "routes_version": snapshot.routes_version,
        "sightings": ({**_named(row), "state": _optional(row.state)} for row in snapshot.sightings),
        "tokens": [_named(token) for token in snapshot.tokens],
    }


def _from_json(body: Any) -> Snapshot:
    groups = [
        of_known_fields(
            Group,
            row
            | {"master": _optional_broker(row["master"]), "slaves": tuple(_broker(slave) for slave in row["slaves"])},
        )
        for row in body["groups"]
    ]
    subjects = [SubjectInfo(*row) for row in body["subjects"]]
    directory = Directory(
        {group.name: group for group in groups},
        frozenset(ReadonlyMark(*row) for row in body["marks"]),
        frozenset(Offline(*row) for row in body["offline"]),
        {info.name: info for info in subjects},
        body["version"],
        limits=frozenset(of_known_fields(OperatorLimits, row) for row in body.get("limits", ())),
    )
    routes = [Route(subject, tuple(names), *rest) for subject, names, *rest in body["routes"]]
    return Snapshot(
        body["database"],
        body["saved_ms"],
        directory,
        {route.subject: route for route in routes},
        body["routes_version"],
        [_sighting(row) for row in body["sightings"]],
        [of_known_fields(TokenRow, _with_tuples(row, "subjects", "groups")) for row in body["tokens"]],
    )


def _named(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}


def _optional(row: Any) -> dict[str, Any] | None:
    return None if row is None else _named(row)


def _with_tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**row, **{name: tuple(row[name]) for name in names}}


def _optional_broker(row: dict[str, Any] | None) -> Broker | None:
    return None if row is None else _broker(row)


def _broker(row: dict[str, Any]) -> Broker:
    return of_known_fields(Broker, row | {"role": Role(row["role"])})


def _sighting(row: dict[str, Any]) -> SightingRow:
    state = row["state"] and of_known_fields(ReplicaState, _with_tuples(row["state"], "readonly_reasons", "in_step"))
    aged = state and replace(state, has_offsets=False)
    return of_known_fields(SightingRow, row | {"key": BrokerKey(*row["key"]), "state": aged})
