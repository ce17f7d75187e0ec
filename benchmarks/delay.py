"""Shell. `make bench-delay`: one delay group and one broker group; its rate, its lateness, and its restart."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import MIB, Clock, Figure, describe, resident_bytes, result, table
from benchmarks.worker import Worker
from qmq.deploy.local import Cluster
from qmq.deploy.plan import write_atomically
from qmq.errors import QmqError

HTTP_PORT, BROKER_PORT = 27_480, 27_500
BROKERS, DELAY = "g1", "d1"
DAY_MS, HOUR_MS = 86_400_000, 3_600_000
LOADED_AFTER_S = 30
"""Seconds between filling an hour and loading it."""
HTTP_S = 120.0


@dataclass(frozen=True)
class Sizes:
    pending: int = 10_000_000
    due_per_s: int = 20_000
    due_s: int = 60
    rest_s: int = 60
    hour: int = 5_000_000
    campaign: int = 1_000_000


QUICK = Sizes(pending=200_000, due_per_s=2_000, due_s=5, rest_s=5, hour=100_000, campaign=50_000)
CAMPAIGNS = {"campaign": 1, "campaign_1s": 1000}
"""Name -> span of its due times in ms."""
OTHERS_PER_S = 10
LEAD_S = 20
"""Seconds between a campaign's last stored message and its due time: by then all of it is loaded."""
BURST_MS = 10_000
"""Time after the campaign's moment in which the other subject is measured."""
POLL_S = 0.2


