"""Shell. `make bench-outbox`: a million rows that are stuck in an outbox on MariaDB, and an application that goes on.

The application does a transaction at fixed times: it writes an order and a message's row, and deletes the row a little
later, as a producer that was told "stored". Its latency is measured from the moment at which a transaction was due,
first alone, with all rows lying there, then while a watchdog drains them to a cluster of one group.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text

from benchmarks.machine import cpu_seconds
from deploy.cluster import Cluster
from deploy.plan import write_atomically
from deploy.processes import Service
from qmq.control_plane import DIRECT
from qmq.message import Message, Value
from qmq.outbox.row import encode_row
from qmq.outbox.schema import create_statements

GOALS = {"rows_per_s": 5_000, "p99_ratio": 1.2}
SUBJECT = "order.paid"
TABLE = "qmq_msg_queue"
USER, PASSWORD = "guest", "secret"
KEY = "nBLTTCpvJX7S7PbZ1o0DqLuE4pQ3yJ7rZ0w3cJ3jX1A="
START_S = 60.0
PORTS = 24_700
ROWS_AT_ONCE = 2_000


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def mariadb(buffer_mib: int) -> Iterator[tuple[Engine, int]]:
    """Run a server of our own, with an empty database `shop`; durable as it is by default. Gives its pid, too."""
    directory = Path(tempfile.mkdtemp(prefix="qmq-bench-"))
    directory.chmod(0o755)
    root = ["--user=root"] if os.geteuid() == 0 else []
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={directory}/data", "--skip-test-db"]
    method = "--auth-root-authentication-method=normal"
    subprocess.run([*install, method, *root], check=True, stdout=subprocess.DEVNULL)
    port = _free_port()
    server = subprocess.Popen(
        [
            shutil.which("mariadbd") or "/usr/sbin/mariadbd", "--no-defaults", f"--datadir={directory}/data",
            f"--port={port}", f"--socket={directory}/socket", f"--pid-file={directory}/pid", "--bind-address=127.0.0.1",
            "--skip-name-resolve", "--character-set-server=utf8mb4", f"--innodb-buffer-pool-size={buffer_mib}M",
            "--innodb-log-file-size=256M", *root,
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        _prepare(port)
        yield create_engine(f"mariadb+pymysql://{USER}:{PASSWORD}@127.0.0.1:{port}/shop", pool_size=4), server.pid
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
        contents = [_content(f"stuck-{number}") for number in range(first, min(first + ROWS_AT_ONCE, rows))]
        values = ", ".join(f"(%s, {old}, {old})" for _ in contents)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"INSERT INTO {TABLE} (content, create_time, update_time) VALUES {values}", tuple(contents)
            )
    with engine.connect() as connection:
        connection.execute(text(f"ANALYZE TABLE {TABLE}"))


def _content(name: str) -> str:
    properties: dict[str, Value] = {"orderNo": 4_711, "state": "paid", "text": "x" * 100}
    return encode_row(Message(SUBJECT, properties, id=name), 1_700_000_000_000)


class Application(threading.Thread):
    """Does a transaction at each time that is due; those that come late count with their waiting."""

    def __init__(self, engine: Engine, per_s: int) -> None:
        super().__init__(daemon=True)
        self._engine, self._per_s = engine, per_s
        self.latencies_ms: list[tuple[float, float]] = []
        """(when it was due, how long it took)"""
        self._is_over = threading.Event()

    def run(self) -> None:
        due, written = time.monotonic(), 0
        with self._engine.connect() as connection:
            while not self._is_over.is_set():
                due += 1 / self._per_s
                time.sleep(max(0.0, due - time.monotonic()))
                with connection.begin():
                    connection.exec_driver_sql("INSERT INTO orders (state) VALUES ('paid')")
                    row = connection.exec_driver_sql(
                        f"INSERT INTO {TABLE} (content, create_time) VALUES (%s, NOW()) RETURNING id",
                        (_content(f"sent-{written}"),),
                    )
                    id = row.scalar_one()
                with connection.begin():
                    connection.exec_driver_sql(f"DELETE FROM {TABLE} WHERE id = {id}")
                written += 1
                self.latencies_ms.append((due, (time.monotonic() - due) * 1000))

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def p99_ms(self, begin: float, end: float) -> float:
        """99 of 100 transactions that were due in this time took no longer."""
        taken = sorted(took for due, took in self.latencies_ms if begin <= due < end)
        return taken[int(len(taken) * 0.99)] if taken else float("nan")


class Watchdog:
    """A watchdog process. `sent` is what its metrics say."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._port, self._token = _free_port(), cluster.token
        config = directory / "watchdog.toml"
        config.write_text(
            f'metaserver = "{cluster.metaserver}"\ntoken = "{cluster.token}"\nhttp_port = {self._port}\n'
            "refresh_ms = 200\nstats_ms = 600000\n"
        )
        self.service = Service("watchdog", "watchdog", config, directory / "watchdog.log")
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


