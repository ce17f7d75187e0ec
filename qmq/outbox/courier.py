"""Shell. Courier: sends the messages of committed transactions and deletes their rows; unsent rows stay, to be relayed.

`find` and `find_database` recognise the `session` and `outbox` arguments of a producer without importing libraries that
the application does not use.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from qmq.client.batch import Outcome, Receipt, unstored
from qmq.codec import batch_encoder
from qmq.errors import ClientClosed, InvalidMessage, InvalidRequest, NotServed, OutcomeUnknown, QmqError, QueueFull
from qmq.logs import bounded
from qmq.message import Message
from qmq.outbox import dbapi
from qmq.outbox.row import decode_row, encode_row
from qmq.outbox.table import Inserted, Rows, head_of, table_name
from qmq.outbox.unit import AsyncTransaction, Database, Item, Transaction, Written, are_rolled_back, are_unknown
from qmq.plain import plain
from qmq.subjects import check_subject

_FINDERS = {"sqlalchemy": "qmq.outbox.sqlalchemy", "django": "qmq.outbox.django"}
"""Finders by library. Only those of imported libraries are used, because a session of another library cannot exist."""


def find_database(outbox: object) -> Database:
    """Return the database for the argument `outbox` of a producer.

    Raises:
        InvalidRequest: `outbox` is no database.
    """
    if isinstance(outbox, str):
        if "django" not in sys.modules:
            raise InvalidRequest(f"outbox={outbox!r}: a text is the alias of a Django database; give an engine instead")
        connections = import_module("django.db").connections
        if outbox not in connections:
            raise InvalidRequest(f"outbox={outbox!r}: Django's DATABASES has {', '.join(connections)}")
        if connections[outbox].in_atomic_block:  # in the caller's transaction, whose first message opens the producer
            return import_module(_FINDERS["django"]).DjangoDatabase(outbox)  # type: ignore[no-any-return]
        return find_database(connections[outbox])
    if inspect.isfunction(outbox) or inspect.ismethod(outbox) or isinstance(outbox, partial):
        return dbapi.Database(outbox)
    try:
        if isinstance(found := find(outbox), Database):
            return found
    except InvalidRequest:
        pass
    raise InvalidRequest(
        "outbox= needs an object that outlives a transaction: an engine, the alias of a Django database, a "
        "qmq.outbox.dbapi.Database, or a function that opens a DB-API connection"
    )


def prepare() -> None:
    """Begin to watch the writes of SQLAlchemy's sessions, if the application uses it."""
    if "sqlalchemy" in sys.modules:
        with suppress(ImportError):  # an unsupported version, or one without sessions
            import_module(_FINDERS["sqlalchemy"])


def find(session: object) -> Transaction | AsyncTransaction | Database:
    """Return the transaction or database for the argument `session` of a producer.

    Raises:
        InvalidRequest: `session` is neither.
    """
    if isinstance(session, dbapi.Transaction | dbapi.Database):
        return session
    for library, module in _FINDERS.items():
        if library in sys.modules and (found := import_module(module).find(session)) is not None:
            return found  # type: ignore[no-any-return]
    got = f"{type(session).__module__}.{type(session).__qualname__}"
    if hasattr(session, "cursor") and hasattr(session, "commit"):
        raise InvalidRequest(f"{got} does not report its commit: use qmq.outbox.dbapi.Database(…).transaction()")
    raise InvalidRequest(f"expected a SQLAlchemy session, a Django connection or a DB-API transaction, got {got}")


log = bounded(__name__)

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, None]], None]

TRIES_MAX = 3
"""Attempts of work in the database. A pooled connection may be broken, and the database ends one of two deadlocked
transactions.
"""


@dataclass(slots=True)
class _Batch:
    """Rows of one database, read or deleted by one statement for several tasks."""

    rows: list[Inserted] = field(default_factory=list)
    done: Any = None


