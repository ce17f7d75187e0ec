"""Shell. `make bench-outbox`: a million rows stuck in an outbox on MariaDB, and a running application.

The application (`benchmarks.outbox_application`) is measured alone with all rows in the table, then while a watchdog
drains them to a cluster of one group. Last it runs beside two processes that only compute, with the drain's share of a
core: the drain is two processes as well, the watchdog and the database. That run shows the machine's part in the
difference: where database, brokers, watchdog and application share two cores, any computing process moves the
application's p99.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, create_engine, text

from benchmarks.figures import cpu_seconds, free_port, percentile
from benchmarks.outbox_application import TABLE, content
from benchmarks.worker import Worker
from qmq.control_plane import DIRECT
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import write_atomically
from qmq.deploy.processes import Service, module_command
from qmq.outbox.schema import create_statements

GOALS = {"rows_per_s": 5_000, "p99_ratio": 1.2}
USER, PASSWORD = "guest", "secret"
KEY = "nBLTTCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A="
START_S = 60.0
PORTS = 24_700
ROWS_AT_ONCE = 2_000
WARM_S = 2.0
COMPUTING = 2
"""Computing processes compared with the drain."""
SLICE_S = 0.5
"""Time of the application between two readings of the watchdog; the slice with the last row does not count."""


class Database(NamedTuple):
    """A running server."""

    engine: Engine
    pid: int


@contextmanager
def mariadb(buffer_mib: int) -> Iterator[Database]:
    """Run a server of our own, with an empty database `shop`, and the default durability."""
    directory = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
    directory.chmod(0o755)
    root = ["--user=root"] if os.geteuid() == 0 else []
    # A starting server removes all temporary tables in `tmpdir`, also those of another server.
    directories = [f"--datadir={directory}/data", f"--tmpdir={directory}"]
    install = ["mariadb-install-db", "--no-defaults", *directories, "--skip-test-db"]
    method = "--auth-root-authentication-method=normal"
    subprocess.run([*install, method, *root], check=True, stdout=subprocess.DEVNULL)
    port = free_port()
    server = subprocess.Popen(
        [
            shutil.which("mariadbd") or "/usr/sbin/mariadbd",
            "--no-defaults",
            *directories,
            f"--port={port}",
            f"--socket={directory}/socket",
            f"--pid-file={directory}/pid",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            f"--innodb-buffer-pool-size={buffer_mib}M",
            "--innodb-log-file-size=256M",
            *root,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _prepare(port)
        url = f"mariadb+pymysql://{USER}:{PASSWORD}@127.0.0.1:{port}/shop"
        yield Database(create_engine(url, pool_size=4), server.pid)
    finally:
        server.terminate()
        server.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


def _prepare(port: int) -> None:
    engine = create_engine(f"mariadb+pymysql://root@127.0.0.1:{port}/mysql", isolation_level="AUTOCOMMIT")
    deadline = time.monotonic() + START_S
    while True:
        try:
            with engine.connect() as connection:
                for statement in (
                    "CREATE DATABASE shop",
                    f"CREATE USER '{USER}'@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'",
                    f"GRANT ALL ON shop.* TO '{USER}'@'127.0.0.1'",
                ):
                    connection.execute(text(statement))
            engine.dispose()
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def fill(engine: Engine, rows: int) -> None:
    """Write rows that are ten minutes old."""
    with engine.begin() as connection:
        for statement in create_statements("mariadb", TABLE):
            connection.execute(text(statement))
        connection.execute(text("CREATE TABLE orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, state VARCHAR(20))"))
    old = "NOW() - INTERVAL 10 MINUTE"
    for first in range(0, rows, ROWS_AT_ONCE):
        contents = [content(f"stuck-{number}") for number in range(first, min(first + ROWS_AT_ONCE, rows))]
        values = ", ".join(f"(%s, {old}, {old})" for _ in contents)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"INSERT INTO {TABLE} (content, create_time, update_time) VALUES {values}", tuple(contents)
            )
    with engine.connect() as connection:
        connection.execute(text(f"ANALYZE TABLE {TABLE}"))


class Watchdog:
    """A watchdog process. `sent` comes from its metrics."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._port = free_port()
        self._token = cluster.token
        config = directory / "watchdog.toml"
        config.write_text(
            f'metaserver = "{cluster.metaserver}"\ntoken = "{cluster.token}"\nhttp_port = {self._port}\n'
            "refresh_ms = 200\nstats_ms = 600000\n"
        )
        self.service = Service("watchdog", module_command("qmq.watchdog", config), directory / "watchdog.log")
        self.service.start()

    def stop(self) -> None:
        self.service.signal(signal.SIGTERM)

    def sent(self) -> int:
        headers = {"X-Api-Token": self._token}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/metrics", headers=headers)
        try:
            with DIRECT.open(request, timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("qmq_watchdog_sent_total{"))


