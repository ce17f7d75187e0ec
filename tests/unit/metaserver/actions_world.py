"""Shell. Real actions on a real registry and a real SQLite database; brokers and clients are fakes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from qmq.codec import encode_message, join_batch, with_properties
from qmq.errors import NotServed, OperatorError, OutcomeUnknown
from qmq.message import Message
from qmq.metaserver.actions.clients import Clients
from qmq.metaserver.actions.context import ActionContext, Vault
from qmq.metaserver.actions.databases import Watchdogs
from qmq.metaserver.actions.runner import Actions
from qmq.metaserver.cluster.liveness import Liveness
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.cluster.sightings import AwakeClock
from qmq.metaserver.model import Broker, BrokerKey, ReplicaState
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.roles.failover import Failovers
from qmq.metaserver.roles.swap import Swaps
from qmq.metaserver.routes.audience import ClientInfo, Counts
from qmq.metaserver.settings import MetaserverSettings
from qmq.metaserver.storage.database import Database
from qmq.proto import qmq_pb2 as pb
from qmq.redrive.redriving import REASON, TIMES
from qmq.remoting.commands import Piece, Produced
from qmq.rights import Caller, Scope, TokenRole
from qmq.types import Role

ADMIN = Caller("anna", TokenRole.ADMIN, peer="10.0.0.9")
KEY = "nBLTTCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A="


class World:
    """Actions of one metaserver.

    Args:
        database: a file of SQLite, or the URL of another database.
    """

    def __init__(self, database, *, keys=(KEY,), timeout_ms=30_000):
        self.metrics, clock = Metrics(), AwakeClock()
        self.url = database if "://" in str(database) else f"sqlite:///{database}"
        self.others = []
        self.database = Database(self.url, timeout_ms=timeout_ms)
        self.liveness = Liveness("m1", timeout_ms=5000)
        self.registry = Registry(
            self.database, self.liveness, self.metrics, clock, lambda tokens: None, groups_min=1, groups_new=1
        )
        self.brokers = Brokers()
        self.hub = Hub()
        self.watchdogs = Watchdogs("a secret of all")
        self.settings = settings = MetaserverSettings(cluster_token="a secret of all", swap_finish_ms=1000)
        clients = self.clients = Clients(self.hub, list, token="a secret of all", timeout_ms=100)
        swaps = Swaps(self.registry, self.brokers, settings)
        self.context = ActionContext(
            self.registry,
            self.database,
            self.brokers,
            swaps,
            Failovers(self.registry, self.brokers, settings),
            clients,
            Vault(keys),
            self.watchdogs,
            refusals=lambda: self.refusals,
            settings={"cluster": "prod"},
            version="1",
            own_id="m1",
        )
        self.actions = Actions(self.context, self.metrics)
        self.sessions = {}
        self.refusals = {}

    async def open(self):
        await self.database.open()
        await self.registry.mirror.catch_up()

    async def another(self, url=""):
        """Return another metaserver, on the same database unless a URL is given."""
        other = World(url or self.url)
        await other.open()
        self.others.append(other)
        return other

    def close(self):
        for world in (self, *self.others):
            world.database.close()

    async def run(self, name, caller=ADMIN, /, **words):
        return await self.actions.run(name, {key: str(value) for key, value in words.items()}, caller)

    async def done(self, name, /, **words):
        answer = await self.run(name, **words)
        assert answer.done, answer
        return answer.data

    async def refused(self, name, caller=ADMIN, /, **words):
        answer = await self.run(name, caller, **words)
        assert answer.status == -1, answer
        return answer.message

    async def audit(self):
        return await self.database.read(lambda repository: repository.audit_trail())

    async def copies(self, *groups):
        """Add groups, g1 by default, of two brokers that are not started."""
        for group in groups or ("g1",):
            await self.done("AddBroker", **place(group, 0, f"{group}-a"))
            await self.done("AddBroker", **place(group, 1, f"{group}-b"))

    async def start(self, hostname, *, complete=False):
        """Register a broker and send a heartbeat."""
        known = self.registry.directory.find(BrokerKey(hostname, 20881))
        ports, disk = (20881, 20882, 20883, 20884), f"disk of {hostname}"
        broker = Broker(known.group, known.role, hostname, "10.0.0.1", *ports, incarnation=disk, kind=known.kind)
        await self.registry.registration.register(broker, lambda question: asyncio.sleep(0))
        self.sessions[hostname] = self.registry.join(broker.key, broker.incarnation)
        self.beat(hostname)
        if complete:
            await self.database.write(
                lambda repository: repository.store_complete(
                    broker, term=self.registry.directory.groups[known.group].term, complete=True
                )
            )
            await self.registry.mirror.catch_up()

    def beat(self, hostname, **state):
        key = BrokerKey(hostname, 20881)
        broker = self.registry.directory.find(key)
        group = self.registry.directory.groups[broker.group]
        master = broker.role == Role.MASTER
        reported = {"role": broker.role, "term": group.term, "writable": master, "log_end": 4096, "chain": 77} | state
        self.brokers.states[key] = ReplicaState(**reported)
        self.registry.beat(key, self.sessions[hostname], self.brokers.states[key])

    def stop(self, hostname):
        """End a broker's stream, noticed at once."""
        key = BrokerKey(hostname, 20881)
        self.registry.leave(key, self.sessions.pop(hostname))
        question = self.liveness.doubt(key)
        self.liveness.answered(question, None, now_ms=self.registry.now_ms())
        del self.brokers.states[key]

    async def running_copies(self, *groups):
        for group in groups or ("g1",):
            await self.copies(group)
            await self.start(f"{group}-a")
            await self.start(f"{group}-b", complete=True)

    async def routed_copies(self, *subjects, groups=("g1",)):
        """Add groups that are not started, and subjects that all of them serve."""
        await self.copies(*groups)
        await self.routed(*subjects, groups=groups)

    async def serving_copies(self, *subjects, groups=("g1",)):
        """Add running groups, and subjects that all of them serve."""
        await self.running_copies(*groups)
        await self.routed(*subjects, groups=groups)

    async def routed(self, *subjects, groups=("g1",)):
        routes = [(subject, groups, 0) for subject in subjects]
        await self.database.write(lambda repository: repository.store_routes(routes))
        await self.registry.mirror.catch_up()

    def groups_of(self, subject):
        return self.registry.routes[subject].groups


