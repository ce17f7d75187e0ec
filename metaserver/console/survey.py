"""Shell. Survey of the cluster for the console: each running process is asked for its figures, in rounds.

A round follows every 10 s while a page of the console is open, else every 5 minutes for the history. A large
installation is asked in pieces, with pauses of 20 times their duration, so its round takes minutes. Each metaserver
makes its own survey, so all of them show the whole cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from qmq.access import Token, token_text
from qmq.dead_letters import REDRIVER
from qmq.errors import QmqError
from qmq.metaserver.actions.causes import Check
from qmq.metaserver.actions.context import ActionContext, together, wall_ms
from qmq.metaserver.actions.doctor import examine_reported
from qmq.metaserver.actions.installation import active_watchdogs
from qmq.metaserver.console import findings
from qmq.metaserver.console.findings import Finding, Movements, Progress
from qmq.metaserver.console.front import LONG_MS, RATES, History, Key, Process, Survey
from qmq.metaserver.model import DELAY, NORMAL, Broker, Directory, Group, Routes
from qmq.process_metrics import process_figures
from qmq.proto import qmq_pb2 as pb
from qmq.subjects import is_dead_letter_subject

log = logging.getLogger("qmq.metaserver")

T = TypeVar("T")

ROUND_S, ROUND_UNSEEN_S = 10.0, LONG_MS / 1000
SEEN_S = 60.0
"""A page of the console counts as open for this time after its last request."""
PIECE = 32
"""Processes asked at once: about 0.1 s of the metaserver's time."""
SHARE, PAUSE_S_MAX = 20, 2.0
"""The pause after a piece is this many times its duration, with a limit, as a silent process takes two seconds."""
RATE_MS = 15_000
"""Messages a second are the mean of this time: three of a broker's samples."""
GROUPS_MAX = 200
"""Consumer groups asked of each broker group: those with the largest lag, and as many with dead letters."""
ROUTES_AT_ONCE = 1_000
ANSWER_S = 2.0
PAGE_BYTES_MAX = 4 << 20


