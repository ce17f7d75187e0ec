"""Core. Findings of Doctor, and the rules that judge measured values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qmq.plain import first_of
from qmq.tools.table import size

CLOCK_WARN_MS, CLOCK_FAIL_MS = 2_000, 60_000
"""Limit for clocks of metaservers. Acknowledged messages do not depend on clocks; expiries and times of messages do."""


DUE_AGE_S_MAX = 30.0
"""Limit for the time that a delayed message is due and not sent."""
CLOCK_OFF_S_MAX = 1.0
"""Default of the setting clock_alarm_ms, from which the log of a delay server reports its clock."""


LAG_FINE_BYTES = 64 << 20
"""Normal lag of a slave under load; at four times this the group becomes readonly."""


GROUP_CAUSES = {
    "offline": "its consumers are switched off: OnOffline --state=online ends that",
    "rate": "an operator limits how many messages a second it gets: LimitGroup --perSecond=0 ends that",
    "unacked": "a consumer has as many unacked messages as it may: check its handlers, or restart it",
    "postponed": "postpone fewer messages; further ones wait at a delay group if the token has the right redrive:",
}
"""Remedies for causes that stop a consumer group; names as in broker.group_status."""
_GROUP_CAUSE = re.compile(r"^qmq_broker_group_cause\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_AHEAD = re.compile(r"^qmq_(?:broker|delayserver)_clock_ahead_seconds\{(.*)\} (\S+)$", re.MULTILINE)
NO_CLOCKS: Mapping[str, float] = {}
_LIMITED = re.compile(r"^qmq_(?:broker|delayserver)_limited\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_FULL = re.compile(r"^qmq_broker_limited_subject\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Level(StrEnum):
    OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one step."""

    level: Level
    step: str
    found: str
    do: str = ""
    """Remedy; empty if the step passed."""

    def json(self) -> dict[str, str]:
        return asdict(self)


def ok(step: str, found: str) -> Finding:
    return Finding(Level.OK, step, found)


def warn(step: str, found: str, do: str) -> Finding:
    return Finding(Level.WARN, step, found, do)


def fail(step: str, found: str, do: str) -> Finding:
    return Finding(Level.FAIL, step, found, do)


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Offset of a machine's clock from ours, and the error of that figure."""

    ahead_ms: int
    uncertain_ms: int


