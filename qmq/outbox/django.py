"""Shell. Outbox within transactions of Django: `producer.send(message, session=connection)`.

Django has no hook before a commit. So each call of `send` or `send_many` writes its rows at once, where the rollback of
a savepoint includes them. `transaction.on_commit` sends the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionProxy

from qmq.errors import InvalidRequest
from qmq.outbox.table import Flavor, Inserted, Rows
from qmq.outbox.unit import Database, Item, Transaction, Written, are_unknown

T = TypeVar("T")

_FLAVORS = {"postgresql": Flavor.POSTGRESQL, "sqlite": Flavor.SQLITE, "mysql": Flavor.MYSQL}
"""Kinds of databases by Django's vendor; the server's version distinguishes MySQL from MariaDB."""


def find(session: object) -> Transaction | Database | None:
    """Return the transaction or database for a producer's `session`, or None if it does not belong to Django.

    Raises:
        InvalidRequest: Django manages no transactions on this connection, so it would not report the commit.
    """
    if not isinstance(session, ConnectionProxy | BaseDatabaseWrapper):
        return None
    alias = str(session.alias)
    connection = connections[alias]
    if connection.in_atomic_block:
        return _Atomic(alias)
    if not connection.get_autocommit():
        raise InvalidRequest("Django manages no transactions here: use transaction.atomic")
    return DjangoDatabase(alias)


@dataclass(frozen=True)
class DjangoDatabase:
    """Database of the setting DATABASES."""

    alias: str

    @property
    def name(self) -> str:
        return self.alias

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        def run() -> T:
            connection = connections[self.alias]  # of this thread
            try:
                with transaction.atomic(using=self.alias):
                    return work(_rows(connection, table))
            finally:
                connection.close()

        return await asyncio.to_thread(run)


class _Atomic:
    """Present transaction of this thread."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def stage(self, items: list[Item]) -> None:
        connection, courier = connections[self._alias], items[0].courier
        try:
            rows = _rows(connection, courier.table).insert([item.content for item in items])
        except BaseException:
            connection.set_rollback(True)  # the block lacks a message, even if the error is caught
            raise
        hook = _hook_of_this_level(connection)
        if hook is None or hook.courier is not courier:
            hook = _AfterCommit(DjangoDatabase(self._alias), courier)
            transaction.on_commit(hook, using=self._alias)
        hook.items += items
        hook.rows += rows


class _AfterCommit:
    """Hook that Django calls after the commit, and drops if the transaction or its savepoint is rolled back."""

    def __init__(self, database: DjangoDatabase, courier: Any) -> None:
        self.courier = courier
        self.items: list[Item] = []
        self.rows: list[Inserted] = []
        self._database = database

    def __call__(self) -> None:
        items = self.items
        self.items = []
        self.courier.committed(Written(self._database, items, self.rows))

    def __del__(self) -> None:
        are_unknown(self.items)


def _hook_of_this_level(connection: BaseDatabaseWrapper) -> _AfterCommit | None:
    """Return the last hook if it belongs to the present savepoints, else None."""
    if not connection.run_on_commit:
        return None
    savepoints, hook, *_ = connection.run_on_commit[-1]
    return hook if isinstance(hook, _AfterCommit) and savepoints == set(connection.savepoint_ids) else None


def _rows(connection: BaseDatabaseWrapper, table: str) -> Rows:
    def execute(statement: str, values: Sequence[object]) -> Sequence[Sequence[Any]]:
        with connection.cursor() as cursor:
            cursor.execute(statement, list(values) or None)
            return cursor.fetchall() if cursor.description else []

    if connection.vendor not in _FLAVORS:
        raise InvalidRequest(f"there is no outbox on {connection.vendor!r}")
    flavor = _FLAVORS[connection.vendor]
    if flavor is Flavor.MYSQL and connection.mysql_is_mariadb:
        flavor = Flavor.MARIADB
    return Rows(execute, table, flavor, "format")
