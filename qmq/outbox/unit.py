"""Core. One transaction with messages: what is written before its commit, and what becomes of each message after it.

staged         given to `send`, and not written yet
written        the row is there if the transaction commits

staged  -> written              right before the commit, all at once
staged  -> rolled back          with its savepoint, or the transaction
written -> sent                 the commit is known to have succeeded
written -> rolled back          the transaction is known to be rolled back
written -> unknown              neither: if the row is there, it is relayed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from qmq.client.batching import Outcome, Receipt, unstored
from qmq.client.calling import after_commit
from qmq.errors import OutcomeUnknown, QmqError, RolledBack
from qmq.message import Message
from qmq.outbox.staged import Staged
from qmq.outbox.table import Inserted, Rows

T = TypeVar("T")


class Item:
    """A message on its way through an outbox; `receipt` is set once. Made by a courier."""

    __slots__ = ("courier", "message", "content", "receipt")

    def __init__(self, courier: Courier, message: Message, content: str) -> None:
        self.courier, self.message, self.content = courier, message, content
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
    """Messages whose rows are committed. `rows` is None if there are none."""

    database: Database
    items: Sequence[Item]
    rows: Sequence[Inserted] | None


class Courier(Protocol):
    """Sends what was committed."""

    table: str

    def committed(self, written: Written) -> None:
        """Send these messages; called from any thread."""


@runtime_checkable
class Transaction(Protocol):
    """A transaction that messages can be given to, in the thread that uses it."""

    def stage(self, items: list[Item]) -> None:
        """Take messages: they are written with the transaction, and sent after its commit."""


@runtime_checkable
class AsyncTransaction(Protocol):
    """The same of a coroutine driver."""

    async def stage_async(self, items: list[Item]) -> None:
        """Take messages: they are written with the transaction, and sent after its commit."""


class Unit:
    """The messages of one transaction. Made by the shell that sees its savepoints and its end; used in one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._staged: Staged[Item] = Staged()
        self._written: list[Written] = []
        self.is_written = False
        """Whether nothing is left to do but the commit."""

    def add(self, items: list[Item]) -> None:
        self._staged.add(items)

    def savepoint(self) -> None:
        self._staged.savepoint()

    def release(self) -> None:
        self._staged.release()

    def roll_back_savepoint(self) -> None:
        _are_rolled_back(self._staged.roll_back())

    def write(self, rows_of: Callable[[str], Rows]) -> None:
        """Write all rows: right before the commit, within the transaction. An error must fail the transaction.

        Args:
            rows_of: the outbox with that name, within this transaction.
        """
        by_courier: dict[Courier, list[Item]] = {}
        for item in self._staged.take():
            by_courier.setdefault(item.courier, []).append(item)
        try:
            for courier, items in by_courier.items():
                rows = rows_of(courier.table).insert([item.content for item in items])
                self._written.append(Written(self._database, items, rows))
            self.is_written = True
        except BaseException:
            for items in by_courier.values():
                _are_rolled_back(items)
            raise

    def committed(self) -> None:
        """The commit has succeeded."""
        written, self._written = self._written, []
        for one in written:
            one.items[0].courier.committed(one)
        _are_rolled_back(self._staged.take())  # given after the commit had begun: nobody wrote them

    def rolled_back(self) -> None:
        """Nothing of the transaction is kept."""
        _are_rolled_back(item for one in self._written for item in one.items)
        _are_rolled_back(self._staged.take())
        self._written = []

    def lost(self) -> None:
        """The transaction has ended, and nobody said how: what was written may be there."""
        for one in self._written:
            are_unknown(one.items)
        self._written = []
        self.rolled_back()


def are_unknown(items: Iterable[Item]) -> None:
    for item in items:
        error = OutcomeUnknown("the commit may have failed; what is in the outbox is sent later")
        item.fail(Outcome.UNKNOWN, error)


def _are_rolled_back(items: Iterable[Item]) -> None:
    for item in items:
        item.fail(Outcome.REFUSED, RolledBack("its transaction or savepoint was rolled back"))
