"""Shell. Context of the actions: registry, brokers, metaservers, clients, vault of passwords; and their handlers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from qmq.client.batch import Receipt
from qmq.errors import NotServed, OperatorError, OutcomeUnknown, QmqError
from qmq.message import Message
from qmq.metaserver.actions.arguments import Arguments
from qmq.metaserver.actions.plan import Blast, Contents, Leftover, Plan
from qmq.metaserver.cluster.group_starts import expected_at
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.model import (
    ALL_SUBJECTS,
    DELAY,
    NORMAL,
    AuditRow,
    Broker,
    ConsumerGroupRow,
    Group,
    Route,
)
from qmq.metaserver.roles.failover import Failovers
from qmq.metaserver.roles.swap import Swaps
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.storage.repository import Repository
from qmq.proto import qmq_pb2 as pb
from qmq.rights import Caller
from qmq.subjects import real_subject

MAKE_KEY = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'


class Vault:
    """Cipher for database passwords. Made by main from the setting `password_keys`; the first key encrypts, every key
    decrypts.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    @property
    def is_open(self) -> bool:
        return self._fernet is not None

    def encrypt(self, secret: str) -> str:
        """Return the encrypted secret. Raises OperatorError without a key."""
        if self._fernet is None:
            raise OperatorError(
                "no key to encrypt passwords with: give all metaservers the same one in the setting password_keys, or "
                f"the variable QMQ_METASERVER_PASSWORD_KEYS, then start them again. This makes a key: {MAKE_KEY}"
            )
        return self._fernet.encrypt(secret.encode()).decode()

    def decrypt(self, stored: str) -> str:
        """Return the secret. Raises OperatorError if no key fits."""
        if self._fernet is None:
            raise OperatorError("no key to decrypt passwords with: the setting password_keys is empty")
        try:
            return self._fernet.decrypt(stored.encode()).decode()
        except InvalidToken:
            raise OperatorError(
                "no key of the setting password_keys fits this password; AddDb stores it again"
            ) from None


ASKED_AT_ONCE = 64
"""Calls to brokers or metaservers at once; each is a connection of its own."""
CLIENTS_MAX = 100_000
ROUTES_AT_ONCE = 1_000
"""Routes that are handled on the loop: about a millisecond's work, less than a thread needs to begin."""
NOTICE_S, NOTICE_PAUSE_S = 1.5, 0.05
"""Longest wait, after a broker's missing answer, for the end of its stream: its process may just have ended."""

DELAYED = "delayed"
"""In place of a consumer group: messages that are not due yet."""
DATABASE = "database"
"""In place of a broker group that did not answer."""

R = TypeVar("R")
T = TypeVar("T")


