"""Core. One transaction with messages: their rows, and what becomes of each message after its end.

written        the row is there if the transaction commits; `send` has written it

written -> sent                 the transaction has ended with a commit, and the row is there
written -> rolled back          the transaction is known to be rolled back, or was committed and the row is not there
written -> unknown              neither is known: if the row is there, it is relayed later
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
    """A message on its way through an outbox; `receipt` is set once. Made by a courier."""

    __slots__ = ("courier", "message", "content", "receipt")

    def __init__(self, courier: Courier, message: Message, content: str) -> None:
        self.courier = courier
        self.message = message
        self.content = content
        self.receipt: Future[Receipt] = after_commit(Future())
        self.receipt.set_running_or_notify_cancel()  # a waiter cannot cancel what is in a database

    def fail(self, outcome: Outcome, error: QmqError) -> None:
        """Set a receipt that says why the message is not known to be stored, unless it has one."""
        if not self.receipt.done():
            message = self.message
            self.receipt.set_result(unstored(outcome, str(message.id), message.subject, "", error))


@runtime_checkable
class Database(Protocol):
    """A database with an outbox, reached by connections of its own. Two that are equal are the same database."""

    @property
    def name(self) -> str:
        """What it is called in logs, without secrets. Two of one name are the same database."""

    async def run(self, table: str, work: Callable[[Rows], T]) -> T:
        """Do `work` in a transaction, and commit it."""

    def __hash__(self) -> int: ...


class Written(NamedTuple):
    """Messages whose transaction was committed. `rows` is None if there are none.

    is_checked: the rows are known to be committed. Else the database is asked for them: a savepoint may be rolled back,
        and the COMMIT of a transaction that the server has given up reports no error.
    """

    database: Database
    items: Sequence[Item]
    rows: Sequence[Inserted] | None
    is_checked: bool = False


class Courier(Protocol):
    """Sends what was committed."""

    table: str

    def committed(self, written: Written) -> None:
        """Send these messages; called from any thread."""


@runtime_checkable
class Transaction(Protocol):
    """A transaction that messages can be given to, in the thread that uses it."""

    def stage(self, items: list[Item]) -> None:
        """Write messages within the transaction; they are sent after its commit.

        Raises:
            InvalidRequest: their rows would not be part of the application's transaction; nothing was written.
        """


@runtime_checkable
class AsyncTransaction(Protocol):
    """The same of a coroutine driver."""

    async def stage_async(self, items: list[Item]) -> None:
        """Write messages within the transaction; they are sent after its commit."""


class Unit:
    """The messages of one transaction. Made by the shell that sees its end; used in one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._written: dict[Courier, tuple[list[Item], list[Inserted]]] = {}

    def write(self, items: list[Item], rows_of: Callable[[str], Rows]) -> None:
        """Write the rows of messages of one courier, within the transaction.

        Args:
            rows_of: the outbox with that name, within this transaction.
        """
        courier = items[0].courier
        inserted = rows_of(courier.table).insert([item.content for item in items])
        all_items, all_rows = self._written.setdefault(courier, ([], []))
        all_items += items
        all_rows += inserted

    def committed(self) -> None:
        """The commit was reported to have succeeded."""
        written = self._written
        self._written = {}
        for courier, (items, rows) in written.items():
            courier.committed(Written(self._database, items, rows))

    def rolled_back(self) -> None:
        """Nothing of the transaction is kept."""
        self._end(are_rolled_back)

    def lost(self) -> None:
        """The transaction has ended in an unknown way: what was written may be there."""
        self._end(are_unknown)

    def _end(self, receipts: Callable[[Iterable[Item]], None]) -> None:
        written = self._written
        self._written = {}
        for items, _ in written.values():
            receipts(items)


def are_unknown(items: Iterable[Item]) -> None:
    for item in items:
        error = OutcomeUnknown("the commit may have failed; what is in the outbox is sent later")
        item.fail(Outcome.UNKNOWN, error)


def are_rolled_back(items: Iterable[Item]) -> None:
    for item in items:
        item.fail(Outcome.REFUSED, RolledBack("its transaction or savepoint was rolled back"))
