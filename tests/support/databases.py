"""Shell. Real MariaDB and PostgreSQL servers for tests, from the programs that Debian's packages install.

A server lives in a directory of its own below the temporary directory, on a free loopback port, and belongs to a test
session. Its processes end with it, also when the test session is killed. Tests that ask for `database_url` or
`migrated_url` run once for each kind of database, each time with an empty one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from qmq.deploy.processes import suspend
from qmq.metaserver.storage.engine import connect, open_database
from qmq.metaserver.storage.tables import metadata
from qmq.sql_drivers import Tls
from qmq.watchdog.settings import Source
from tests.support.certificates import Certificates, make_certificates
from tests.support.ports import kept_port

START_S = 60
"""Usually a second or two; longer on a busy machine."""

PACKAGES = "mariadb-server postgresql pgbouncer"
KINDS = ("sqlite", "mariadb", "postgresql")

Server = TypeVar("Server", bound="DatabaseServer")


class DatabaseServer:
    """One server. `start` and `stop` may be repeated; data stay until `remove`."""

    drivername = ""
    user = "root"
    stop_signal = signal.SIGTERM
    kill_signal = signal.SIGKILL
    _force = ""

    def __init__(self) -> None:
        # Short, as Unix socket paths have at most 107 bytes; readable for the server's account.
        self.directory = Path(tempfile.mkdtemp(prefix="qmq-db-"))
        self.directory.chmod(0o755)
        self.data = self.directory / "data"
        self.port = kept_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = count(1)
        self._migrated: tuple[str, dict[str, list[dict[str, Any]]]] | None = None
        self._initialize()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def url(self, database: str) -> str:
        parts = URL.create(self.drivername, self.user, host="127.0.0.1", port=self.port, database=database)
        return parts.render_as_string(hide_password=False)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        with open(self.directory / "server.log", "ab") as output:
            self._process = subprocess.Popen(
                [*self._as_user("--pdeathsig", self.stop_signal.name[3:]), *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # its own group, so that `paused` stops all its processes
                cwd=self.directory,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{type(self).__name__} did not start:\n{self._log()}")
            time.sleep(0.05)

    def ensure(self) -> None:
        """Start the server if a failed test left it stopped."""
        if self._process is None or self._process.poll() is not None:
            self.start()

    def stop(self) -> None:
        """Stop the server in order, if it runs."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """Kill the server."""
        self._end(self.kill_signal)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the server: its connections stay open without answers."""
        pids = [self.pid]
        try:
            suspend(self.pid)
            pids += _children(self.pid)  # suspended, it starts and reaps no more children
            for pid in pids[1:]:
                suspend(pid)
            yield
        finally:
            for pid in pids:
                _signal(pid, signal.SIGCONT)

    def create_database(self) -> str:
        """Make an empty database; return its URL."""
        self.ensure()
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    @contextmanager
    def migrated_database(self) -> Iterator[str]:
        """URL of a database with empty tables of the newest version; reused, as making tables takes seconds."""
        self.ensure()
        if self._migrated is None:
            url = self.create_database()
            engine = open_database(url)
            with engine.connect() as connection:
                rows = {
                    table.name: [dict(row) for row in connection.execute(table.select()).mappings()]
                    for table in metadata.sorted_tables
                }
            engine.dispose()
            self._migrated = url, rows
        url, rows = self._migrated
        yield url
        self.ensure()
        engine = create_engine(url)
        with engine.begin() as connection:
            for table in reversed(metadata.sorted_tables):
                connection.execute(table.delete())
            for table in metadata.sorted_tables:
                if rows[table.name]:
                    connection.execute(table.insert(), rows[table.name])
        engine.dispose()

    def drop_database(self, url: str) -> None:
        self.ensure()
        self.execute(f"DROP DATABASE IF EXISTS {make_url(url).database}{self._force}")

    def execute(self, statement: str) -> None:
        """Run one statement as the server's administrator."""
        engine = connect(self.url(self._home()))
        try:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            _signal(self._process.pid, how)
            self._process.wait(START_S)
            self._process = None

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
        except DBAPIError:
            return False
        return True

    def _log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")[-3000:]

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=self.directory)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")

    def _as_user(self, *options: str) -> list[str]:
        """Return a command prefix that drops root."""
        return ["setpriv", *options]

    def _home(self) -> str:
        raise NotImplementedError

    def _initialize(self) -> None:
        raise NotImplementedError

    def _command(self) -> list[str]:
        raise NotImplementedError


