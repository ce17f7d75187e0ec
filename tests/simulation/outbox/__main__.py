"""Shell. Random schedules of outboxes and watchdogs on MariaDB and PostgreSQL (`make outbox`). On SQLite they are a
scenario of `python -m tests.simulation`.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.integration.watchdog_world import source_of
from tests.simulation.outbox.world import play
from tests.support.databases import MariadbServer, PostgresqlServer

SERVERS = {"mariadb": MariadbServer, "postgresql": PostgresqlServer}


def run(kind: str, seeds: range, steps: int) -> list[int]:
    """Run schedules; return the seeds that failed."""
    failed, began = [], time.monotonic()
    server = SERVERS[kind]()
    try:
        server.start()
        for seed in seeds:
            url = server.create_database()
            try:
                play(seed, source_of(url, age_ms=0), steps)
            except AssertionError as error:
                print(f"{kind} seed {seed}: {error}", flush=True)
                failed.append(seed)
            server.drop_database(url)
    finally:
        server.stop()
        server.remove()
    print(f"{kind}: {len(seeds)} schedules, {len(failed)} failed, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Random schedules of outboxes.")
    parser.add_argument("--seeds", type=int, default=100, help="schedules on each of MariaDB and PostgreSQL")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    failed = [run(kind, seeds, options.steps) for kind in SERVERS]
    return 1 if any(failed) else 0


if __name__ == "__main__":
    sys.exit(main())
