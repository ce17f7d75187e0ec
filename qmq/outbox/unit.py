"""Core. One transaction with messages: their rows, and the outcome of each message after its end.

written        the row exists if the transaction commits; `send` has written it

written -> sent                 the transaction ended with a commit, and the row exists
written -> rolled back          the transaction was rolled back, or was committed and the row does not exist
written -> unknown              neither is known: if the row exists, it is relayed later
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from qmq.client.batch import Outcome, Receipt, unstored
from qmq.client.handler import after_commit
from qmq.errors import OutcomeUnknown, QmqError, RolledBack
from qmq.message import Message
from qmq.outbox.table import Inserted, Rows

T = TypeVar("T")


class Item:
    """Message on its way through an outbox; `receipt` is set once. Made by a courier."""

    __slots__ = ("courier", "message", "content", "receipt")

    def __init__(self, courier: Courier, message: Message, content: str) -> None:
        self.courier: Courier = courier
        self.message: Message = message
        self.content: str = content
        self.receipt: Future[Receipt] = after_commit(Future())
        self.receipt.set_running_or_notify_cancel()  # a waiter cannot cancel a row in a database

    def fail(self, outcome: Outcome, error: QmqError) -> None:
        """Set a failed receipt unless there is one."""
        if not self.receipt.done():
            message = self.message
            self.receipt.set_result(unstored(outcome, str(message.id), message.subject, "", error))


@runtime_checkable
class Database(Protocol):
    """Database with an outbox, reached by connections of its own. Equal objects are the same database."""

    @property
    def name(self) -> str:
        """Name in logs, without secrets. Objects with equal names are the same database."""

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        """Do `work` in a transaction, and commit it."""

    def __hash__(self) -> int: ...


class Written(NamedTuple):
    """Messages of a committed transaction. `rows` is None if none were written.

    `is_checked`: whether the rows are certainly committed. Otherwise they are looked up: a savepoint may have been
    rolled back, and COMMIT reports no error for a transaction that the server has given up.
    """

    database: Database
    items: Sequence[Item]
    rows: Sequence[Inserted] | None
    is_checked: bool = False


class Courier(Protocol):
    """Sender of committed messages."""

    table: str

    def committed(self, written: Written) -> None:
        """Send these messages; called from any thread."""


@runtime_checkable
class Transaction(Protocol):
    """Transaction to which messages are added, in the thread that uses it."""

    def stage(self, items: list[Item]) -> None:
        """Write messages within the transaction; they are sent after its commit.

        Raises:
            InvalidRequest: the rows would not be part of the application's transaction; nothing was written.
        """


@runtime_checkable
class AsyncTransaction(Protocol):
    """Transaction of a coroutine driver."""

    async def stage_async(self, items: list[Item]) -> None:
        """Write messages within the transaction; they are sent after its commit."""


class Unit:
    """Messages of one transaction. Made by the shell that is notified of its end; used in one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._written: dict[Courier, tuple[list[Item], list[Inserted]]] = {}

    def write(self, items: list[Item], rows_of: Callable[[str], Rows]) -> None:
        """Write the rows of one courier's messages, within the transaction.

        Args:
            rows_of: returns the outbox of that name within this transaction.
        """
        courier = items[0].courier
        inserted = rows_of(courier.table).insert([item.content for item in items])
        all_items, all_rows = self._written.setdefault(courier, ([], []))
        all_items += items
        all_rows += inserted

    def committed(self) -> None:
        """Handle a reported commit."""
        written = self._written
        self._written = {}
        for courier, (items, rows) in written.items():
            courier.committed(Written(self._database, items, rows))

    def rolled_back(self) -> None:
        """Handle a rollback, after which no rows exist."""
        self._end(are_rolled_back)

    def lost(self) -> None:
        """Handle an end with unknown outcome, after which the rows may exist."""
        self._end(are_unknown)

    def _end(self, receipts: Callable[[Iterable[Item]], None]) -> None:
        written = self._written
        self._written = {}
        for items, _ in written.values():
            receipts(items)


def are_unknown(items: Iterable[Item]) -> None:
    for item in items:
        error = OutcomeUnknown("the commit may have failed; rows in the outbox are sent later")
        item.fail(Outcome.UNKNOWN, error)


def are_rolled_back(items: Iterable[Item]) -> None:
    for item in items:
        item.fail(Outcome.REFUSED, RolledBack("its transaction or savepoint was rolled back"))