class Surveyor:
    """Makes surveys and keeps their history. Made by main; `run` is its task.

    Args:
        token: the installation's key.
    """

    def __init__(self, context: ActionContext, *, token: Token) -> None:
        self._context = context
        self._token = token
        self.history = History()
        self._newest: Survey | None = None
        self._movements = Movements()
        self._seen_s = -SEEN_S
        self._seen = asyncio.Event()
        self._parked: dict[str, int] = {}
        """Parked rows of each outbox, by the pages of the active watchdogs."""
        self._cpu: dict[str, tuple[float, float]] = {}
        """Processor seconds of a process, and when it reported them (monotonic)."""

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except QmqError as error:
                log.warning("survey for the console failed reason=%s", error)
            await asyncio.sleep(max(ROUND_S - (time.monotonic() - began), PAUSE_S_MAX))
            await self._until_seen(began + ROUND_UNSEEN_S)

    def see(self) -> Survey | None:
        """Return the newest survey, for an open page; None while none is new enough."""
        self._seen_s = time.monotonic()
        self._seen.set()
        survey = self._newest
        if survey is None or wall_ms() - survey.at_ms > 1000 * (SEEN_S + 2 * survey.took_s):
            return None
        return survey

    async def _until_seen(self, end_s: float) -> None:
        """Wait until a page of the console is open; at most until `end_s`."""
        if time.monotonic() - self._seen_s < SEEN_S:
            return
        self._seen.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end_s - time.monotonic(), 0.0)):
                await self._seen.wait()

    async def look(self) -> Survey:
        """Ask every process, and keep the result."""
        began, survey = time.monotonic(), Survey(wall_ms())
        directory = self._context.registry.directory
        brokers = sorted(directory.brokers(), key=lambda broker: (broker.group, broker.role, broker.key))
        masters = {name: group.master for name, group in directory.groups.items() if self._is_up(group.master)}
        await self._ask_processes(survey, brokers)
        answers = await self._ask_consumers(survey, directory.groups_of(NORMAL), masters)
        places = [(name, row) for name, answer in answers.items() for row in summed(answer.groups)]
        groups = summed(row for answer in answers.values() for row in answer.groups)
        self._count(survey, answers.values(), groups)
        late = await self._ask_delays(survey, directory.groups_of(DELAY), masters)
        closed, count = await closed_subjects(directory, self._context.registry.routes, self._takes(directory))
        survey.checks = await examine_reported(self._context, everywhere=True)
        survey.findings = [
            *of_checks(survey.checks),
            *self._movements.look(places, survey.at_ms),
            *findings.of_late(late),
            *findings.of_subjects(closed, count),
            *findings.of_parked(self._parked),
            *findings.of_dead_letters(groups),
        ]
        self._record(survey)
        survey.took_s = time.monotonic() - began
        self._newest = survey
        return survey

    def _is_up(self, broker: Broker | None) -> bool:
        return broker is not None and bool(broker.control_port) and self._context.registry.is_up(broker)

    def _takes(self, directory: Directory) -> set[str]:
        return {name for name, group in directory.groups.items() if self._context.registry.is_writable(group)}

    # Processes and their rates.

    async def _ask_processes(self, survey: Survey, brokers: Sequence[Broker]) -> None:
        running = [broker for broker in brokers if self._is_up(broker)]
        answers = await in_pieces(running, lambda broker: self._caught(self._context.brokers.rates(broker)))
        by_key = {broker.key: answer for broker, answer in zip(running, answers, strict=True) if answer is not None}
        for broker in brokers:
            answer = by_key.get(broker.key)
            survey.processes.append(self._process_of(broker, answer))
            if answer is not None and broker.part.name.endswith("MASTER"):
                survey.rates[broker.group] = rates_of(answer.samples)
        survey.processes += await self._metaservers()
        survey.processes += await self._watchdogs()
        names = {process.name for process in survey.processes}
        self._cpu = {name: figures for name, figures in self._cpu.items() if name in names}
        free = [process.disk_free_bytes for process in survey.processes if process.disk_free_bytes is not None]
        survey.totals["disk_free"] = min(free, default=0)
        normal = self._context.registry.directory.groups_of(NORMAL)
        for name in RATES:
            survey.totals[name] = sum(rates[name] for group, rates in survey.rates.items() if group in normal)

    def _process_of(self, broker: Broker, answer: pb.RatesAnswer | None) -> Process:
        kind = "delay server" if broker.kind == DELAY else "broker"
        role = "master" if broker.part.name.endswith("MASTER") else "slave"
        process = Process(kind, str(broker.key), broker.group, role, self._is_up(broker))
        if answer is None or not answer.process.version:
            return process
        return self._with_figures(process, answer.process)

    def _with_figures(self, process: Process, figures: pb.ProcessFigures) -> Process:
        now, before = time.monotonic(), self._cpu.get(process.name)
        self._cpu[process.name] = figures.cpu_seconds, now
        cpu = None
        if before is not None and now > before[1] and figures.cpu_seconds >= before[0]:
            cpu = (figures.cpu_seconds - before[0]) / (now - before[1])
        return process._replace(
            version=figures.version,
            memory_bytes=figures.memory_bytes or None,
            cpu=cpu,
            disk_free_bytes=figures.disk_free_bytes if figures.disk_bytes else None,
            disk_bytes=figures.disk_bytes or None,
            running_ms=figures.running_ms,
        )

    async def _metaservers(self) -> list[Process]:
        own, processes = self._context.own_id, []
        rows = sorted(self._context.registry.peers(), key=lambda row: row.id == own)
        by_address = {row.http_address: row for row in rows}  # one that restarted has two rows for a while
        for _, row in sorted(by_address.items()):
            process = Process("metaserver", row.http_address, "", "", True, row.version)
            here = row.id == own
            page = "" if here else await asyncio.to_thread(self._scrape, row.http_address)
            figures = process_figures() if here else figures_of(page) if page else None
            processes.append(self._with_figures(process, figures) if figures else process)
        return processes

    async def _watchdogs(self) -> list[Process]:
        processes = []
        self._parked = {}
        for address in await active_watchdogs(self._context):
            page = await asyncio.to_thread(self._scrape, address)
            process = Process("watchdog", address, "", "", bool(page))
            processes.append(self._with_figures(process, figures_of(page)) if page else process)
            self._parked |= parked_of(page)
        return processes

    def _scrape(self, address: str) -> str:
        """Read a process's page of metrics; empty without an answer. Blocks; runs on a thread."""
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=ANSWER_S)
        try:
            connection.request("GET", "/metrics", headers={"X-Api-Token": token_text(self._token)})
            answer = connection.getresponse()
            return answer.read(PAGE_BYTES_MAX).decode() if answer.status == 200 else ""
        except (OSError, ValueError, http.client.HTTPException):
            return ""
        finally:
            connection.close()

    async def _caught(self, question: Any) -> Any:
        try:
            return await question
        except QmqError:
            return None

    # Consumer groups and delayed messages.

    async def _ask_consumers(
        self, survey: Survey, groups: Mapping[str, Group], masters: Mapping[str, Broker | None]
    ) -> dict[str, pb.ConsumersAnswer]:
        asked = [(name, master) for name in groups if (master := masters.get(name)) is not None]
        answers = await in_pieces(
            asked, lambda pair: self._caught(self._context.brokers.consumers(pair[1], behind_max=GROUPS_MAX))
        )
        survey.unasked = sorted(name for (name, _), answer in zip(asked, answers, strict=True) if answer is None)
        survey.unasked += sorted(name for name, group in groups.items() if group.master and name not in masters)
        return {name: answer for (name, _), answer in zip(asked, answers, strict=True) if answer is not None}

    def _count(self, survey: Survey, answers: Collection[pb.ConsumersAnswer], groups: Sequence[Progress]) -> None:
        sums = [answer.sums if answer.HasField("sums") else sums_of(answer.groups) for answer in answers]
        oldest = [survey.at_ms - row.oldest_ms for row in groups if row.oldest_ms and row.messages]
        survey.totals |= {
            "lag": sum(row.lag for row in sums),
            "unacked": sum(row.unacked for row in sums),
            "dead": sum(row.dead_letters for row in sums),
            "lag_seconds": max(oldest, default=0) // 1000,
        }
        self._record_lags(survey, groups, are_all=all(len(answer.groups) < GROUPS_MAX for answer in answers))

    async def _ask_delays(
        self, survey: Survey, groups: Mapping[str, Group], masters: Mapping[str, Broker | None]
    ) -> dict[str, tuple[int, int]]:
        asked = [(name, master) for name in groups if (master := masters.get(name)) is not None]
        found = await in_pieces(
            asked, lambda pair: self._caught(self._context.brokers.delay_stats(pair[1], pb.DelayStatsRequest()))
        )
        answers = {name: answer for (name, _), answer in zip(asked, found, strict=True) if answer is not None}
        late = {name: (answer.due_messages, answer.due_age_ms) for name, answer in answers.items()}
        survey.totals["pending"] = sum(answer.pending_messages for answer in answers.values())
        survey.totals["late"] = sum(messages for messages, age_ms in late.values() if age_ms >= findings.LATE_MS)
        return late

    def _record(self, survey: Survey) -> None:
        at, record = survey.at_ms, self.history.record
        for name, value in survey.totals.items():
            record(("total", name), at, value)
        for group, rates in survey.rates.items():
            for name, value in rates.items():
                record((f"rate {name}", group), at, value)

    def _record_lags(self, survey: Survey, groups: Sequence[Progress], *, are_all: bool) -> None:
        present: list[Key] = []
        for row in groups:
            present.append(("lag", *row.key))
            self.history.record(present[-1], survey.at_ms, row.messages)
        if are_all and not survey.unasked:  # else a group may only lack its answer
            self.history.settle("lag", present, survey.at_ms)


