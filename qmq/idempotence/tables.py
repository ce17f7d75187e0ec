"""Shell. Tables of keys in an application's database, and the statements on them.

qmq_handled, of transactions: a row says that a message is handled.

    message_key   CHAR(64), primary key    SHA-256 of the key, in hexadecimal digits
    handled_ms    BIGINT, indexed          when

qmq_claims, of `SqlKeys`: a row says that a message is handled, or that somebody handles it.

    message_key   CHAR(64), primary key    as above
    owner         CHAR(32) or NULL         who handles the message now; NULL: it is handled
    lease_end_ms  BIGINT or NULL           when others may take it from that owner; NULL: it is handled
    updated_ms    BIGINT, indexed          last change

Two tables with other columns, so that nobody mistakes a claim for a message that is handled. Times are ms since 1970 by
the clocks of the processes: they should differ by much less than a lease.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    CHAR,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Index,
    MetaData,
    Table,
    and_,
    delete,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from qmq.errors import InvalidRequest
from qmq.idempotence.keys import Claim, State, key_digest
from qmq.outbox.sqlalchemy import check_atomic
from qmq.plain import plain_text

HANDLED, CLAIMS = "qmq_handled", "qmq_claims"


def handled_table(metadata: MetaData, name: str = HANDLED) -> Table:
    """Describe the table of transactions within the application's own metadata, so that its migrations make it."""
    return _table(metadata, name, Column("handled_ms", BigInteger, nullable=False))


def claims_table(metadata: MetaData, name: str = CLAIMS) -> Table:
    """Describe the table of `SqlKeys` within the application's own metadata, so that its migrations make it."""
    columns = Column("owner", CHAR(32)), Column("lease_end_ms", BigInteger)
    return _table(metadata, name, *columns, Column("updated_ms", BigInteger, nullable=False))


def _table(metadata: MetaData, name: str, *columns: Column[Any]) -> Table:
    name, key = plain_text("the name of a table", name), Column("message_key", CHAR(64), primary_key=True)
    moment = columns[-1].name
    index = Index(f"ix_{name}_{moment}", moment)  # by its name, whatever convention the metadata has
    return Table(name, metadata, key, *columns, index, mysql_engine="InnoDB", mariadb_engine="InnoDB")


class KeyRefused(Exception):
    """The table has the key, or does not take it for another reason, which is the cause."""


class HandledTable:
    """Statements on the table of transactions. Each method runs within the connection's transaction."""

    def __init__(self, name: str) -> None:
        self.table = handled_table(MetaData(), name)

    def create(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)

    def claim(self, connection: Connection, key: str, now_ms: int) -> None:
        """Note, in the transaction that does the work, that the message is handled.

        Raises:
            KeyRefused: the table does not take the key. Roll back, then call `check_handled`.
            InvalidRequest: the connection is in no transaction: the key would be kept without the work.
        """
        check_atomic(connection)
        try:
            connection.execute(self.table.insert().values(message_key=key_digest(key), handled_ms=now_ms))
        except IntegrityError as error:
            raise KeyRefused from error

    def check_handled(self, connection: Connection, key: str, refused: KeyRefused) -> None:
        """Raise the database's error unless the message is handled: the key may have broken another rule."""
        is_key = self.table.c.message_key == key_digest(key)
        if connection.execute(select(self.table.c.message_key).where(is_key)).first() is None:
            raise refused.__cause__ or refused

    def forget(self, connection: Connection, before: datetime) -> int:
        """Delete the keys of messages that were handled before that moment; return how many."""
        return connection.execute(delete(self.table).where(self.table.c.handled_ms < _ms(before))).rowcount


class ClaimsTable:
    """Statements on the table of `SqlKeys`. Each method runs within the connection's transaction."""

    def __init__(self, name: str) -> None:
        self.table = claims_table(MetaData(), name)
        self._columns = self.table.c

    def create(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)

    def insert(self, connection: Connection, key: str, owner: str, now_ms: int, lease_ms: int) -> None:
        """Claim the key; raises IntegrityError if it is there."""
        lease = {"lease_end_ms": now_ms + lease_ms, "updated_ms": now_ms}
        connection.execute(self.table.insert().values(message_key=key_digest(key), owner=owner, **lease))

    def take_over(self, connection: Connection, key: str, owner: str, now_ms: int, lease_ms: int) -> Claim | None:
        """Take a claim whose lease has ended, or say what the key is; None if it is not there any more."""
        columns, is_key = self._columns, self._columns.message_key == key_digest(key)
        taken = connection.execute(
            update(self.table)
            .where(is_key, columns.owner.is_not(None), columns.lease_end_ms <= now_ms)
            .values(owner=owner, lease_end_ms=now_ms + lease_ms, updated_ms=now_ms)
        )
        if taken.rowcount:
            return Claim(State.OURS)
        row = connection.execute(select(columns.owner, columns.lease_end_ms).where(is_key)).one_or_none()
        if row is None:
            return None
        if row.owner is None:
            return Claim(State.HANDLED)
        return Claim(State.BUSY, max(0, row.lease_end_ms - now_ms) / 1000)

    def renew(self, connection: Connection, key: str, owner: str, now_ms: int, lease_ms: int) -> bool:
        return self._change(connection, key, owner, {"lease_end_ms": now_ms + lease_ms, "updated_ms": now_ms})

    def finish(self, connection: Connection, key: str, owner: str, now_ms: int) -> bool:
        return self._change(connection, key, owner, {"owner": None, "lease_end_ms": None, "updated_ms": now_ms})

    def release(self, connection: Connection, key: str, owner: str) -> None:
        connection.execute(delete(self.table).where(self._is_owned(key, owner)))

    def forget(self, connection: Connection, before: datetime, now_ms: int) -> int:
        """Delete keys that last changed before that moment, unless somebody holds them; return how many."""
        columns = self._columns
        is_over = columns.owner.is_(None) | (columns.lease_end_ms <= now_ms)
        return connection.execute(delete(self.table).where(columns.updated_ms < _ms(before), is_over)).rowcount

    def _change(self, connection: Connection, key: str, owner: str, values: dict[str, int | None]) -> bool:
        """Change the row if it is `owner`'s; False if it is not."""
        return bool(connection.execute(update(self.table).where(self._is_owned(key, owner)).values(values)).rowcount)

    def _is_owned(self, key: str, owner: str) -> ColumnElement[bool]:
        return and_(self._columns.message_key == key_digest(key), self._columns.owner == owner)


def _ms(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise InvalidRequest(f"{moment} has no time zone: nobody can tell when that is")
    return int(moment.timestamp() * 1000)
