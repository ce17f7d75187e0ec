"""Shell. `make bench`: measures, prints a table, writes .run/bench.json."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import rabbitmq
from benchmarks.consuming import Backlog, Consuming, Fairness
from benchmarks.figures import Figure, describe, result, rounded, table
from benchmarks.speed import GROUP, QUICK, Sizes, Speed
from qmq.deploy.local import Cluster
from qmq.deploy.plan import write_atomically
from qmq.errors import QmqError

SPEED = ["produce_1k", "produce_100b", "send_each", "send_one", "consume_1k", "typed", "e2e"]
CONSUMING, FAIRNESS = ["subjects", "crowd", "tags"], ["stalled", "big_group"]
NAMES = [*SPEED, *CONSUMING, *FAIRNESS, "backlog", "beside_backlog", "restart", "audit"]
HTTP_PORT, BROKER_PORT = 27_080, 27_100
"""First port to try; `make run` uses others."""
AUDIT_S = 1_800.0


class Bench:
    """One run of `make bench`."""

    def __init__(self, run_dir: Path, sizes: Sizes) -> None:
        self._dir = run_dir.resolve()
        self._sizes = sizes
        self._began = time.monotonic()
        self.figures: dict[str, Figure] = {}
        self.skipped: dict[str, str] = {}

    def run(self, names: list[str], with_peer: bool) -> None:
        """Run the named measurements."""
        if speed := [name for name in SPEED if name in names]:
            with self._cluster("speed") as cluster:
                measures = Speed(cluster, self._sizes, self._say)
                for name in speed:
                    self._measure(name, getattr(measures, name))
            self._remove("speed")
        if with_peer:
            self._compare()
        if several := [name for name in (*CONSUMING, *FAIRNESS) if name in names]:
            with self._cluster("consuming") as cluster:
                measures = Speed(cluster, self._sizes, self._say)
                consuming, fairness = Consuming(measures), Fairness(measures)
                for name in several:
                    self._measure(name, getattr(consuming if name in CONSUMING else fairness, name))
            self._remove("consuming")
        if {"backlog", "beside_backlog", "restart"} & set(names):
            with self._cluster("backlog") as cluster:
                backlog = Backlog(cluster, self._sizes, self._say)
                fairness = Fairness(Speed(cluster, self._sizes, self._say))
                if "beside_backlog" in names:
                    self._measure("without a backlog", fairness.without_backlog)
                self._measure("backlog", backlog.fill)
                if "beside_backlog" in names:
                    self._measure("beside_backlog", fairness.beside_backlog)
                if "restart" in names:
                    self._measure("restart", backlog.restart)
            self._remove("backlog")
        if "audit" in names:
            self._measure("audit", self._audit)

    def _cluster(self, name: str) -> Cluster:
        """Yield a fresh cluster of one group; dead processes restart at once."""
        shutil.rmtree(self._dir / name, ignore_errors=True)
        self._say(f"starting a metaserver, a master and a slave in {self._dir / name}/")
        return Cluster(
            self._dir / name,
            groups=(GROUP,),
            http_port=HTTP_PORT,
            broker_port=BROKER_PORT,
            restart_s=0.0,
            say=self._say,
        )

    def _remove(self, name: str) -> None:
        """Remove data and keep logs: a backlog is 10 GiB per copy."""
        for path in (self._dir / name).glob("*"):
            if path.is_dir() and path.name != "logs":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()

    def _measure(self, name: str, measure: Callable[[], list[Figure]]) -> None:
        """Run one measurement; a failure is reported at the end, and the others go on."""
        self._say(f"measuring {name}")
        try:
            self.figures |= {figure.name: figure for figure in measure()}
        except QmqError as error:
            self.skipped[name] = str(error)
            self._say(f"{name} FAILED: {error}")

    def _compare(self) -> None:
        if absent := rabbitmq.missing():
            self.skipped["rabbitmq"] = absent
            self._say(f"SKIPPED rabbitmq: {absent}")
        else:
            self._measure("rabbitmq", lambda: rabbitmq.measure(self._dir / "rabbitmq", self._sizes, self._say))

    def _audit(self) -> list[Figure]:
        """Run the audit's own benchmark, which ends with one JSON object."""
        if importlib.util.find_spec("benchmarks.audit") is None:
            raise QmqError("benchmarks/audit.py is not there")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.audit", "--json"], capture_output=True, text=True, timeout=AUDIT_S
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise QmqError(f"python -m benchmarks.audit ended with status {done.returncode}: {done.stderr[-2000:]}")
        measured = json.loads(lines[-1])
        figure = Figure("audit_mb_per_s_core", [float(measured["audit_mb_per_s_core"])])
        figure.note = str(measured.get("note", ""))
        return [figure]

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {line}", flush=True)


def report(bench: Bench, machine: dict[str, object], names: list[str], quick: bool, out: Path) -> int:
    """Print the table, write the JSON, return the exit status: 1 if a measurement failed."""
    ratios = rabbitmq.ratios(bench.figures)
    print(f"\n{table(bench.figures)}\n")
    for name, ratio in ratios.items():
        print(f"{name:<36}{ratio:>8.1f} times RabbitMQ")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for name, reason in bench.skipped.items():
        print(f"NOT MEASURED {name}: {reason}")
    about = {
        **{name: rounded(ratio) for name, ratio in ratios.items()},
        "machine": machine,
        "quick": quick,
        "measured": names,
        "not_measured": bench.skipped,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(result(bench.figures, about), indent=2) + "\n")
    print(f"written to {out}")
    return 1 if set(bench.skipped) - {"rabbitmq"} else 0


def chosen(only: str | None) -> list[str]:
    """Return the measurements of `ONLY=a,b`; all without it."""
    names = only.split(",") if only else NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise QmqError(f"no measurement {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure the speed of one broker group.")
    parser.add_argument("--only", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="a minute that shows that all works; not figures to quote")
    parser.add_argument("--peer", choices=["rabbitmq"], help="the same producer load against RabbitMQ, and the ratio")
    run_dir = Path(os.environ.get("RUN_DIR", ".run")) / "bench"
    parser.add_argument("--dir", type=Path, default=run_dir, help="data while it runs, and logs; default: .run/bench")
    parser.add_argument("--out", type=Path, default=Path(".run/bench.json"), help="default: .run/bench.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    try:
        names = chosen(options.only)
        options.dir.mkdir(parents=True, exist_ok=True)
        machine = describe(options.dir)
        bench = Bench(options.dir, QUICK if options.quick else Sizes())
        bench.run(names, options.peer is not None)
    except QmqError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return report(bench, machine, names, options.quick, options.out)


if __name__ == "__main__":
    sys.exit(main())