class Brokers:
    """Control ports of brokers."""

    def __init__(self):
        self.states = {}
        self.progress = {}
        self.sums, self.subject_bytes, self.producers = None, 0, []
        self.silent = set()
        self.resets = []
        self.cancelled = []
        self.held = []
        self.is_connected = False
        self.promise_nothing = set()
        self.stored = []
        self.browsed = []
        self.dead = []
        self.samples = {}
        self.destinations = []

    def _reach(self, broker):
        if broker.key not in self.states or broker.group in self.silent:
            who = f"{broker.key} ({broker.part.name} of {broker.group})"  # as in qmq.metaserver.rpc.broker_client
            raise NotServed(f"{who} did not answer at {broker.ip}:{broker.control_port}")
        return self.states[broker.key]

    async def replica_status(self, broker):
        return self._reach(broker)

    async def mark_groups(self, broker, mark, groups):
        self._reach(broker)
        return [group.key in {(row.subject, row.group) for row in self.progress[broker.group]} for group in groups]

    async def rates(self, broker):
        self._reach(broker)
        return pb.RatesAnswer(samples=self.samples.get(broker.group, []))

    async def settings(self, broker):
        self._reach(broker)
        return {"hostname": broker.hostname, "token": "set, not shown", "lease_ms": "10000"}

    async def prepare_swap(self, broker, *, term, hold_ms, timeout_ms, target="", promised_term=0):
        return self._promise(broker, promised_term)

    async def prepare_failover(self, broker, *, term, hold_ms, silent_ms, promised_term=0, master_gone=False):
        if self.is_connected:
            raise OperatorError(f"{broker.key} refused: the master sent a packet 300 ms ago")
        if not (self._reach(broker).in_sync or master_gone):
            raise OperatorError(f"{broker.key} refused: it was not in sync since it began")
        self.held.append(broker.hostname)
        return self._promise(broker, promised_term)

    def _promise(self, broker, term):
        state = self._reach(broker)
        if broker.hostname in self.promise_nothing:
            return state
        self.states[broker.key] = replace(state, promised_term=max(state.promised_term, term))
        return self.states[broker.key]

    async def cancel_swap(self, broker):
        self.cancelled.append(broker.hostname)
        return self._reach(broker)

    async def consumers(self, broker, *, subject="", group="", behind_max=0, known=(), unused_before_ms=0):
        self._reach(broker)
        rows = [
            row
            for row in self.progress.get(broker.group, [])
            if subject in ("", row.subject)
            and group in ("", row.group)
            and (not unused_before_ms or 0 < row.unused_since_ms < unused_before_ms)
        ]
        if behind_max:
            rows = [row for row in rows if row.lag or row.dead_letters]
            rows = sorted(rows, key=lambda row: (-row.lag, -row.dead_letters))[:behind_max]
        return pb.ConsumersAnswer(
            groups=rows,
            sums=self.sums if behind_max else None,
            subject_bytes=self.subject_bytes,
            producers=self.producers,
        )

    async def dead_letters(self, broker, *, subject, group, to="", at=(), source=""):
        self._reach(broker)
        self.destinations.append((to, [broker.group for broker in at]))
        return DeadLetters(broker.group, self.dead)

    async def browse(self, broker, request):
        self._reach(broker)
        self.browsed.append(pb.BrowseRequest.FromString(request.SerializeToString()))
        return self.stored.pop(0) if self.stored else pb.BrowseAnswer()

    async def reset_offset(self, broker, request):
        self._reach(broker)
        if not any(row.group == request.group for row in self.progress.get(broker.group, [])):
            raise OperatorError(f"there is no consumer group {request.group}")
        if not request.dry_run:
            self.resets.append((broker.group, request.subject, request.group, request.to, request.value))
            if broker.group in self.fail_for_real:
                raise NotServed(f"{broker.key} did not answer")
        return pb.ResetOffsetAnswer(before=10, after=3, repeated=7)

    fail_for_real: frozenset[str] = frozenset()


