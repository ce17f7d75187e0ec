"""Shell. Tables of keys in an application's database, and the statements on them.

qmq_handled, for transactions: a row marks a message as handled.

    message_key   CHAR(64), primary key    SHA-256 of the key, in hexadecimal digits
    handled_ms    BIGINT, indexed          time of handling

qmq_claims, for `SqlKeys`: a row marks a message as handled, or as being handled.

    message_key   CHAR(64), primary key    as above
    owner         CHAR(32) or NULL         present owner; NULL: handled
    lease_end_ms  BIGINT or NULL           end of the owner's lease; NULL: handled
    updated_ms    BIGINT, indexed          last change

The tables have different columns, so that a claim cannot pass for a handled message. Times are ms since 1970 by the
clocks of the processes, which should differ by much less than a lease.
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
    """Describe the table for transactions within the application's metadata, so that its migrations create it."""
    return _table(metadata, name, Column("handled_ms", BigInteger, nullable=False))


def claims_table(metadata: MetaData, name: str = CLAIMS) -> Table:
    """Describe the table for `SqlKeys` within the application's metadata, so that its migrations create it."""
    columns = Column("owner", CHAR(32)), Column("lease_end_ms", BigInteger)
    return _table(metadata, name, *columns, Column("updated_ms", BigInteger, nullable=False))


def _table(metadata: MetaData, name: str, *columns: Column[Any]) -> Table:
    name, key = plain_text("the name of a table", name), Column("message_key", CHAR(64), primary_key=True)
    moment = columns[-1].name
    index = Index(f"ix_{name}_{moment}", moment)  # an explicit name, for any naming convention of the metadata
    return Table(name, metadata, key, *columns, index, mysql_engine="InnoDB", mariadb_engine="InnoDB")


class KeyRefused(Exception):
    """Error: the table has the key, or rejects it for another reason, which is the `__cause__`."""


class HandledTable:
    """Statements on the table for transactions. Each method runs within the connection's transaction."""

    def __init__(self, name: str) -> None:
        self.table: Table = handled_table(MetaData(), name)

    def create(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)

    def claim(self, connection: Connection, key: str, now_ms: int) -> None:
        """Mark the message as handled, in the transaction of the work itself.

        Raises:
            KeyRefused: the table rejects the key. Roll back, then call `check_handled`.
            InvalidRequest: the connection is in no transaction, so the key would be kept without the work.
        """
        check_atomic(connection)
        try:
            connection.execute(self.table.insert().values(message_key=key_digest(key), handled_ms=now_ms))
        except IntegrityError as error:
            raise KeyRefused from error

    def check_handled(self, connection: Connection, key: str, refused: KeyRefused) -> None:
        """Raise the database's error unless the message is handled, because the key may have violated another rule."""
        is_key = self.table.c.message_key == key_digest(key)
        if connection.execute(select(self.table.c.message_key).where(is_key)).first() is None:
            raise refused.__cause__ or refused

    def forget(self, connection: Connection, before: datetime) -> int:
        """Delete keys of messages handled before `before`; return their number."""
        return connection.execute(delete(self.table).where(self.table.c.handled_ms < _ms(before))).rowcount


class ClaimsTable:
    """Statements on the table for `SqlKeys`. Each method runs within the connection's transaction."""

    def __init__(self, name: str) -> None:
        self.table: Table = claims_table(MetaData(), name)
        self._columns = self.table.c

    def create(self, connection: Connection) -> None:
        self.table.create(connection, checkfirst=True)

    def insert(self, connection: Connection, key: str, owner: str, now_ms: int, lease_ms: int) -> None:
        """Claim the key; raise IntegrityError if it exists."""
        lease = {"lease_end_ms": now_ms + lease_ms, "updated_ms": now_ms}
        connection.execute(self.table.insert().values(message_key=key_digest(key), owner=owner, **lease))

    def take_expired(self, connection: Connection, key: str, owner: str, now_ms: int, lease_ms: int) -> Claim | None:
        """Take a claim whose lease has ended, or return the key's state; None if the key no longer exists."""
        columns, is_key = self._columns, self._columns.message_key == key_digest(key)
        taken = connection.execute(
            update(self.table)
            .where(is_key, columns.owner.is_not(None), columns.lease_end_ms <= now_ms)
            .values(owner=owner, lease_end_ms=now_ms + lease_ms, updated_ms=now_ms)
        )
        if taken.rowcount:
            return Claim(State.CLAIMED)
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
        """Delete keys last changed before `before`, except claims whose lease has not ended; return their number."""
        columns = self._columns
        is_over = columns.owner.is_(None) | (columns.lease_end_ms <= now_ms)
        return connection.execute(delete(self.table).where(columns.updated_ms < _ms(before), is_over)).rowcount

    def _change(self, connection: Connection, key: str, owner: str, values: dict[str, int | None]) -> bool:
        """Change the row if `owner` has the key; return whether it was changed."""
        return bool(connection.execute(update(self.table).where(self._is_owned(key, owner)).values(values)).rowcount)

    def _is_owned(self, key: str, owner: str) -> ColumnElement[bool]:
        return and_(self._columns.message_key == key_digest(key), self._columns.owner == owner)


def _ms(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise InvalidRequest(f"{moment} has no time zone; add one")
    return int(moment.timestamp() * 1000)