class DatabasePort(Protocol):
    """The database; raises DatabaseAway."""

    async def read(self, work: Callable[[Repository], T], *, timeout_ms: int = 0) -> T: ...

    async def write(self, work: Callable[[Repository], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class OldRoutes:
    """Clients with a route older than a change."""

    producers: int = 0
    consumers: int = 0
    watchers: int = 0
    """Clients that watch a route with the group."""
    unasked: tuple[str, ...] = ()
    """Metaservers without an answer."""


class ClientsPort(Protocol):
    """The other metaservers of the installation: their clients, and other facts that each has alone."""

    async def old_routes(self, group: str, subject: str) -> OldRoutes: ...

    async def connected(
        self, *, subject: str, app: str, limit: int, here: bool
    ) -> tuple[list[dict[str, object]], tuple[str, ...]]: ...

    async def elsewhere(self, action: str) -> tuple[dict[str, Any], tuple[str, ...]]: ...


class WatchdogsPort(Protocol):
    """The active watchdogs, each at the address of its lease."""

    async def ask(self, address: str, path: str, arguments: Mapping[str, Any], *, changes: bool = False) -> Any: ...


async def cannot_send(message: Message) -> Receipt:
    raise NotServed("this metaserver sends no messages")


@dataclass(frozen=True, slots=True)
class ActionContext:
    """Everything that actions use. Made by main, once. All methods are called from the loop."""

    registry: Registry
    database: DatabasePort
    brokers: Brokers
    swaps: Swaps
    failovers: Failovers
    clients: ClientsPort
    vault: Vault
    watchdogs: WatchdogsPort
    bad_rows: Callable[[], int] = lambda: 0
    """Number of invalid database rows."""
    refusals: Callable[[], Mapping[str, str]] = dict
    """Tokens with clients that are refused routes because of a limit, with the reason."""
    send: Callable[[Message], Awaitable[Receipt]] = cannot_send
    """Sends a message as a producer of this metaserver."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """This metaserver's settings, without secrets."""
    version: str = ""
    own_id: str = ""
    """Id of this metaserver."""

    def find_group(self, name: str) -> Group:
        group = self.registry.directory.groups.get(name)
        if group is None:
            raise OperatorError(f"there is no broker group {name}; ListBrokerGroups names them")
        return group

    def takes_messages(self, name: str) -> bool:
        group = self.registry.directory.groups.get(name)
        return group is not None and self.registry.is_writable(group)

    async def on_all_routes(self, work: Callable[[dict[str, Route]], R]) -> R:
        """Run `work` on a copy of all routes, on a thread: 100,000 routes would block the loop."""
        return await asyncio.to_thread(work, dict(self.registry.routes))

    async def on_routes_of(self, groups: Iterable[str], work: Callable[[dict[str, Route]], R]) -> R:
        """Run `work` on the routes with one of these groups; on a thread if they are many."""
        routes = self.registry.routes_of(groups)
        return work(routes) if len(routes) <= ROUTES_AT_ONCE else await asyncio.to_thread(work, routes)

    async def blast(self, plan: Plan) -> Blast:
        """Return the subjects, groups and clients that a plan affects."""
        clients, unasked = await (self._all_clients() if plan.everything else self._clients_of(plan))
        return Blast(
            subjects=tuple(await asyncio.to_thread(sorted, plan.subjects)),
            groups=tuple(sorted(plan.groups)),
            clients=clients,
            unasked=unasked,
        )

    async def _all_clients(self) -> tuple[int, tuple[str, ...]]:
        clients, unasked = await self.clients.connected(subject="", app="", limit=CLIENTS_MAX, here=False)
        return len(clients), unasked

    async def _clients_of(self, plan: Plan) -> tuple[int, tuple[str, ...]]:
        subject = next(iter(plan.subjects)) if len(plan.subjects) == 1 else ALL_SUBJECTS
        groups = sorted(plan.watched or plan.groups)
        counts = await together([self.clients.old_routes(group, subject) for group in groups])
        unasked = {name for count in counts for name in count.unasked}
        return max((count.watchers for count in counts), default=0), tuple(sorted(unasked))

    async def contents(self, name: str, subject: str) -> Contents:
        """Return the messages that a broker group still holds for the consumer groups of a subject, or of all."""
        group = self.registry.directory.groups.get(name)
        if group is None or not any(broker.incarnation for broker in group.brokers):
            return Contents()  # no master ever served there
        if group.kind == DELAY:
            return await self._delayed(group)
        try:
            of = "" if subject == ALL_SUBJECTS else subject
            answer = await self.ask_consumers(group, known=await self.consumer_groups(of), known_of=of)
        except QmqError as error:
            return Contents(unknown=str(error))
        left = [
            Leftover(row.subject, row.group, row.lag, row.oldest_ms, row.dead_letters)
            for row in answer.groups
            if (row.lag or row.dead_letters) and subject in (ALL_SUBJECTS, real_subject(row.subject))
        ]
        return Contents(tuple(left))

    async def _delayed(self, group: Group) -> Contents:
        """Return the messages that a group of delay servers still has to send, of all owners."""
        try:
            stats = await self.brokers.delay_stats(self.master_of(group), pb.DelayStatsRequest())
        except QmqError as error:
            return Contents(unknown=str(error))
        pending = stats.pending_messages
        return Contents((Leftover(ALL_SUBJECTS, DELAYED, pending),) if pending else ())

    async def consumer_groups(self, subject: str) -> list[ConsumerGroupRow]:
        """Read the consumer groups of a subject, or of all. Raises DatabaseAway."""
        return await self.database.read(lambda repository: repository.consumer_groups_of(subject))

    async def ask_consumers(
        self,
        group: Group,
        subject: str = "",
        consumer_group: str = "",
        *,
        behind_max: int = 0,
        known: Iterable[ConsumerGroupRow] = (),
        known_of: str = "",
    ) -> pb.ConsumersAnswer:
        """Ask the master of a group for the progress of its consumer groups.

        Args:
            known: consumer groups that count without a position; all of the subject `known_of` if it is given.
        """
        expected = expected_at(known, self.registry.routes, group.name, real_subject(known_of))
        messages = [
            pb.KnownGroup(subject=row.subject, group=row.group, begin=pb.GroupBegin(**begin._asdict()))
            for row, begin in expected
        ]
        return await self.brokers.consumers(
            self.master_of(group), subject=subject, group=consumer_group, behind_max=behind_max, known=messages
        )

    async def notice_stopped(self, brokers: Iterable[Broker]) -> bool:
        """Check brokers that count as running; return whether one of them is down."""
        running = [broker for broker in brokers if self.registry.may_be_up(broker)]
        answers = await together([self._answers(broker) for broker in running])
        silent = [broker for broker, answered in zip(running, answers, strict=True) if not answered]
        ends = time.monotonic() + NOTICE_S
        while any(self.registry.may_be_up(broker) for broker in silent) and time.monotonic() < ends:
            await asyncio.sleep(NOTICE_PAUSE_S)
        return any(not self.registry.may_be_up(broker) for broker in running)

    async def _answers(self, broker: Broker) -> bool:
        try:
            await self.brokers.replica_status(broker)
        except NotServed:
            return False
        except OperatorError:
            pass  # it may reject our token only, for example
        return True

    def groups_with_master(self) -> list[Group]:
        """Return the groups of brokers that can be asked for consumer groups, by name."""
        groups = self.registry.directory.groups_of(NORMAL)
        return [groups[name] for name in sorted(groups) if groups[name].master]

    def master_of(self, group: Group) -> Broker:
        if group.master is None:
            raise NotServed(f"{group.name} has no master; AddBroker or ReplaceBroker gives it one")
        if not group.master.control_port:
            raise NotServed(f"the master of {group.name}, {group.master.key}, never registered; start it")
        return group.master

    async def ask_all(
        self, groups: Iterable[Group], subject: str = "", consumer_group: str = "", *, behind_max: int = 0
    ) -> tuple[dict[str, pb.ConsumersAnswer], dict[str, str]]:
        """Ask the masters of many groups at once; return the answers, and for each missing one the reason."""
        known = await _caught(self.consumer_groups(subject))
        rows, unread = known if isinstance(known, list) else [], {}
        if isinstance(known, QmqError):
            unread[DATABASE] = f"groups without a position on a broker group are not counted: {known}"
        answers, missing = await answers_of(
            sorted(groups, key=lambda group: group.name),
            lambda group: self.ask_consumers(
                group, subject, consumer_group, behind_max=behind_max, known=rows, known_of=subject
            ),
        )
        return answers, unread | missing


async def answers_of(
    groups: Sequence[Group], ask: Callable[[Group], Awaitable[R]]
) -> tuple[dict[str, R], dict[str, str]]:
    """Ask about many groups at once; return the answers by group, and for each missing one the reason."""
    results = await together([_caught(ask(group)) for group in groups])
    answers, missing = {}, {}
    for group, result in zip(groups, results, strict=True):
        if isinstance(result, QmqError):
            missing[group.name] = str(result)
        else:
            answers[group.name] = result
    return answers, missing


async def together(questions: Sequence[Awaitable[R]]) -> list[R]:
    """Run many calls with a limit on their number at once; return the answers in order."""
    slots = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(question: Awaitable[R]) -> R:
        async with slots:
            return await question

    return list(await asyncio.gather(*(ask(question) for question in questions)))


async def _caught(question: Awaitable[R]) -> R | QmqError:
    """Return the answer, or the error."""
    try:
        return await question
    except QmqError as error:
        return error


def wall_ms() -> int:
    """Return milliseconds since 1970, for display."""
    return time.time_ns() // 1_000_000


Look = Callable[[ActionContext, Arguments], Awaitable[Any]]
"""Returns the data of a list."""
LookAs = Callable[[ActionContext, Arguments, Caller], Awaitable[Any]]
"""Returns data that depends on the caller."""
MakePlan = Callable[[ActionContext, Arguments], Awaitable[Plan]]
"""Decides a change on the current registry."""
Needs = Callable[[Arguments], tuple[tuple[str, str], ...]]
"""Rights with their subjects, as in `Plan.needs`."""
CarryOut = Callable[[ActionContext, Arguments, Plan, AuditRow], Awaitable[Any]]
"""Makes a change of more than one transaction; returns the answer's data."""
Afterwards = Callable[[ActionContext, Arguments, Plan], Awaitable[Any]]
"""Completes the answer's data after the change is stored."""


@dataclass(frozen=True, slots=True)
class Handler:
    """Implementation of an action: `look` or `look_as`, or `plan` with its steps."""

    look: Look | None = None
    look_as: LookAs | None = None
    plan: MakePlan | None = None
    needs: Needs | None = None
    """Rights needed before the plan, because the plan asks brokers for data that only the caller may see."""
    carry_out: CarryOut | None = None
    """None: the plan's changes and their audit row are stored in one transaction."""
    afterwards: Afterwards | None = None


class PartlyDone(OutcomeUnknown):
    """Some brokers did it, others did not or did not answer. `data` lists them."""

    def __init__(self, text: str, data: Any) -> None:
        super().__init__(text)
        self.data = data