class DeadLetters:
    """Dead letters of one group, (id, reason): one list shared by all readers; unsettled ones return to it."""

    batch_bytes_max = 1 << 20

    def __init__(self, broker_group, letters):
        self.broker_group = broker_group
        self._all = letters
        self._held, letters[:] = list(letters), []
        self._gone = set()
        self._is_taken = False

    async def take(self):
        if self._is_taken or not self._held:
            return []
        self._is_taken = True
        bodies = [_dead_letter(id, reason) for id, reason in self._held]
        return [Piece(0, 0, len(bodies), 0, 1, memoryview(join_batch(bodies)))]

    async def send_back(self, letters):
        refused = [(at, "readonly") for at, letter in enumerate(letters) if letter.reason == "refuse me"]
        if any(letter.reason == "lose me" for letter in letters):
            raise OutcomeUnknown("no answer")
        return Produced(0, 0, 0, refused)

    async def settle(self, letters):
        self._gone |= {letter.id for letter in letters}

    async def close(self):
        self._all += [pair for pair in self._held if pair[0] not in self._gone]


def _dead_letter(id, reason):
    return with_properties(encode_message(Message("s", {"orderNo": "1"}, id=id), 1), {REASON: reason, TIMES: "5"})


class Hub:
    """Clients of this metaserver."""

    def __init__(self):
        self.counts = [Counts(0, 0, 0)]
        self.infos = []
        self.asked = 0
        self.groups = []

    def old_routes(self, group, subject):
        self.asked += 1
        self.groups.append(group)
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def clients(self):
        return self.infos


def client(app, client_id, *subjects, produces=True):
    return ClientInfo(app, client_id, "10.1.1.1:5", subjects, produces, True)


def left(subject, group, messages, oldest_ms=0, *, dead=0):
    """A consumer group with waiting messages and dead letters."""
    words = {"subject": subject, "group": group, "lag": messages, "oldest_ms": oldest_ms}
    return pb.GroupProgress(**words, position=10, dead_letters=dead)


def place(group, role, hostname, port=20881):
    words = {"brokerGroup": group, "role": role, "hostname": hostname, "ip": "10.0.0.1"}
    return words | {"servePort": port, "syncPort": port + 1}


def caller(role, *, subjects=(), groups=()):
    return Caller("otto", TokenRole(role), Scope(tuple(subjects), tuple(groups)))