async def in_pieces(asked: Sequence[T], ask: Callable[[T], Awaitable[Any]]) -> list[Any]:
    """Ask some at once, and pause before the next: a large installation must not fill the metaserver's time."""
    answers: list[Any] = []
    for begin in range(0, len(asked), PIECE):
        began = time.monotonic()
        answers += await together([ask(each) for each in asked[begin : begin + PIECE]])
        if begin + PIECE < len(asked):
            await asyncio.sleep(min(SHARE * (time.monotonic() - began), PAUSE_S_MAX))
    return answers


def of_checks(checks: Iterable[Check]) -> list[Finding]:
    """Return Doctor's findings."""
    return [
        Finding(str(check["kind"]), findings.BAD, f"{check['name']}: {check['found']}", check["remedy"], "/doctor")
        for check in checks
        if not check["ok"]
    ]


def rates_of(samples: Sequence[pb.RateSample]) -> dict[str, float]:
    """Return messages a second over the newest samples; a counter that fell was reset and has no rate."""
    nothing = dict.fromkeys(RATES, 0.0)
    if len(samples) < 2:
        return nothing
    last = samples[-1]
    first = next(sample for sample in samples if sample.at_ms >= last.at_ms - RATE_MS)
    seconds = (last.at_ms - first.at_ms) / 1000
    if seconds < 0.9:
        return nothing
    steps = (last.taken - first.taken, last.delivered - first.delivered, last.acked - first.acked)
    return {name: max(step, 0) / seconds for name, step in zip(RATES, steps, strict=True)}