class MariadbServer(DatabaseServer):
    """MariaDB; its default collation equates `Foo` and `foo`, as on most machines."""

    drivername = "mariadb+pymysql"

    def _home(self) -> str:
        return "mysql"

    def _initialize(self) -> None:
        options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self._run([_program("mariadb-install-db"), "--no-defaults", *self._directories(), *options, *_root()])

    def _command(self) -> list[str]:
        return [
            _program("mariadbd"),
            "--no-defaults",
            *self._directories(),
            f"--port={self.port}",
            f"--socket={self.directory}/socket",
            f"--pid-file={self.directory}/pid",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--collation-server=utf8mb4_general_ci",
            "--innodb-buffer-pool-size=64M",
            "--innodb-flush-log-at-trx-commit=2",  # these tests kill processes, not machines
            "--performance-schema=OFF",
            "--lock-wait-timeout=300",  # a forgotten table lock becomes an error instead of an endless wait
            *_root(),
        ]

    def _directories(self) -> list[str]:
        """Return options for directories; a starting server removes all temporary tables in a shared `tmpdir`."""
        return [f"--datadir={self.data}", f"--tmpdir={self.directory}"]


class PostgresqlServer(DatabaseServer):
    """PostgreSQL. It refuses to run as root, so root runs it under the account of its package."""

    drivername = "postgresql+psycopg"
    user = "postgres"
    stop_signal = signal.SIGINT  # does not wait for clients to leave
    kill_signal = signal.SIGQUIT  # its child processes end as well, without writing
    _force = " WITH (FORCE)"
    """A process notices its cut connection only when it runs again."""

    def _home(self) -> str:
        return "postgres"

    def _initialize(self) -> None:
        self.data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres", "postgres")
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"]
        program = _program("initdb", "/usr/lib/postgresql/*/bin")
        self._run([*self._as_user(), program, f"--username={self.user}", *options, str(self.data)])

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "fsync": "off",  # these tests kill processes, not machines
            "shared_buffers": "32MB",
            "max_connections": "100",
        }
        command = [_program("postgres", "/usr/lib/postgresql/*/bin"), "-D", str(self.data)]
        return command + [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

    def _as_user(self, *options: str) -> list[str]:
        if os.geteuid() != 0:
            return ["setpriv", *options]
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *options]


class PgBouncer(PostgresqlServer):
    """A pool before a PostgreSQL server: each transaction of a connection may be another server process's.

    It rejects unknown startup parameters, `options` among them, as by default.
    """

    def __init__(self, server: PostgresqlServer) -> None:
        self._server = server
        super().__init__()

    def _initialize(self) -> None:
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": self.directory / "users",
            "pool_mode": "transaction",
            "default_pool_size": 3,
        }
        (self.directory / "users").write_text(f'"{self.user}" ""\n')
        lines = [f"[databases]\n* = host=127.0.0.1 port={self._server.port}", "[pgbouncer]"]
        (self.directory / "ini").write_text(
            "\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items())])
        )

    def _command(self) -> list[str]:
        return [_program("pgbouncer"), str(self.directory / "ini")]


class _WithTls(DatabaseServer):
    """Server that accepts only clients with a certificate of its authority, over TLS."""

    certificates: Certificates

    def _initialize(self) -> None:
        super()._initialize()
        self.certificates = make_certificates(self.directory, client=self.user)

    @property
    def tls(self) -> Tls:
        """Settings for its clients."""
        found = self.certificates
        return Tls("verify-full", str(found.ca), str(found.client), str(found.client_key))

    def url(self, database: str) -> str:
        return f"{super().url(database)}?{self.tls.query()}"


