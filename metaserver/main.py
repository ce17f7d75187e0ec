"""Shell. Builds the metaserver, serves until SIGTERM or Ctrl-C, stops in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import grpc
from starlette.types import ASGIApp

from qmq.client.batch import Receipt
from qmq.client.producer import Producer
from qmq.control_plane import NO_PROBE, SERVER_OPTIONS
from qmq.descriptors import limit, meta_ports, report
from qmq.errors import OperatorError, QmqError
from qmq.http_port import HttpPort, bind_address, listen
from qmq.memory import collect_by_the_clock
from qmq.message import Message
from qmq.metaserver.access import Access, first_admin
from qmq.metaserver.actions.clients import Clients
from qmq.metaserver.actions.context import ActionContext, Vault
from qmq.metaserver.actions.databases import Watchdogs
from qmq.metaserver.actions.doctor import examine_reported
from qmq.metaserver.actions.expiry import GroupExpiry
from qmq.metaserver.actions.runner import Actions
from qmq.metaserver.cluster.liveness import Liveness
from qmq.metaserver.cluster.registry import Registry
from qmq.metaserver.cluster.sightings import AwakeClock
from qmq.metaserver.cluster.snapshot import Snapshots
from qmq.metaserver.cluster.upkeep import Upkeep
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.routes import Console
from qmq.metaserver.console.sessions import ProviderPort, Sessions
from qmq.metaserver.console.survey import Surveyor
from qmq.metaserver.http.app import build_app, polled_routes
from qmq.metaserver.http.guard import Limits
from qmq.metaserver.model import AuditRow, MetaserverRow
from qmq.metaserver.observability.collectors import AuditMetrics, DoctorMetrics, StateMetrics
from qmq.metaserver.observability.metrics import Metrics
from qmq.metaserver.roles.failover import Failovers
from qmq.metaserver.roles.swap import Swaps
from qmq.metaserver.routes.audience import Bounds, Quotas
from qmq.metaserver.routes.hub import RouteHubs
from qmq.metaserver.rpc.access import Refusals, make_acceptor, wall_ms
from qmq.metaserver.rpc.broker_client import Brokers
from qmq.metaserver.rpc.servicer import ConsumerGroups, MetaserverRpc, add_route_methods
from qmq.metaserver.settings import MetaserverSettings
from qmq.metaserver.storage.changes import AddToken, DatabaseUnusable
from qmq.metaserver.storage.database import Database, DatabaseAway, DatabaseSetAside
from qmq.process_main import run_process
from qmq.proto.qmq_pb2_grpc import add_MetaserverServicer_to_server
from qmq.rations import NewSubjects
from qmq.rights import TokenRole
from qmq.settings import shown
from qmq.types import Endpoint
from qmq.version import VERSION

log = logging.getLogger("qmq.metaserver")

STOP_S = 1.0
"""Time for streams and calls to end when the process stops."""
MOVE_S = 0.3
"""Time for which a stopping metaserver still answers, so that nginx detects the stop before the port closes."""
RPC_OPTIONS = [
    *SERVER_OPTIONS,
    NO_PROBE,  # with it, 20,000 confirmations of a change take a quarter more CPU time
]
CLIENTS_MAX = 50_000
"""Connections of the gRPC port, for 20,000 clients."""
BODY_TIMEOUT_MS = 10_000
COLLECT_S = 2.0
SEND_S = 8.0
"""Time limit for the message of Produce, within that of an action."""
RESTORE_BYTES_MAX = 256 << 20


class CannotServe(QmqError):
    """The metaserver cannot start. The text holds the reason and the remedy."""


class Metaserver:
    """One metaserver process: joins the parts, opens the ports, closes them."""

    def __init__(self, settings: MetaserverSettings) -> None:
        self._settings = settings
        self.id = secrets.token_hex(8)
        self._access = Access(
            (settings.cluster_token, settings.cluster_token_before), lambda: self._database.set_aside_because
        )
        self._vault = Vault(settings.password_keys)
        self._metrics = Metrics()
        self._refusals = Refusals(self._metrics)
        self._database = Database(settings.database, timeout_ms=settings.database_timeout_ms)
        self._snapshots = Snapshots(settings.snapshot_path, settings.database)
        clock = AwakeClock()
        self.registry = self._make_registry(clock)
        self._brokers = Brokers(settings.cluster_token, timeout_ms=settings.broker_timeout_ms)
        self._new_subjects = NewSubjects(settings.new_subjects_per_minute, settings.new_subjects_max)
        self.hubs = RouteHubs(
            self.registry,
            self._metrics,
            lambda caller, count: self._new_subjects.allowed(caller, count, now_ms=self.registry.now_ms()),
            Quotas(Bounds(settings.watch_subjects_max, settings.token_subjects_max, settings.token_watches_max)),
        )
        self._metrics.observe(StateMetrics(self.registry, self._database, self.hubs).read)
        context = self._make_context()
        self._actions = Actions(context, self._metrics)
        self._expiry = GroupExpiry(context, self._actions, settings.group_expiry_days)
        self._metrics.observe(self._expiry.read)
        self._surveyor = Surveyor(context, token=settings.cluster_token)
        doctor = DoctorMetrics(lambda: examine_reported(context))
        self._metrics.observe(doctor.read)
        self._nights = Nights(Path(settings.audit_ledger)) if settings.audit_ledger else None
        self._scrapes = [doctor.scrapes]
        if (nights := self._nights) is not None:
            audit = AuditMetrics(lambda: nights.status(now_ms=wall_ms()))
            self._metrics.observe(audit.read)
            self._scrapes.append(audit.scrapes)
        self.grpc_port = 0
        self.http_port = 0

    def _make_registry(self, clock: AwakeClock) -> Registry:
        settings = self._settings
        liveness = Liveness(self.id, timeout_ms=settings.heartbeat_timeout_ms)
        return Registry(
            self._database,
            liveness,
            self._metrics,
            clock,
            self._access.replace,
            groups_min=settings.groups_per_subject_min,
            groups_new=settings.groups_per_subject_new,
        )

    def _make_context(self) -> ActionContext:
        settings = self._settings
        clients = Clients(
            self.hubs,
            lambda: [row for row in self.registry.peers() if row.id != self.id],
            token=settings.cluster_token,
            timeout_ms=settings.broker_timeout_ms,
        )
        swaps = Swaps(self.registry, self._brokers, settings)
        self._failovers = Failovers(self.registry, self._brokers, settings)
        return ActionContext(
            self.registry,
            self._database,
            self._brokers,
            swaps,
            self._failovers,
            clients,
            self._vault,
            Watchdogs(settings.cluster_token),
            bad_rows=lambda: self._database.bad_rows,
            refusals=self.hubs.refusals,
            send=self._send,
            settings=shown(settings),
            version=VERSION,
            own_id=self.id,
        )

    async def _send(self, message: Message) -> Receipt:
        address = f"http://{self._http}"
        token = self._settings.cluster_token
        async with Producer(metaserver=address, token=token, app="console", timeout_s=SEND_S) as producer:
            return await producer.send(message)

    async def serve(self, stop: asyncio.Event, started: asyncio.Event | None = None) -> None:
        """Open both ports, serve until `stop`, close them.

        Raises:
            CannotServe, DatabaseUnusable: the text holds the reason and the remedy.
        """
        await self._learn()
        rpc_server, http = await self._open_ports()
        upkeep = Upkeep(self.registry, self._brokers, self._snapshots, self._row(), poll_ms=self._settings.poll_ms)
        rpc = MetaserverRpc(
            self.registry,
            self.hubs,
            self._access,
            self._metrics,
            upkeep.ask,
            upkeep.hold_lease,
            self._database,
            self._vault,
            ConsumerGroups(self.registry, self._database, self._brokers),
        )
        add_MetaserverServicer_to_server(rpc, rpc_server)
        add_route_methods(rpc, rpc_server)
        await rpc_server.start()
        self.registry.liveness.serve(self.registry.directory.brokers(), now_ms=self.registry.now_ms())
        works = [upkeep.run(), self.hubs.run(), rpc.visits.run(), self._failovers.run(), self._surveyor.run()]
        works += [self._expiry.run()]
        works += [scrapes.run() for scrapes in self._scrapes]
        tasks = [asyncio.create_task(work) for work in works]
        serving = asyncio.create_task(http.run())
        at = Endpoint(self._settings.host, self.http_port)
        log.info("metaserver serving http=%s grpc_port=%d", at, self.grpc_port)
        if started:
            started.set()
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopping, serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._leave(rpc_server, upkeep)
            for task in (*tasks, serving, stopping):
                task.cancel()
            results = await asyncio.gather(*tasks, serving, return_exceptions=True)
            await upkeep.stop()
            self._database.close()
        for failed in (r for r in results if isinstance(r, Exception)):
            raise failed
        log.info("metaserver stopped")

    async def _learn(self) -> None:
        """Read everything from the database, or from the snapshot while the database is away."""
        try:
            await self._database.open()
            before = self._snapshots.read()
            if before is not None:
                self.registry.mirror.expect(before)
            try:
                await self.registry.mirror.catch_up()
            except DatabaseSetAside:
                assert before is not None, "nothing else is held against the database yet"
                self._snapshots.serve(before, self.registry)
                return
            await self._make_first_token()
        except DatabaseAway as error:
            if not self._snapshots.load(self.registry):
                raise CannotServe(
                    f"the database does not answer: {self._database.reason or error}; and there is no snapshot to "
                    "serve from. Start it, or correct the setting `database`: docs/databases.md has its form and the "
                    "user's rights"
                ) from error

    async def _make_first_token(self) -> None:
        """Make the first admin token, if there never was one, and print it: it is shown only here."""
        made = first_admin(self.registry.tokens, random_bytes=secrets.token_bytes, now_ms=wall_ms())
        if made is None:
            return
        row, text = made
        audit = AuditRow("metaserver", "", "AddToken", {"name": row.name, "role": row.role}, result="done")
        try:
            await self.registry.change([AddToken(row)], audit)
        except OperatorError:
            return  # another metaserver was first, and prints its own token
        print(f"first admin token, shown only now: {text}", flush=True)

    async def _open_ports(self) -> tuple[grpc.aio.Server, HttpPort]:
        settings = self._settings
        acceptor = make_acceptor(self._access, self._refusals)
        ports = meta_ports(limit(), CLIENTS_MAX)
        bound = ("grpc.max_allowed_incoming_connections", ports.clients)
        rpc_server = grpc.aio.server(interceptors=[acceptor], options=[*RPC_OPTIONS, bound])
        try:
            host = await bind_address(settings.host)
            self.grpc_port = rpc_server.add_insecure_port(str(Endpoint(host, settings.grpc_port)))
        except (RuntimeError, OSError) as error:
            raise CannotServe(_port_taken(settings.host, settings.grpc_port, "grpc_port")) from error
        try:
            listener = listen(host, settings.http_port)
        except OSError as error:
            raise CannotServe(_port_taken(settings.host, settings.http_port, "http_port")) from error
        self.http_port = listener.getsockname()[1]
        proxies = settings.trusted_proxies
        return rpc_server, HttpPort(self._app(), listener, connections_max=ports.http, trusted_proxies=proxies)

    async def _leave(self, rpc_server: grpc.aio.Server, upkeep: Upkeep) -> None:
        """Send brokers and clients to another metaserver. No broker is marked down.

        Brokers' reports are stored before their streams end: the next metaserver starts from them.
        """
        await upkeep.store()
        self.registry.stop()
        await asyncio.gather(rpc_server.stop(STOP_S), asyncio.sleep(MOVE_S))

    def _row(self) -> MetaserverRow:
        return MetaserverRow(self.id, str(self._http), str(self._grpc), 0, VERSION)

    @property
    def _http(self) -> Endpoint:
        """Return the address that others connect to."""
        return Endpoint(self._settings.advertised, self._settings.advertised_http_port or self.http_port)

    @property
    def _grpc(self) -> Endpoint:
        return Endpoint(self._settings.advertised, self._settings.advertised_grpc_port or self.grpc_port)

    @property
    def is_hanging(self) -> bool:
        """Return whether calls to the database have not returned."""
        return self._database.is_hanging

    def _app(self) -> ASGIApp:
        settings = self._settings
        limits = Limits(settings.request_bytes_max, RESTORE_BYTES_MAX, BODY_TIMEOUT_MS)
        keys = (settings.cluster_token, settings.cluster_token_before)
        console = Console(
            self._actions,
            Sessions(self._access, keys, secrets.token_bytes),
            self._refusals,
            open_lists=settings.open_lists,
            database_trouble=lambda: self._database.trouble,
            nights=self._nights,
            provider=make_provider(settings),
            surveyor=self._surveyor,
        )
        return build_app(
            self._actions,
            self._access,
            self._metrics,
            self._refusals,
            address=str(self._grpc),
            database_trouble=lambda: self._database.trouble,
            is_stopping=lambda: self.registry.is_stopping,
            limits=limits,
            open_lists=settings.open_lists,
            more=[*polled_routes(self.hubs), *console.routes()],
        )


def make_provider(settings: MetaserverSettings) -> ProviderPort | None:
    """Return the OpenID provider of the settings. Raises CannotServe: the extra with its library is not installed."""
    if not settings.oidc_issuer:
        return None
    try:
        from qmq.metaserver.console.oidc import Provider, ProviderSettings
    except ImportError as error:
        raise CannotServe(f"oidc_issuer is set, which needs qmq[console-oidc]: {error}") from error
    pairs = (text.partition("=") for text in settings.oidc_roles)
    return Provider(
        ProviderSettings(
            settings.oidc_issuer,
            settings.oidc_client_id,
            settings.oidc_client_secret,
            settings.oidc_redirect,
            tuple((TokenRole(role), value) for role, _, value in pairs),
            settings.oidc_roles_claim,
            settings.oidc_name_claim,
        )
    )


def _port_taken(host: str, port: int, name: str) -> str:
    return (
        f"cannot listen on {Endpoint(host, port)}: another program uses the port, or the address is not this "
        f"machine's; stop that program, or set host or {name}"
    )


async def serve(settings: MetaserverSettings, stop: asyncio.Event) -> bool:
    """Serve until `stop`; return whether calls to the database still hang. Raises CannotServe."""
    report(meta_ports(limit(), CLIENTS_MAX), CLIENTS_MAX)
    collecting = asyncio.create_task(collect_by_the_clock(COLLECT_S))
    try:
        metaserver = Metaserver(settings)
        await metaserver.serve(stop)
    except (RuntimeError, DatabaseUnusable) as error:
        raise CannotServe(str(error)) from error
    finally:
        collecting.cancel()
    return metaserver.is_hanging


def main(arguments: list[str] | None = None) -> int:
    """Run a metaserver; return the exit status of `run_process`."""
    description = "qmq's metaserver: groups, routes, roles."
    return run_process("metaserver", description, MetaserverSettings, "QMQ_METASERVER", serve, arguments)
