"""Shell. Runs random schedules of outboxes and watchdogs on SQLite, MariaDB and PostgreSQL; `make outbox`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.watchdog_world import source_of
from tests.outbox.world import play
from tests.support.databases import MariadbServer, PostgresqlServer

SERVERS = {"mariadb": MariadbServer, "postgresql": PostgresqlServer}


@contextmanager
def sources(kind: str) -> Iterator:
    """Give a function that makes an empty database and says where it is, and one that ends it."""
    with tempfile.TemporaryDirectory(prefix="qmq-outbox-") as directory:
        if kind == "sqlite":
            path = Path(directory) / "application.db"
            yield lambda: f"sqlite:///{path}", lambda url: path.unlink()
            return
        server = SERVERS[kind]()
        try:
            server.start()
            yield server.create_database, server.drop_database
        finally:
            server.stop()
            server.remove()


def run(kind: str, first: int, count: int, steps: int) -> list[int]:
    """Play schedules; return the seeds of those that failed."""
    failed, began = [], time.monotonic()
    with sources(kind) as (make, drop):
        for seed in range(first, first + count):
            url = make()
            try:
                play(seed, source_of(url, age_ms=0), steps)
            except AssertionError as error:
                print(f"{kind} seed {seed}: {error}", flush=True)
                failed.append(seed)
            drop(url)
    print(f"{kind}: {count} schedules, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outbox", description="Random schedules of outboxes.")
    parser.add_argument("--sqlite", type=int, default=1_000, help="schedules on SQLite")
    parser.add_argument("--mariadb", type=int, default=100)
    parser.add_argument("--postgresql", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    counts = {kind: getattr(options, kind) for kind in ("sqlite", "mariadb", "postgresql")}
    failed = [run(kind, options.seed, count, options.steps) for kind, count in counts.items() if count]
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