def read_clock(date_ms: int, *, sent_ms: int, received_ms: int) -> ClockReading:
    """Compare an HTTP `Date`, which is cut to seconds, with our clock before and after the request."""
    middle_ms = (sent_ms + received_ms) // 2
    return ClockReading(date_ms + 500 - middle_ms, 500 + (received_ms - sent_ms) // 2)


def judge_clock(process: str, clock: ClockReading) -> Finding:
    off_ms = max(abs(clock.ahead_ms) - clock.uncertain_ms, 0)
    direction = "ahead of" if clock.ahead_ms > 0 else "behind"
    if off_ms < CLOCK_WARN_MS:
        most_s = (off_ms + 2 * clock.uncertain_ms) / 1000
        return ok("clocks", f"{process} differs from this machine by less than {most_s:.1f} s")
    judge = fail if off_ms >= CLOCK_FAIL_MS else warn
    found = f"{process} is about {off_ms / 1000:,.0f} s {direction} this machine"
    return judge("clocks", found, "run a time service (chrony, systemd-timesyncd) on both; timedatectl shows its state")


def judge_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the versions of processes, by name; "": the process did not show one."""
    by_version: dict[str, list[str]] = {}
    for process, version in versions.items():
        by_version.setdefault(version, []).append(process)
    unknown = by_version.pop("", [])
    if len(by_version) == 1 and unknown:
        yield ok("versions", f"the others run {next(iter(by_version))}; unknown: {', '.join(unknown)}")
    elif len(by_version) == 1:
        yield ok("versions", f"all run {next(iter(by_version))}")
    elif by_version:
        found = "; ".join(f"{version}: {', '.join(process)}" for version, process in sorted(by_version.items()))
        yield warn("versions", found, "finish the upgrade: different versions may run together only until its end")


def judge_facts(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the caller's identity and the metaserver's own findings."""
    caller = facts["caller"]
    yield ok("token", f"{caller['name']}, with the role {caller['role']}")
    for check in facts["checks"]:
        step, found = _read_check(check)
        if check["ok"]:
            yield ok(step, found)
        else:
            judge = warn if step in _WARNINGS else fail
            yield judge(step, found, check["remedy"])


_STEPS = {"broker": "brokers", "group": "groups", "machine": "brokers"}
_WARNINGS = ("tokens", "metaservers")
"""Failures of these steps are warnings: the installation works without them."""


def _read_check(check: Mapping[str, Any]) -> tuple[str, str]:
    """Split `broker a:1 (…)` into the step `brokers` and its object `a:1 (…)`."""
    first, _, rest = check["name"].partition(" ")
    if first == "machine":
        return _STEPS[first], f"{check['name']}: {check['found']}"
    if first in _STEPS:
        return _STEPS[first], f"{rest} {check['found']}"
    return check["name"], check["found"]


def silent_brokers(facts: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Return the brokers that do not answer the metaserver; their other findings follow from that."""
    found = [broker for check in facts["checks"] for broker in check["facts"].get("brokers", [check["facts"]])]
    return {(broker["hostname"], broker["servePort"]) for broker in found if broker.get("answers") is False}


TRANSITIONS_SHOWN = 5


def judge_states(process: str, machine: Mapping[str, Any]) -> Finding:
    """Show one state machine of a broker and its last transitions, the newest last."""
    moves = [
        f"{move['event']} -> {move['after']}" + ("" if (ago := move["secondsAgo"]) is None else f" {ago:,.1f} s ago")
        for move in machine["transitions"][-TRANSITIONS_SHOWN:]
    ]
    found = ", ".join([machine["state"], *moves])
    if machine["illegal"]:
        do = "a defect in qmq: keep its log file, and report it; the role restarted"
        return fail(f"states of {process}", f"{machine['about']}: {machine['illegal']} illegal moves; {found}", do)
    return ok(f"states of {process}: {machine['about']}", found)


def judge_group(group: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge one group of ReplicaStatus: terms of its brokers, and whether the slave is in sync."""
    name, term = group["brokerGroup"], group["term"]
    for replica in group["replicas"]:
        process = f"{replica['hostname']}:{replica['servePort']} ({replica['role'].lower()} of {name})"
        if replica["reachable"] and replica["term"] != term:
            found = f"{process} is in term {replica['term']}, the metaserver in term {term}"
            yield fail("terms", found, "the broker's log has the reason; maybe it reaches no metaserver")
        elif replica["reachable"]:
            yield ok("terms", f"{process} is in term {term}")
    equal, lag = group["equal"], group["lagBytes"]
    if equal is False:
        yield fail("copies", f"the logs of {name} differ", "stop producing, run the audit, keep both disks")
    elif equal is None and lag is not None and lag > LAG_FINE_BYTES:
        yield warn("copies", f"the slave of {name} lacks {size(lag)}", "look again: the lag must shrink")
    elif equal is not None or lag is not None:
        yield ok("copies", f"the slave of {name} is in sync")


def read_clocks(text: str) -> dict[str, float]:
    """Return how many seconds a broker's clock is ahead of each other one, from its metrics."""
    return {dict(_LABEL.findall(labels))["of"]: float(seconds) for labels, seconds in _AHEAD.findall(text)}


def _wrong_clock(process: str, ahead_s: Mapping[str, float]) -> str:
    """Name the clock that differs. A broker in agreement with another clock is not to blame."""
    witnesses = sorted(ahead_s, key=lambda clock: abs(ahead_s[clock]))
    if len(witnesses) < 2 or abs(ahead_s[witnesses[0]]) * 2 > abs(ahead_s[witnesses[-1]]):
        return f"the clock of {process} differs from that of the other copy or of the metaserver"
    near, far = witnesses[0], witnesses[-1]
    way = "behind" if ahead_s[far] > 0 else "ahead of"
    return f"the clock of the {far} is {abs(ahead_s[far]):,.0f} s {way} those of {process} and of the {near}"


def _judge_clocks(
    process: str, prefix: str, metrics: Mapping[str, float], ahead_s: Mapping[str, float]
) -> Iterator[Finding]:
    off_s = metrics.get("qmq_delayserver_clock_difference_seconds", 0.0)
    if abs(off_s) > CLOCK_OFF_S_MAX:
        found = (
            f"the clock of {process} is wrong by {off_s:.1f} s; "
            "messages come due by the clocks of the other copy and the metaserver"
        )
        yield warn("clocks", found, "set it right, and run a time service (chrony, systemd-timesyncd) on all machines")
    if (compared := int(metrics.get("qmq_delayserver_clocks", 3))) < 3:
        found = f"{process} compares {compared} of 3 clocks (its own, the other copy's, the metaserver's)"
        yield warn("clocks", found, "a wrong clock is found only with all three; check that slave and metaserver run")
    if metrics.get(f"{prefix}_clocks_disagree"):
        found = f"{_wrong_clock(process, ahead_s)}: nothing is deleted"
        do = f"{prefix}_clock_ahead_seconds shows by how much; run a time service (chrony, systemd-timesyncd) on all"
        yield fail("clocks", found, do)
    if clients := int(metrics.get(f"{prefix}_client_clocks_off", 0)):
        found = f"{process} and {clients} {'client' if clients == 1 else 'clients'} have different clocks"
        yield warn(
            "clocks", found, "delayed messages of these clients are off by that; the log names them; run NTP there"
        )


def judge_broker(
    process: str, role: str, metrics: Mapping[str, float], ahead_s: Mapping[str, float] = NO_CLOCKS
) -> Iterator[Finding]:
    """Judge the metrics of a broker or delay server: role, disk, and clock of due times."""
    prefix = "qmq_delayserver" if role.startswith("DELAY_") else "qmq_broker"
    is_master = metrics.get(f"{prefix}_is_master")
    if is_master is not None and bool(is_master) != (role in ("MASTER", "DELAY_MASTER")):
        found = f"{process} acts as {'the master' if is_master else 'no master'}, the metaserver has it as {role}"
        yield fail("roles", found, "wait a few seconds and look again; if it stays, its link to the metaserver is down")
    if refused := int(metrics.get(f"{prefix}_refused_routes", 0)):
        found = f"{process} is refused the routes of {refused} subjects; due messages of these wait"
        yield warn("routes", found, "the metaserver's check `routes`, and blocked_messages of its metrics, show why")
    yield from _judge_clocks(process, prefix, metrics, ahead_s)
    if (age_s := metrics.get("qmq_delayserver_due_age_seconds", 0.0)) > DUE_AGE_S_MAX:
        due = int(metrics.get("qmq_delayserver_due_messages", 0))
        found = f"{process} has {due:,} due messages, the oldest for {age_s:,.0f} s"
        yield warn("delays", found, "DelayStats names the subjects and why they wait")
    held = metrics.get("qmq_broker_held_bytes", 0)
    if held:
        found = f"{process} keeps {size(held)} past retention: a consumer group has not consumed it"
        yield warn(
            "retention", found, "qmq_broker_held_bytes names it: let it consume, or remove it with RemoveConsumerGroup"
        )
    free, limit = metrics.get(f"{prefix}_disk_free_bytes"), metrics.get(f"{prefix}_disk_free_limit_bytes", 0)
    if free is None:
        return
    found = f"{process} has {size(free)} free; it stops taking messages below {size(limit)}"
    if free < limit:
        yield fail("disks", found, "make room or shorten retention_hours: the group is readonly")
    elif free < 2 * limit:
        yield warn("disks", found, "make room soon, or shorten retention_hours")
    else:
        yield ok("disks", found)


def worst(findings: Iterable[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAIL, Level.WARN) if level in levels), Level.OK)


def read_version(text: str) -> str:
    """Return the version in the metrics of a broker or delay server, or an empty text."""
    found = re.search(r'^qmq_(?:broker|delayserver)_info\{[^}]*version="([^"]*)"', text, re.MULTILINE)
    return found[1] if found else ""


def judge_causes(process: str, text: str) -> Iterator[Finding]:
    """Yield one finding for each cause that stops or slows consumer groups, from a broker's metrics."""
    slowed: dict[str, list[str]] = {}
    for labels in map(dict, map(_LABEL.findall, _GROUP_CAUSE.findall(text))):
        slowed.setdefault(labels["cause"], []).append(f"{labels['consumer_group']} of {labels['subject']}")
    for cause, groups in slowed.items():
        if cause in GROUP_CAUSES:
            yield warn(
                "consumer groups", f"{process} delivers less to {first_of(groups)}: {cause}", GROUP_CAUSES[cause]
            )
        else:
            yield ok("consumer groups", f"{process} has messages that wait for {first_of(groups)}: {cause}")


def judge_limits(process: str, text: str) -> Iterator[Finding]:
    """Yield the settings that stopped or refused clients lately, from the metrics of a broker or delay server."""
    full: dict[str, list[str]] = {}
    for labels in map(dict, map(_LABEL.findall, _FULL.findall(text))):
        full.setdefault(labels["setting"], []).append(labels["subject"])
    settings = {dict(_LABEL.findall(labels))["setting"] for labels in _LIMITED.findall(text)} - full.keys()
    if settings:
        found = f"{process} stopped or refused clients within the last minute: {', '.join(sorted(settings))}"
        yield warn("limits", found, "its log names them (limit reached): let them send less, or raise the setting")
    for setting, subjects in full.items():
        lately = f"{process} refused producers of {first_of(subjects)} within the last minute"
        found = f"{lately}: the backlog of a consumer group reached its limit ({setting})"
        yield warn("limits", found, f"Lag shows the group: let it catch up, or raise SetLimits --{setting}")


def parse_metrics(text: str) -> dict[str, float]:
    """Parse Prometheus' text by name without labels; the last sample of a name wins."""
    metrics = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("#") or not name:
            continue
        try:
            metrics[name.partition("{")[0]] = float(value)
        except ValueError:
            continue
    return metrics