class Trial:
    """One drain; the application before it, beside it, and beside computing processes."""

    def __init__(self, cluster: Cluster, directory: Path, database: Database, per_s: int, stack: ExitStack) -> None:
        self._cluster = cluster
        self._directory = directory
        self._database = database
        self._per_s = per_s
        url = database.engine.url.render_as_string(hide_password=False)
        self._application, *self._computing = (
            stack.enter_context(Worker("benchmarks.outbox_application", directory / "application.log", url))
            for _ in range(1 + COMPUTING)
        )
        self._transact(WARM_S)

    def _transact(self, seconds: float) -> list[float]:
        answer = self._application.run("transact", per_s=self._per_s, seconds=seconds)
        return [float(took_ms) for took_ms in answer["took_ms"]]

    def alone_ms(self, seconds: float) -> float:
        return _p99(self._transact(seconds))

    def computing_ms(self, share: float, seconds: float) -> float:
        """Measure the application beside processes that compute with this total share."""
        for process in self._computing:
            process.begin("compute", share=share / COMPUTING, seconds=seconds)
        took_ms = self._transact(seconds)
        for process in self._computing:
            process.end()
        return _p99(took_ms)

    def drain(self, rows: int, rate: int) -> dict[str, Any]:
        """Let a watchdog send all rows; rows sent before the clock runs do not count."""
        watchdog = Watchdog(self._cluster, self._directory)
        while not watchdog.sent():
            time.sleep(0.05)
        began, before, spent = time.monotonic(), watchdog.sent(), self._used_s(watchdog)
        took_ms: list[float] = []
        while (sent := watchdog.sent()) < rows:
            slice_ms = self._transact(SLICE_S)
            if sent + rate * SLICE_S < rows:
                took_ms += slice_ms
        seconds = time.monotonic() - began
        spent = {name: used - spent[name] for name, used in self._used_s(watchdog).items()}
        watchdog.stop()
        time.sleep(1)
        return {
            "seconds": round(seconds, 1),
            "rows_per_s": round((sent - before) / seconds),
            "cpu_us_per_row": {name: round(used / (sent - before) * 1e6, 1) for name, used in spent.items()},
            "share_of_a_core": round(min(sum(spent.values()) / seconds, 1.0), 2),
            "p99_drain_ms": _p99(took_ms),
        }

    def _used_s(self, watchdog: Watchdog) -> dict[str, float]:
        """Return the CPU time of each part so far."""
        brokers = [self._cluster.service(plan.hostname).pid for plan in self._cluster.plan.brokers]
        return {
            "database": _cpu_s([self._database.pid]),
            "watchdog": _cpu_s([watchdog.service.pid]),
            "brokers": _cpu_s(brokers),
        }


def _cpu_s(pids: Sequence[int | None]) -> float:
    return sum((cpu_seconds(pid) for pid in pids if pid), 0.0)


def _p99(took_ms: list[float]) -> float:
    return round(percentile(sorted(took_ms), 0.99), 2)


def measure(rows: int, *, alone_s: float, per_s: int, rate: int) -> dict[str, Any]:
    """Fill, measure the application alone, drain, compare."""
    run_dir = Path(tempfile.mkdtemp(prefix="qmq-bench-outbox-"))
    # The table fits into the database's memory, as active tables do.
    with (
        mariadb(buffer_mib=1_024) as database,
        Cluster(
            run_dir, groups=("g1",), metaserver={"password_keys": [KEY]}, http_port=PORTS, broker_port=PORTS + 2
        ) as cluster,
        ExitStack() as stack,
    ):
        fill(database.engine, rows)
        cluster.manage(
            "AddDb",
            type="mariadb",
            host="127.0.0.1",
            port=database.engine.url.port,
            username=USER,
            password=PASSWORD,
            database="shop",
            rate=rate,
        )
        trial = Trial(cluster, run_dir, database, per_s, stack)
        alone_ms = trial.alone_ms(alone_s)
        found = trial.drain(rows, rate)
        computing_ms = trial.computing_ms(found["share_of_a_core"], alone_s)
        with database.engine.connect() as connection:
            left = int(connection.execute(text(f"SELECT COUNT(*) FROM {TABLE}")).scalar_one())
    shutil.rmtree(run_dir, ignore_errors=True)
    drain_ms = found["p99_drain_ms"]
    return {
        "rows": rows,
        "left": left,
        "rate": rate,
        "transactions_per_s": per_s,
        **found,
        "p99_alone_ms": alone_ms,
        "p99_ratio": round(drain_ms / alone_ms, 2),
        "p99_computing_ms": computing_ms,
        "p99_drain_over_computing": round(drain_ms / computing_ms, 2),
        "load": os.getloadavg()[0],
        "goals": GOALS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outbox", description="Drains an outbox on MariaDB.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--alone", type=float, default=60.0, help="seconds that the application is alone")
    parser.add_argument("--per-s", type=int, default=20, help="transactions a second of the application")
    parser.add_argument("--rate", type=int, default=6_000, help="rows a second that the watchdog may send")
    parser.add_argument("--out", type=Path, default=Path(".run/bench-outbox.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    found = measure(options.rows, alone_s=options.alone, per_s=options.per_s, rate=options.rate)
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(found, indent=1))
    return 0 if found["left"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
