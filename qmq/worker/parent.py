"""Shell. Parent of a worker's processes: starts them, reads their reports, serves /live, /ready and /metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qmq.client.health import HealthState
from qmq.client.numbers import FAMILIES, Kind, Sample, merged
from qmq.worker.plan import Exit, Plan
from qmq.worker.process import Options

log = logging.getLogger(__name__)

LOOK_S = 0.1
SILENT_S = 60.0
"""Time without a report after which a process's event loop counts as blocked, and /live fails."""
SUMMARY_S = 60.0
WATCH_S = 1.0
REPORT_BYTES_MAX = 64 << 20


@dataclass(eq=False)
class Child:
    """A process and its last report."""

    number: int
    process: asyncio.subprocess.Process
    state: str = "starting"
    reason: str = ""
    error: str = ""
    samples: list[Sample] = field(default_factory=list)


class Parent:
    """Parent of the processes; used on one event loop, except for `live`, `ready` and `samples`."""

    def __init__(self, options: Options, *, stop_s: float, kill_after_s: float, reloads: bool) -> None:
        self._options = options
        self._reloads = reloads
        self.plan: Plan = Plan(
            options.processes, self, stop_s=stop_s, kill_after_s=kill_after_s, waits_for_change=reloads
        )
        self._children: dict[int, Child] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._ended: list[Sample] = []
        """Numbers of processes that have ended."""
        self._count = 0
        self._began_s = time.monotonic()
        self._last_error = ""

    # Processes of the plan.

    def start(self) -> int:
        self._count += 1
        self._starting[self._count] = asyncio.create_task(self._keep(self._count))
        return self._count

    def terminate(self, process: int) -> None:
        self._signal(process, signal.SIGTERM)

    def kill(self, process: int, why: str) -> None:
        child = self._children.get(process)
        log.error("process killed pid=%s reason=%s", child.process.pid if child is not None else "-", why)
        self._signal(process, signal.SIGKILL)

    def _signal(self, number: int, what: signal.Signals) -> None:
        if (child := self._children.get(number)) is not None:
            with suppress(ProcessLookupError):
                child.process.send_signal(what)
        elif number in self._starting:
            asyncio.get_running_loop().call_later(LOOK_S, self._signal, number, what)

    async def _keep(self, number: int) -> None:
        """Start a process, follow it, and report its end to the plan."""
        status = int(Exit.FAILED)
        try:
            status = await self._follow(number)
        except OSError as error:
            log.error("process not started error=%s", error)
        finally:
            del self._starting[number]
            self.plan.exited(number, status, time.monotonic())

    async def _follow(self, number: int) -> int:
        """Start a process and read its reports; return its exit status."""
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "qmq.worker.process",
                str(child_end.fileno()),
                self._options.as_json,
                pass_fds=[child_end.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
            child_end.close()
            child = self._children[number] = Child(number, process)
            log.info("process started pid=%d", process.pid)
            reader, writer = await asyncio.open_connection(sock=parent_end, limit=REPORT_BYTES_MAX)
            with suppress(OSError, ValueError):  # a line beyond the limit
                while line := await reader.readline():
                    self._reported(child, json.loads(line))
            status = await process.wait()
            writer.close()
        del self._children[number]
        counts = [sample for sample in child.samples if FAMILIES[sample.name].kind is not Kind.GAUGE]
        self._ended = merged([*self._ended, *counts])
        level = logging.INFO if status == 0 else logging.ERROR
        log.log(level, "process ended pid=%d status=%d reason=%s", process.pid, status, child.error or "-")
        self._last_error = child.error or self._last_error
        return status

    def _reported(self, child: Child, report: dict[str, Any]) -> None:
        self.plan.reported(child.number, time.monotonic())
        self.plan.is_unique = report.get("is_unique", self.plan.is_unique)
        child.error = report.get("error", child.error)
        if "state" in report:
            child.state, child.reason = report["state"], report["reason"]
            child.samples = [Sample(name, tuple(labels), value) for name, labels, value in report["samples"]]
            if child.state != HealthState.NOT_CONNECTED.value:
                self.plan.ready(child.number, time.monotonic())

    # Run.

    async def run(self) -> Exit:
        """Supervise until the end; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: self.plan.stop(time.monotonic()))
        loop.add_signal_handler(signal.SIGHUP, self._reload, "SIGHUP")
        tasks = [asyncio.create_task(self._summaries())]
        if self._reloads:
            tasks.append(asyncio.create_task(self._watch()))
        while not self.plan.has_ended:
            self.plan.look(time.monotonic())
            await asyncio.sleep(LOOK_S)
        for task in tasks:
            task.cancel()
        status = self.plan.exit
        assert status is not None
        if status is not Exit.ENDED:
            log.error("worker failed status=%d reason=%s", status, self._last_error or "processes failed")
        return status

    def _reload(self, why: str) -> None:
        log.info("reload processes=%d cause=%s", len(self.plan.places), why)
        self.plan.reload(time.monotonic())

    async def _watch(self) -> None:
        """Reload when a Python file below this folder changes."""
        before = await asyncio.to_thread(changes_below, Path.cwd())
        while True:
            await asyncio.sleep(WATCH_S)
            now = await asyncio.to_thread(changes_below, Path.cwd())
            if changed := [path for path, at in now.items() if before.get(path) != at] or [*before.keys() - now.keys()]:
                before = now
                self._reload(changed[0])

    async def _summaries(self) -> None:
        while True:
            await asyncio.sleep(SUMMARY_S)
            log.info("worker %s", self.summary())

    # State, for any thread.

    def samples(self) -> list[Sample]:
        """Return the numbers of all processes; counters include those of ended processes."""
        children = list(self._children.values())
        return merged([*self._ended, *(sample for child in children for sample in child.samples)])

    def summary(self) -> str:
        """Return the fields of the summary line."""
        totals: dict[str, float] = {}
        for name, labels, value in self.samples():
            key = labels[-1] if name in ("handled", "outcomes") else name
            totals[key] = max(totals.get(key, 0), value) if FAMILIES[name].is_max else totals.get(key, 0) + value
        names = ("done", "retry", "dead_letter", "stored", "refused", "unknown", "handlers_running", "waiting_messages")
        fields = {name: f"{totals.get(name, 0):.0f}" for name in names}
        fields |= {"lag_s": f"{totals.get('lag_seconds', 0):.1f}", "restarts": str(self.plan.restarts)}
        state, reason = self.ready()
        about = f"uptime_s={time.monotonic() - self._began_s:.0f} processes={len(self._children)} state={state}"
        return " ".join([about, *(f"{name}={value}" for name, value in fields.items()), f"reason={reason or '-'}"])

    def ready(self) -> tuple[str, str]:
        """Return "ready", or "not_ready" with the reason: each place has a connected process."""
        reasons = []
        for place in self.plan.places:
            child = self._children.get(place.current or 0)
            if child is None:
                reasons.append(f"a process is restarted: {self._last_error or 'it has ended'}")
            elif child.state not in (HealthState.CONNECTED.value, HealthState.DEGRADED.value):
                reasons.append(f"process {child.process.pid} is {child.state}: {child.reason or 'no report yet'}")
        if self.plan.exit is not None:
            reasons = ["the worker is ending"]
        return ("not_ready", "; ".join(reasons)) if reasons else ("ready", "")

    def live(self) -> tuple[str, str]:
        """Return "live", or "blocked" with the processes whose event loop has not reported for a minute."""
        children, silence = dict(self._children), self.plan.silence(time.monotonic())
        silent = [
            (children[number], age_s) for number, age_s in silence.items() if age_s >= SILENT_S and number in children
        ]
        ages = [f"process {child.process.pid} reported {age_s:.0f} s ago" for child, age_s in silent]
        return ("blocked", "; ".join(ages)) if ages else ("live", "")


def changes_below(folder: Path) -> dict[str, int]:
    """Return the time of change of each Python file, except in hidden folders and virtual environments."""
    return dict(_changes(folder))


def _changes(folder: Path) -> Iterator[tuple[str, int]]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        folders[:] = [name for name in folders if not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))]
        for name in files:
            if name.endswith(".py"):
                with suppress(OSError):
                    path = os.path.join(root, name)
                    yield path, os.stat(path).st_mtime_ns


def pages(parent: Parent) -> dict[str, Callable[[], tuple[int, str, bytes]]]:
    """Return the pages by path: status, content type, body."""

    def plain(state: tuple[str, str]) -> tuple[int, str, bytes]:
        status = 200 if state[0] in ("live", "ready") else 503
        return status, "text/plain; charset=utf-8", f"{': '.join(filter(None, state))}\n".encode()

    def metrics() -> tuple[int, str, bytes]:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        except ModuleNotFoundError:
            return 501, "text/plain", b"type: pip install 'qmq[metrics]'\n"
        from qmq.metrics import ClientCollector

        registry = CollectorRegistry()
        registry.register(ClientCollector(parent.samples))
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)

    return {"/live": lambda: plain(parent.live()), "/ready": lambda: plain(parent.ready()), "/metrics": metrics}