class Courier:
    """Outbox of one producer, from its start to its end. Messages are sent on the producer's event loop.

    Args:
        send_many: the producer's method.
        table: name of the outbox in all databases, or schema.table.
        id_prefix: unique prefix for ids of messages without one.
        messages_max: limit of committed messages on their way. Further ones stay in the outbox, to be relayed.
        used: called with each database that has messages.
        left: called with a database and the reason when rows were not sent.
    """

    def __init__(
        self,
        send_many: Callable[[Iterable[Message]], Awaitable[Sequence[Receipt]]],
        *,
        table: str,
        id_prefix: str,
        messages_max: int,
        used: Callable[[Database], None] = lambda database: None,
        left: Callable[[Database, str], None] = lambda database, reason: None,
    ) -> None:
        self._used = used
        self._left = left
        self.table: str = table_name(table)
        self._send_many = send_many
        self._messages_max = messages_max
        self._loop = asyncio.get_running_loop()
        self._id_prefix = id_prefix
        self._id_numbers = count(1)  # `next` is atomic across threads
        self._arrived: deque[Written] = deque()
        self._tasks: dict[asyncio.Task[None], Written] = {}
        self._messages = 0
        self._to_read: dict[Database, _Batch] = {}
        self._to_delete: dict[Database, _Batch] = {}
        self._locks: WeakValueDictionary[Database, asyncio.Lock] = WeakValueDictionary()
        prepare()

    async def stage(self, messages: Iterable[Message], session: object) -> list[Future[Receipt]]:
        """Write messages within the transaction, or to the database, given as `session`.

        Raises:
            InvalidName, InvalidMessage: a message can never be sent; none was taken.
            InvalidRequest: `session` is no session, or its rows would not be part of the application's transaction.
            Exception: an error of the driver; the rows cannot be written, and the transaction can no longer be
                committed.
        """
        found, items = find(session), self.items(messages)
        if not items:
            return []
        match found:
            case AsyncTransaction():
                await found.stage_async(items)
            case Transaction():
                found.stage(items)
            case Database():
                await self.keep(items, found)
        return [item.receipt for item in items]

    # From any thread.

    def stage_here(self, messages: Iterable[Message], session: object, run: Run) -> list[Future[Receipt]]:
        """Do as `stage` for programs without coroutines; `run` runs a coroutine on the loop and waits for it.

        Raises:
            InvalidRequest: also if the session is one for coroutines.
        """
        found, items = find(session), self.items(messages)
        if not items:
            return []
        match found:
            case Transaction():
                found.stage(items)
            case AsyncTransaction():
                raise InvalidRequest("a session for coroutines needs the producer for coroutines: qmq.Producer")
            case Database():
                run(self.keep(items, found))
        return [item.receipt for item in items]

    def items(self, messages: Iterable[Message]) -> list[Item]:
        """Validate messages as the producer will, and encode their present contents.

        Raises:
            InvalidName, InvalidMessage: a message can never be sent.
        """
        now_ms = time.time_ns() // 1_000_000
        return [self._item(message, now_ms) for message in messages]

    def _item(self, message: Message, now_ms: int) -> Item:
        message.subject = check_subject(message.subject)
        if message.id is None:
            message.id = f"{self._id_prefix}{next(self._id_numbers)}"
        message.id = plain(message.id)
        batch_encoder(message.subject, now_ms)(message)
        copy = Message(
            message.subject,
            dict(message.properties),
            body=message.body,
            content_type=message.content_type,
            tags=message.tags,
            id=message.id,
            order_key=message.order_key,
            retries_max=message.retries_max,
            expires_after=message.expires_after,
        )
        return Item(self, copy, encode_row(copy, now_ms))

    def committed(self, written: Written) -> None:
        """Send messages with committed rows. Never raises, because an error would look like a failed commit."""
        self._arrived.append(written)
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            self._refuse(written, ClientClosed("the producer's event loop has ended; the message is in the outbox"))

    # On the loop.

    async def keep(self, items: list[Item], database: Database) -> None:
        """Write rows outside of the application's transactions, then send. If the rows cannot be written, the messages
        are sent all the same.

        Raises:
            QueueFull: too many messages are on their way; nothing was written.
        """
        if self._messages + len(items) > self._messages_max:
            raise QueueFull(f"{self._messages} messages of the outbox are on their way")
        self.committed(Written(database, items, await self._insert(items, database), is_checked=True))

    @property
    def is_busy(self) -> bool:
        return bool(self._arrived or self._tasks)

    def under_way(self, database: Database) -> set[int]:
        """Return the ids of rows with messages being sent, or about to be deleted."""
        sent = [written for written in self._tasks.values() if written.database == database]
        return {id for written in sent for inserted in written.rows or () for id in inserted.ids}

    async def drain(self) -> None:
        """Wait until the messages committed by now are sent and their rows deleted, or left to be relayed."""
        self._begin()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Cancel messages on their way; their rows stay."""
        for task in self._tasks:
            task.cancel()

    def _begin(self) -> None:
        while self._arrived:
            written = self._arrived.popleft()
            if self._messages + len(written.items) > self._messages_max and self._messages:
                self._refuse(written, QueueFull("too many messages are on their way; this one is in the outbox"))
                self._left(written.database, "too many messages were on their way")
                continue
            self._messages += len(written.items)
            task = self._loop.create_task(self._deliver(written))
            self._tasks[task] = written
            self._used(written.database)
            task.add_done_callback(partial(self._delivered, written))

    def _delivered(self, written: Written, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._messages -= len(written.items)
        are_unknown(written.items)  # without effect unless the task was cancelled: otherwise they have outcomes
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("messages stay in the outbox error=%r", error)

    async def _deliver(self, written: Written) -> None:
        database, items, rows, is_checked = written
        if rows is not None and not is_checked and not (items := await self._there(database, items, rows)):
            return
        receipts = await self._send(items)
        if rows is None:
            receipts = await self._kept_after_all(items, receipts, database)
        for item, receipt in zip(items, receipts):
            item.receipt.set_result(receipt)
        if unsent := next((receipt for receipt in receipts if not receipt.is_stored), None):
            self._left(database, unsent.reason)
        if rows is not None and any(receipt.is_stored for receipt in receipts):
            await self._delete(database, await self._stored(database, rows, receipts))

    async def _there(self, database: Database, items: Sequence[Item], rows: Sequence[Inserted]) -> Sequence[Item]:
        """Return the messages whose rows are in the database, and end the others."""
        heads = await self._heads(database, rows)
        if heads is None:
            are_unknown(items)
            return []
        are_rolled_back(item for item in items if head_of(item.content) not in heads)
        return [item for item in items if head_of(item.content) in heads]

    async def _heads(self, database: Database, rows: Sequence[Inserted]) -> set[str] | None:
        """Return the heads of existing rows, or None if the database does not answer."""
        batch = await self._together(
            self._to_read,
            database,
            rows,
            lambda table, some: table.heads(some),
            "rows of the outbox are not read, and stay",
        )
        heads: set[str] | None = batch.done
        return heads

    async def _send(self, items: Sequence[Item]) -> Sequence[Receipt]:
        try:
            return list(await self._send_many([item.message for item in items]))
        except QmqError as error:
            return [unstored(Outcome.REFUSED, str(item.message.id), item.message.subject, "", error) for item in items]

    async def _insert(self, items: Sequence[Item], database: Database) -> list[Inserted] | None:
        """Write rows in a transaction of their own; return None if that failed."""
        contents = [item.content for item in items]
        try:
            return await database.run(self.table, lambda rows: rows.insert(contents))
        except Exception as error:  # of any driver
            log.warning("messages are not in the outbox messages=%d error=%r", len(items), error)
            return None

    async def _kept_after_all(
        self, items: Sequence[Item], receipts: Sequence[Receipt], database: Database
    ) -> Sequence[Receipt]:
        """Try once more to write rows of messages that are still not stored."""
        left = [item for item, receipt in zip(items, receipts) if not receipt.is_stored]
        if not left or await self._insert(left, database) is not None:
            return receipts
        return [receipt if receipt.is_stored else _in_no_outbox(receipt) for receipt in receipts]

    async def _stored(
        self, database: Database, rows: Sequence[Inserted], receipts: Sequence[Receipt]
    ) -> Sequence[Inserted]:
        """Return the rows of stored messages: all rows, or those whose content has the id of a stored message."""
        left = {receipt.message_id for receipt in receipts if not receipt.is_stored}
        if not left:
            return rows
        ids = [id for inserted in rows for id in inserted.ids]
        try:
            read = await database.run(self.table, lambda rows: rows.read(ids))
        except Exception as error:
            log.warning("rows of the outbox are not read, and stay rows=%d error=%r", len(ids), error)
            return []
        stored = {receipt.message_id for receipt in receipts} - left
        return [Inserted([id], [head_of(content)]) for id, content in read if _message_id(content) in stored]

    async def _delete(self, database: Database, rows: Sequence[Inserted]) -> None:
        await self._together(
            self._to_delete, database, rows, lambda table, some: table.delete(some), "rows stay, and are sent again"
        )

    async def _together(
        self,
        waiting: dict[Database, _Batch],
        database: Database,
        rows: Sequence[Inserted],
        work: Callable[[Rows, Sequence[Inserted]], Any],
        failed: str,
    ) -> _Batch:
        """Do `work` on rows. Rows gather while another task works, so that the outbox uses one connection, not all."""
        batch = waiting.setdefault(database, _Batch())
        batch.rows.extend(rows)
        async with self._locks.setdefault(database, asyncio.Lock()):
            if waiting.get(database) is batch:  # otherwise another task has done these rows
                del waiting[database]
                if batch.rows:
                    batch.done = await self._try(database, lambda table: work(table, batch.rows), failed, batch.rows)
        return batch

    async def _try(
        self, database: Database, work: Callable[[Rows], T], failed: str, rows: Sequence[Inserted]
    ) -> T | None:
        for attempt in range(1, TRIES_MAX + 1):
            try:
                return await database.run(self.table, work)
            except Exception as error:
                if attempt == TRIES_MAX:
                    log.warning("%s rows=%d error=%r", failed, sum(len(inserted.ids) for inserted in rows), error)
        return None

    def _refuse(self, written: Written, error: QmqError) -> None:
        for item in written.items:
            item.fail(Outcome.REFUSED, error)


def _in_no_outbox(receipt: Receipt) -> Receipt:
    """Return the receipt of a message that is in no outbox: only the application can send it again."""
    reason = f"{receipt.reason}; and it is not in the outbox"
    error = OutcomeUnknown(reason) if receipt.outcome is Outcome.UNKNOWN else NotServed(reason)
    return receipt._replace(reason=reason, error=error)


def _message_id(content: str) -> str | None:
    try:
        return decode_row(content).id
    except InvalidMessage:
        return None  # written by another program