class Delay:
    """Measures one cluster after the other, each fresh."""

    def __init__(self, run_dir: Path, sizes: Sizes) -> None:
        self._dir = run_dir.resolve()
        self._sizes = sizes
        self._began = time.monotonic()
        self.figures: dict[str, Figure] = {}
        self._cluster: Cluster

    def run(self, only: str) -> None:
        if only in ("", "lateness"):
            with self._fresh():
                self._at_rest()
                self._due()
        if only in ("", "pending"):
            with self._fresh():
                self._pending()
        if only in ("", "hour"):
            with self._fresh(load_ahead_minutes=self._ahead_minutes()):
                self._hour()
        for name, span_ms in CAMPAIGNS.items():
            if only in ("", name):
                with self._fresh():
                    self._campaign(name, span_ms)

    @contextmanager
    def _fresh(self, **settings: object) -> Iterator[None]:
        shutil.rmtree(self._dir / "cluster", ignore_errors=True)
        with Cluster(
            self._dir / "cluster",
            groups=(BROKERS,),
            delay_groups=(DELAY,),
            delay_server=dict(settings),
            http_port=HTTP_PORT,
            broker_port=BROKER_PORT,
            restart_s=0.0,
            say=self._say,
        ) as self._cluster:
            yield
        shutil.rmtree(self._dir / "cluster", ignore_errors=True)

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {line}", flush=True)

    def _note(
        self, name: str, *values: float, note: str = "", more: bool = False, cpu: dict[str, float] | None = None
    ) -> None:
        self.figures[name] = Figure(name, list(values), note=note, more_is_better=more, cpu_us=cpu or {})
        self._say(f"{name} {values[-1]:,.3f}")

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        state, log = self._cluster.describe(), self._cluster.run_dir / "logs" / "client.log"
        ports = str(state["delay_groups"][DELAY]["master"]["port"]), str(state["groups"][BROKERS]["master"]["port"])
        with Worker("benchmarks.delay_client", log, *ports, token=self._cluster.token) as worker:
            yield worker

    def _pids(self) -> dict[str, int]:
        return {role: broker["pid"] for role, broker in self._cluster.describe()["delay_groups"][DELAY].items()}

    def _lateness(self, name: str, per_second: int, seconds: int) -> None:
        """Measure messages that come due at a steady rate, a few seconds after they were sent."""
        count = -(-int(per_second * seconds) // 100) * 100
        with self._worker() as sender, self._worker() as receiver:
            receiver.begin("receive", subject=name, messages=count, timeout_s=seconds + 60)
            clock = Clock(self._pids())
            sender.run("pace", subject=name, per_second=per_second, seconds=seconds, lead_ms=5_000)
            late = receiver.end(seconds + 90.0)
            cpu = {role: spent / count * 1e6 for role, spent in clock.spent().cpu_s.items()}
        note = f"at {per_second:,} messages per second; the earliest was {late['min_ms']:.1f} ms late"
        self._note(f"{name}_p50_ms", late["p50_ms"], note=note, cpu=cpu)
        self._note(f"{name}_p99_ms", late["p99_ms"])
        self._note(f"{name}_earliest_ms", late["min_ms"], more=True)

    def _at_rest(self) -> None:
        self._lateness("late_at_rest", 100, self._sizes.rest_s)

    def _due(self) -> None:
        self._lateness("late_busy", self._sizes.due_per_s, self._sizes.due_s)

    def _pending(self) -> None:
        """Measure millions of messages over thirty days: rate, memory, and the restart with all of them."""
        with self._worker() as sender:
            sender.run("fill", subject="warm", messages=10_000, begin_ms=_now_ms() + DAY_MS, span_ms=30 * DAY_MS)
            before = {role: resident_bytes(pid) for role, pid in self._pids().items()}
            clock = Clock(self._pids())
            filled = sender.run(
                "fill",
                subject="pending",
                messages=self._sizes.pending,
                begin_ms=_now_ms() + DAY_MS,
                span_ms=30 * DAY_MS,
                timeout_s=1_200.0,
            )
            cpu = {role: spent / self._sizes.pending * 1e6 for role, spent in clock.spent().cpu_s.items()}
        self._note(
            "delayed_per_s",
            filled["messages"] / filled["seconds"],
            more=True,
            cpu=cpu,
            note=f"{filled['message_bytes']} bytes each, in batches of 100, due within 30 days",
        )
        time.sleep(5)
        grown = {role: (resident_bytes(pid) - before[role]) / MIB for role, pid in self._pids().items()}
        self._note("pending_memory_mib", max(grown.values()), note=f"{self._sizes.pending:,} messages pend: {grown}")
        self._restart()

    def _restart(self) -> None:
        """Kill the master; it is back when its group is writable and dispatches due messages."""
        began = time.monotonic()
        self._cluster.kill(DELAY, "master", signal.SIGKILL)
        time.sleep(0.2)
        self._cluster.wait_writable(DELAY, timeout_s=HTTP_S)
        writable = time.monotonic() - began
        with self._worker() as sender, self._worker() as receiver:
            receiver.begin("receive", subject="first", messages=100, timeout_s=60)
            sender.run("fill", subject="first", messages=100, begin_ms=_now_ms() - 1000, span_ms=1)
            receiver.end()
        self._note("restart_s", writable, note="after kill -9 until the group accepts produces again")
        self._note("restart_sends_s", time.monotonic() - began, note="until a message that is due then was received")

    def _ahead_minutes(self) -> float:
        """Makes the hour after next load soon after it is filled."""
        fill_s = 60 + self._sizes.hour / 50_000
        return (self._next_hour_ms() - _now_ms()) / 60_000 - (fill_s + LOADED_AFTER_S) / 60

    def _next_hour_ms(self) -> int:
        return (_now_ms() // HOUR_MS + 2) * HOUR_MS

    def _hour(self) -> None:
        """Measure other messages while an hour with millions of messages is loaded."""
        begin_ms = self._next_hour_ms()
        began = time.monotonic()
        with self._worker() as sender:
            sender.run(
                "fill", subject="hour", messages=self._sizes.hour, begin_ms=begin_ms, span_ms=HOUR_MS, timeout_s=600.0
            )
            before = resident_bytes(self._pids()["master"])
            seconds = 60 + self._sizes.hour / 50_000 + LOADED_AFTER_S - (time.monotonic() - began) + 30
            with self._worker() as receiver:
                count = -(-int(1_000 * seconds) // 100) * 100
                receiver.begin("receive", subject="beside", messages=count, timeout_s=seconds + 60)
                sent = sender.run("pace", subject="beside", per_second=1_000, seconds=seconds, lead_ms=2_000)
                late = receiver.end(seconds + 90)
        grown = resident_bytes(self._pids()["master"]) - before
        self._note("load_intake_p99_ms", sent["p99_ms"], note="while an hour is loaded: time to store a batch")
        self._note("load_late_p99_ms", late["p99_ms"], note="and lateness, at 1,000 messages per second")
        self._note("loaded_bytes_each", grown / self._sizes.hour, note=f"{self._sizes.hour:,} messages loaded")

    def _campaign(self, name: str, span_ms: int) -> None:
        """Measure a million messages of one subject due within `span_ms`, beside ten a second of another one."""
        count = self._sizes.campaign // 100 * 100
        with self._worker() as sender, self._worker() as other, self._worker() as receiver:
            at_ms = _now_ms() + int(count / 20) + LEAD_S * 1000
            sender.run("fill", subject=name, messages=count, begin_ms=at_ms, span_ms=span_ms)
            seconds = 2 * LEAD_S + count / 20_000
            receiver.begin(
                "receive",
                subject="beside",
                messages=-(-int(OTHERS_PER_S * seconds) // 100) * 100,
                timeout_s=seconds + 300,
                from_ms=at_ms,
                until_ms=at_ms + BURST_MS,
            )
            while _now_ms() < at_ms - 5_000:
                time.sleep(0.05)
            other.begin("pace", subject="beside", per_second=OTHERS_PER_S, seconds=seconds, lead_ms=2_000)
            before = resident_bytes(self._pids()["master"])
            seen = self._watch_campaign(at_ms, count)
            other.end(seconds + 60)
            late = receiver.end(seconds + 360)
        note = f"{count:,} of another subject due within {span_ms} ms; {OTHERS_PER_S} a second; at most {{}} ms"
        self._note(f"{name}_others_p99_ms", late["p99_ms"], note=note.format(int(late["max_ms"])))
        self._note(f"{name}_others_p50_ms", late["p50_ms"])
        self._note(f"{name}_per_s", count / seen["seconds"], more=True, note="until all of it is stored")
        self._note(f"{name}_waiting_max", seen["waiting"], more=True, note="the most that waiting_messages said")
        self._note(f"{name}_memory_mib", (seen["resident"] - before) / MIB, note="more than before it was due")

    def _watch_campaign(self, at_ms: int, count: int) -> dict[str, float]:
        """Read the master's metrics until everything was sent."""
        port = self._cluster.describe()["delay_groups"][DELAY]["master"]["metrics_port"]
        question = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {self._cluster.token}"}
        )
        seen = {"waiting": 0.0, "resident": 0.0, "seconds": 0.0}
        while True:
            with urllib.request.urlopen(question, timeout=HTTP_S) as answer:
                text = answer.read().decode()
            values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line[:1] != "#"}
            seen["waiting"] = max(seen["waiting"], values["qmq_delayserver_waiting_messages"])
            seen["resident"] = max(seen["resident"], resident_bytes(self._pids()["master"]))
            if values["qmq_delayserver_sent_messages_total"] >= count:
                seen["seconds"] = (_now_ms() - at_ms) / 1000
                return seen
            time.sleep(POLL_S)


def _now_ms() -> int:
    return int(time.time() * 1000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delay", description="Measure one delay group.")
    parser.add_argument("--only", default="", choices=("", "lateness", "pending", "hour", *CAMPAIGNS))
    parser.add_argument("--quick", action="store_true", help="shows that all works; not figures to quote")
    run_dir = Path(os.environ.get("RUN_DIR", ".run")) / "bench-delay"
    parser.add_argument("--dir", type=Path, default=run_dir)
    parser.add_argument("--out", type=Path, default=Path(".run/bench-delay.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    options.dir.mkdir(parents=True, exist_ok=True)
    machine = describe(options.dir)
    bench = Delay(options.dir, QUICK if options.quick else Sizes())
    try:
        bench.run(options.only)
    except QmqError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{table(bench.figures)}\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine, "quick": options.quick}
    write_atomically(options.out, json.dumps(result(bench.figures, about), indent=2) + "\n")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