def measure(rows: int, *, alone_s: float, per_s: int, rate: int) -> dict[str, Any]:
    """Fill, listen to the application alone, drain, compare."""
    run_dir = Path(tempfile.mkdtemp(prefix="qmq-bench-outbox-"))
    # The table fits into the memory of the database, as tables that are worked on do.
    with (
        mariadb(buffer_mib=1_024) as (engine, database),
        Cluster(run_dir, groups=("g1",), metaserver={"password_keys": [KEY]}, http_port=PORTS, broker_port=PORTS + 2)
        as cluster,
    ):  # fmt: skip
        fill(engine, rows)
        port = engine.url.port
        cluster.manage(
            "AddDb", type="mariadb", host="127.0.0.1", port=port, username=USER, password=PASSWORD, database="shop",
            rate=rate,
        )  # fmt: skip
        application = Application(engine, per_s)
        application.start()
        time.sleep(2)
        alone = time.monotonic()
        time.sleep(alone_s)
        watchdog = Watchdog(cluster, run_dir)
        while not watchdog.sent():
            time.sleep(0.05)
        began = time.monotonic()
        pids = {"database": [database], "watchdog": [watchdog.service.pid or 0]}
        pids["brokers"] = [cluster.service(plan.hostname).pid or 0 for plan in cluster.plan.brokers]
        spent = {name: sum(map(cpu_seconds, some)) for name, some in pids.items()}
        before = watchdog.sent()
        while (sent := watchdog.sent()) < rows:
            time.sleep(0.25)
        ended = time.monotonic()
        cpu_us = {
            name: round((sum(map(cpu_seconds, some)) - spent[name]) / (sent - before) * 1e6, 1)
            for name, some in pids.items()
        }
        application.stop()
        watchdog.stop()
        time.sleep(1)
        with engine.connect() as connection:
            left = int(connection.execute(text(f"SELECT COUNT(*) FROM {TABLE}")).scalar_one())
    shutil.rmtree(run_dir, ignore_errors=True)
    p99_alone, p99_drain = application.p99_ms(alone, alone + alone_s), application.p99_ms(began, ended)
    return {
        "rows": rows, "left": left, "seconds": round(ended - began, 1),
        "rows_per_s": round((sent - before) / (ended - began)), "transactions_per_s": per_s, "rate": rate,
        "p99_alone_ms": round(p99_alone, 2), "p99_drain_ms": round(p99_drain, 2),
        "p99_ratio": round(p99_drain / p99_alone, 2), "cpu_us_per_row": cpu_us, "load": os.getloadavg()[0],
        "goals": GOALS,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outbox", description="Drains an outbox on MariaDB.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--alone", type=float, default=30.0, help="seconds that the application is alone")
    parser.add_argument("--per-s", type=int, default=20, help="transactions a second of the application")
    parser.add_argument("--rate", type=int, default=6_000, help="rows a second that the watchdog may send")
    parser.add_argument("--out", type=Path, default=Path(".run/bench-outbox.json"))
    options = parser.parse_args()
    found = measure(options.rows, alone_s=options.alone, per_s=options.per_s, rate=options.rate)
    print(json.dumps(found, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(found, indent=1))
    return 0 if found["left"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