class TlsMariadbServer(_WithTls, MariadbServer):
    def start(self) -> None:
        super().start()
        self.execute("ALTER USER CURRENT_USER() REQUIRE X509")

    def _command(self) -> list[str]:
        found = self.certificates
        files = [f"--ssl-ca={found.ca}", f"--ssl-cert={found.server}", f"--ssl-key={found.server_key}"]
        return [*super()._command(), *files, "--require-secure-transport=ON"]


class TlsPostgresqlServer(_WithTls, PostgresqlServer):
    def _initialize(self) -> None:
        super()._initialize()
        (self.data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 cert\n")
        if os.geteuid() == 0:
            shutil.chown(self.certificates.server_key, "postgres")

    def _command(self) -> list[str]:
        found = self.certificates
        files = {"ssl_ca_file": found.ca, "ssl_cert_file": found.server, "ssl_key_file": found.server_key}
        options = [word for name, value in files.items() for word in ("-c", f"{name}={value}")]
        return [*super()._command(), "-c", "ssl=on", *options]


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariadbServer]:
    """A running MariaDB server; tests restart it after they stop it."""
    with running(MariadbServer()) as server:
        yield server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A running PostgreSQL server; tests restart it after they stop it."""
    with running(PostgresqlServer()) as server:
        yield server


@pytest.fixture(scope="module")
def pgbouncer(postgresql: PostgresqlServer) -> Iterator[PgBouncer]:
    """A running PgBouncer before the PostgreSQL server."""
    postgresql.ensure()
    with running(PgBouncer(postgresql)) as pool:
        yield pool


@pytest.fixture(scope="module", params=(TlsMariadbServer, TlsPostgresqlServer), ids=("mariadb", "postgresql"))
def tls_server(request: pytest.FixtureRequest) -> Iterator[_WithTls]:
    """A running server of each kind that requires TLS and a client's certificate."""
    with running(request.param()) as server:
        yield server


@pytest.fixture(params=("mariadb", "postgresql"))
def database_server(request: pytest.FixtureRequest) -> DatabaseServer:
    """Each kind of server, for tests of outages."""
    server: DatabaseServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database, of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'metaserver.db'}"
        return
    server: DatabaseServer = request.getfixturevalue(request.param)
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture(params=KINDS)
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with empty tables, of each kind, for tests that change only rows."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'metaserver.db'}"
        return
    server: DatabaseServer = request.getfixturevalue(request.param)
    with server.migrated_database() as url:
        yield url


def source_of(url: str, **options: Any) -> Source:
    """Return the source of a SQLAlchemy URL, for AddDb and the watchdog."""
    parsed = make_url(url)
    kind = parsed.get_backend_name().replace("mysql", "mariadb")
    server = f"{parsed.host or 'localhost'}:{parsed.port}" if kind != "sqlite" else ""
    name = f"{kind}://{server}/{parsed.database}"
    return Source(name, parsed.username or "", parsed.password or "", tls=Tls.of(parsed.query), **options)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start a server; remove it in the end."""
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _program(name: str, directories: str = "/usr/sbin") -> str:
    """Return the path of a program: on the search path, or the newest version in Debian's directories."""
    places = [str(place) for place in Path("/").glob(f"{directories.strip('/')}/{name}")]
    found = shutil.which(name) or max(places, key=lambda place: (len(place), place), default=None)
    if found is None:
        raise RuntimeError(f"there is no program {name}; tests need Debian's packages: apt-get install {PACKAGES}")
    return found


def _root() -> list[str]:
    return ["--user=root"] if os.geteuid() == 0 else []


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signal(pid: int, which: signal.Signals) -> None:
    try:
        os.kill(pid, which)
    except ProcessLookupError:
        pass  # ended already