def summed(rows: Iterable[pb.GroupProgress]) -> list[Progress]:
    """Sum the progress of each consumer group over broker groups."""
    found: dict[tuple[str, str], Progress] = {}
    for row in rows:
        if row.group == REDRIVER and is_dead_letter_subject(row.subject):
            continue  # from a broker of an older version: its lag is the dead letters of another group
        progress = found.setdefault((row.subject, row.group), Progress(row.subject, row.group))
        progress.messages += row.lag
        progress.dead_letters += row.dead_letters
        progress.done += row.next_sequence - row.lag
        progress.first_unacked_ms = max(progress.first_unacked_ms, row.first_unacked_ms)
        progress.oldest_ms = min(filter(None, (progress.oldest_ms, row.oldest_ms)), default=0)
        progress.causes += [cause for cause in row.causes if cause not in progress.causes]
        for consumer in row.consumers:
            progress.unacked += consumer.unacked
    return list(found.values())


def sums_of(rows: Iterable[pb.GroupProgress]) -> pb.GroupSums:
    """Return the sums of the rows, for a broker of an older version."""
    found = summed(rows)
    return pb.GroupSums(
        lag=sum(row.messages for row in found),
        unacked=sum(row.unacked for row in found),
        dead_letters=sum(row.dead_letters for row in found),
    )


async def closed_subjects(directory: Directory, routes: Routes, takes: set[str]) -> tuple[list[str], int]:
    """Return the first subjects of which no broker group accepts messages, and the number of all."""
    closed, count = list[str](), 0
    if len(takes & directory.groups_of(NORMAL).keys()) == len(directory.groups_of(NORMAL)) and not directory.marks:
        return closed, count
    for number, route in enumerate(list(routes.values())):
        is_open = any(name in takes and not directory.is_marked(name, route.subject) for name in route.groups)
        if route.groups and not is_open:
            count += 1
            closed += [route.subject] if count <= findings.LISTED_MAX else []
        if number % ROUTES_AT_ONCE == ROUTES_AT_ONCE - 1:
            await asyncio.sleep(0)
    return sorted(closed), count


_FIGURE = re.compile(
    r"^(process_resident_memory_bytes|process_cpu_seconds_total|process_start_time_seconds) (\S+)$", re.M
)
_VERSION = re.compile(r'^qmq_\w+_info\{version="([^"]+)"\} 1', re.M)


_PARKED = re.compile(r'^qmq_watchdog_rows\{database="((?:[^"\\]|\\.)*)",state="parked"\} (\S+)$', re.M)


def parked_of(page: str) -> dict[str, int]:
    """Read the parked rows of each database from a watchdog's page of metrics."""
    return {re.sub(r"\\(.)", r"\1", database): int(float(count)) for database, count in _PARKED.findall(page)}


def figures_of(page: str) -> pb.ProcessFigures:
    """Read a process's figures from its page of metrics."""
    found = {name: float(value) for name, value in _FIGURE.findall(page)}
    version = _VERSION.search(page)
    started_s = found.get("process_start_time_seconds", 0.0)
    return pb.ProcessFigures(
        version=version[1] if version else "",
        memory_bytes=int(found.get("process_resident_memory_bytes", 0)),
        cpu_seconds=found.get("process_cpu_seconds_total", 0.0),
        running_ms=int(wall_ms() - started_s * 1000) if started_s else 0,
    )
