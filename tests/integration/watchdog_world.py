"""Shell. Watchdog processes, and applications' databases with an outbox."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import OperationalError

import qmq
from qmq.deploy import control
from qmq.deploy.processes import suspend
from qmq.outbox.row import encode_row
from qmq.outbox.schema import create_statements
from qmq.watchdog.database import READING, open_source
from tests.integration.cluster_world import WAIT_S, until
from tests.support.databases import source_of
from tests.support.http import ask
from tests.support.ports import free_ports

KEY = "nBLTTCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A="
TABLE = "qmq_msg_queue"
ROOT = Path(__file__).parents[2]
QUICK = {"lease_ms": 6000, "beat_ms": 200, "refresh_ms": 300, "scan_ms": 100, "stats_ms": 300}


def _password(source):
    """Return the password for AddDb, which requires one for each server; the PostgreSQL server accepts any."""
    return source.password or ("" if source.kind == "sqlite" else "none")


def register(cluster, source, **more):
    scheme, _, rest = source.url.partition("://")
    place, _, database = rest.partition("/")
    host, _, port = place.partition(":")
    words = {"type": scheme, "host": host, "port": port, "username": source.user, "database": database}
    cluster.manage("AddDb", **words, password=_password(source), table=source.table, age=0, **more)
    return words


class Application:
    """An application's database with an outbox, and a table of business rows beside it."""

    def __init__(self, url, table=TABLE):
        self.source = source_of(url, table=table, age_ms=0)
        if self.source.kind == "sqlite":
            Path(self.source.place[2]).touch()
        self.engine, self.table = open_source(self.source), table
        with self.engine.begin() as connection:
            if self.source.kind == "mariadb":  # root has no password, and AddDb requires one
                connection.execute(text("CREATE USER IF NOT EXISTS 'guest'@'127.0.0.1' IDENTIFIED BY 'secret'"))
                connection.execute(text("GRANT ALL ON *.* TO 'guest'@'127.0.0.1'"))
                self.source = replace(self.source, user="guest", password="secret")
            for statement in create_statements(self.engine.dialect.name, table):
                connection.execute(text(statement))

    def close(self):
        self.engine.dispose()

    def write(self, subject, names, **options):
        """Commit messages as a crashed application leaves them behind."""
        with self.engine.begin() as connection:
            self.write_to(connection, subject, names, **options)

    def write_to(self, connection, subject, names, **options):
        """Write messages in the connection's transaction."""
        rows = [encode_row(qmq.Message(subject, {"n": name}, id=name, **options), 1) for name in names]
        self._insert(connection, rows)

    def write_rows(self, contents):
        with self.engine.begin() as connection:
            self._insert(connection, contents)

    def _insert(self, connection, contents):
        statement = text(
            f"INSERT INTO {self.table} (content, status, error, create_time, update_time)"
            " VALUES (:content, 0, 0, CURRENT_TIMESTAMP, CURRENT_TIMESTAMP)"
        )
        connection.execute(statement, [{"content": content} for content in contents])

    def rows(self, where="1 = 1"):
        statement = f"SELECT id, content, status, error, reason, claim FROM {self.table} WHERE {where} ORDER BY id"
        with self._reading() as connection:
            return connection.execute(text(statement)).all()

    def count(self, where="status = 0"):
        with self._reading() as connection:
            return connection.execute(text(f"SELECT COUNT(*) FROM {self.table} WHERE {where}")).scalar_one()

    def _reading(self):
        """Begin a transaction that waits for no writer, such as a watchdog on SQLite."""
        return self.engine.execution_options(**{READING: True}).begin()

    def is_locked(self):
        """Return whether another connection has locked the whole database; only SQLite locks it."""
        try:
            with self.engine.begin() as connection:
                if self.source.kind == "sqlite":
                    connection.execute(text("CREATE TABLE IF NOT EXISTS written (number INTEGER)"))
                    connection.execute(text("INSERT INTO written VALUES (1)"))
        except OperationalError:
            return True
        return False


class HttpProcess:
    """Process beside a cluster, with an HTTP port, settings and a log in a directory. It answers when it is entered.

    `program`: arguments of `python -m`; `probe`: path that is answered, with any status, once the process serves.
    """

    program, probe = (), ""

    def __init__(self, cluster, directory, name, **settings):
        directory.mkdir(parents=True, exist_ok=True)
        [self.port] = free_ports(1)
        self.url, self.token, self.name = f"http://127.0.0.1:{self.port}", cluster.token, name
        words = {"metaserver": cluster.metaserver, "http_port": self.port, **settings}
        config, self.log = directory / f"{name}.toml", directory / f"{name}.log"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in words.items()))
        command = [sys.executable, "-m", *self.program, "--config", str(config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def __enter__(self):
        until(lambda: ask(self.url + self.probe) or self.process.poll() is not None, f"{self.name} answers")
        assert self.process.poll() is None, self.log.read_text()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()


class WatchdogProcess(HttpProcess):
    """Watchdog process with short intervals, unless other settings are given."""

    program, probe = ("qmq.watchdog",), "/health"

    def __init__(self, cluster, directory, name="w1", **settings):
        super().__init__(cluster, directory, name, token=cluster.token, **QUICK | settings)

    def pause(self, application):
        """Suspend the process, but not while it locks its database."""
        suspend(self.process.pid)
        while application.is_locked():
            self.process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            suspend(self.process.pid)

    def health(self):
        answer = ask(f"{self.url}/health")
        return answer and answer.json()

    @property
    def is_leader(self):
        health = self.health()
        return bool(health and health["leader"])

    def metrics(self):
        return control.metrics(self.url, self.token)

    def ask(self, path):
        return ask(f"{self.url}{path}", token=self.token).json()
