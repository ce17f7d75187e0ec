"""Shell. Doctor: checks an installation step by step, as seen from this machine, and names the step that fails."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from qmq.errors import cause_of
from qmq.tools.call import Address, Answer, CallFailed, Exit
from qmq.tools.findings import (
    ClockReading,
    Finding,
    fail,
    judge_broker,
    judge_causes,
    judge_clock,
    judge_facts,
    judge_group,
    judge_limits,
    judge_states,
    judge_versions,
    ok,
    parse_metrics,
    read_clock,
    read_clocks,
    read_version,
    silent_brokers,
    warn,
)
from qmq.types import Endpoint, Host

TIMEOUT_S = 3.0
PAGE_BYTES_MAX = 64 << 20


class Unreachable(Exception):
    """A name does not resolve, a port does not answer, or the answer is not HTTP."""


@dataclass(frozen=True, slots=True)
class Page:
    """Web page, and the offset of its server's clock; None without a `Date`."""

    status: int
    text: str
    clock: ClockReading | None


def resolve(host: str) -> list[str]:
    """Return the addresses of a name; raises Unreachable."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{host} has no address: {error}") from None
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def connect(host: str, port: int) -> float:
    """Open and close a TCP connection; return the seconds it took. Raises Unreachable."""
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{Endpoint(host, port)} does not answer: {cause_of(error)}") from None
    return time.monotonic() - began


def read_page(address: Address, path: str, token: str = "") -> Page:
    """Read a page; raises Unreachable."""
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        sent_ms = time.time_ns() // 1_000_000
        connection.request("GET", path, headers={"X-Api-Token": token} if token else {})
        response = connection.getresponse()
        received_ms = time.time_ns() // 1_000_000
        text = response.read(PAGE_BYTES_MAX).decode("utf-8", "replace")
        clock = _clock(response.getheader("Date"), sent_ms, received_ms)
        return Page(response.status, text, clock)
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        raise Unreachable(f"{address.url}{path} does not answer: {cause_of(error)}") from None
    finally:
        connection.close()


def _clock(date: str | None, sent_ms: int, received_ms: int) -> ClockReading | None:
    try:
        date_ms = round(parsedate_to_datetime(date or "").timestamp() * 1000)
    except (ValueError, TypeError):
        return None
    return read_clock(date_ms, sent_ms=sent_ms, received_ms=received_ms)


PROBES_AT_ONCE = 32
PORTS = {"servePort": "serve", "syncPort": "sync", "controlPort": "control", "metricsPort": "metrics"}
FIREWALL = "start the process, or open the port; the address in its settings must be the one that others use"

Ask = Callable[[str], Answer]
"""Ask the metaserver for a list. Raises CallFailed."""
Steps = Generator[Finding, None, bool]
"""Findings; the return value is whether later steps can be checked."""


def examine(address: Address, ask: Ask, token: str = "", *, transitions: bool = False) -> Iterator[Finding]:
    """Yield the findings of all steps, except steps that depend on a failed one.

    Args:
        token: for the brokers' metrics.
        transitions: also report each broker's states and its last transitions.
    """
    if not (yield from _metaserver(address)):
        return
    try:
        yield from _installation(ask, token, transitions)
    except CallFailed as error:
        yield fail(
            "operators' actions",
            str(error),
            "does the balancer pass POST /management on? The metaserver's log has the cause",
        )


def _installation(ask: Ask, token: str, transitions: bool) -> Iterator[Finding]:
    """Yield the metaserver's own findings, then those of this machine."""
    facts = ask("Doctor")
    if facts.exit is not Exit.DONE:
        yield fail("token", facts.message, "give a token with the role viewer or more: QMQ_TOKEN or --token-file")
        return
    yield from judge_facts(facts.data)
    metaservers, brokers = ask("ListMetaservers").data or [], ask("ListBrokers").data or []
    away = silent_brokers(facts.data)
    with ThreadPoolExecutor(PROBES_AT_ONCE) as threads:
        for findings in threads.map(_other_metaserver, metaservers):
            yield from findings
        answering = [row for row in brokers if (row["hostname"], row["servePort"]) not in away]
        for row, (findings, version) in zip(answering, threads.map(partial(_broker, token), answering)):
            yield from findings
            row["version"] = version
        if transitions:
            for findings in threads.map(partial(_states, token), answering):
                yield from findings
    if not brokers:
        yield fail("brokers", "no broker is added", "add a master and a slave with qmq AddBroker, then start them")
    for group in ask("ReplicaStatus").data or []:
        yield from judge_group(group)
    yield from judge_versions(_versions(metaservers, brokers))


def _metaserver(address: Address) -> Steps:
    """Check name, port, health, gRPC port and clock of the metaserver."""
    try:
        yield ok("name resolution", f"{address.host} is {', '.join(resolve(address.host))}")
    except Unreachable as error:
        yield fail("name resolution", str(error), "check the spelling of --metaserver, and DNS or /etc/hosts here")
        return False
    try:
        connect(address.host, address.port)
    except Unreachable as error:
        yield fail("HTTP port", str(error), f"of the metaserver or its balancer: {FIREWALL}")
        return False
    return (yield from _pages(address))


def _pages(address: Address) -> Steps:
    try:
        live, ready, grpc = (read_page(address, path) for path in ("/health/live", "/health/ready", "/meta/address"))
    except Unreachable as error:
        yield fail("HTTP", str(error), "is it a metaserver's port? The metaserver's log has the cause")
        return False
    if live.status != 200 or grpc.status == 404:  # every process answers /health/live, a metaserver also /health/ready
        path, page = ("/health/live", live) if live.status != 200 else ("/meta/address", grpc)
        do = "is it a metaserver's port, or that of a balancer with none behind it?"
        yield fail("HTTP", f"{path}: {page.status} {_line(page)}", do)
        return False
    yield ok("HTTP port", f"{address} answers")
    if ready.status == 200:
        yield ok("database", "the metaserver is ready")
    else:
        do = "known routes are served from memory; start the database, or correct the setting database"
        yield fail("database", _line(ready), do)
    if live.clock:
        yield judge_clock(f"the metaserver at {address}", live.clock)
    yield from _grpc(address, grpc)
    return True


def _grpc(address: Address, page: Page) -> Iterator[Finding]:
    try:
        rpc = Endpoint.parse(page.text.strip() if page.status == 200 else "")
    except ValueError:
        do = "it must be host:port; does the balancer pass this path on?"
        yield fail("/meta/address", f"{page.status} {_line(page)}", do)
        return
    if Host(rpc.host).is_loopback and not all(Host(found).is_loopback for found in resolve(address.host)):
        found = f"brokers and clients get the address {rpc}, which is their own machine"
        yield fail("/meta/address", found, "set advertised_ip of the metaserver to the address that others reach")
        return
    try:
        connect(rpc.host, rpc.port)
    except Unreachable as error:
        yield fail("gRPC port", str(error), f"of the metaserver: {FIREWALL}")
    else:
        yield ok("gRPC port", f"{rpc} answers")


def _other_metaserver(row: Mapping[str, Any]) -> list[Finding]:
    """Check one metaserver of the list."""
    where = row["http"]
    if not row["up"]:
        do = "start it; if it is gone for good, it leaves the list by itself"
        return [warn("metaservers", f"{where} is down", do)]
    try:
        address = Address.parse(where)
        page = read_page(address, "/health/live")
    except (Unreachable, ValueError) as error:
        return [warn("metaservers", str(error), "start it, unless only the balancer can reach it")]
    clock = [judge_clock(f"the metaserver at {where}", page.clock)] if page.clock else []
    return [ok("metaservers", f"{where} answers"), *clock]


def _broker(token: str, row: Mapping[str, Any]) -> tuple[list[Finding], str]:
    """Check a broker's ports and metrics; return the findings and its version."""
    label = f"{row['hostname']}:{row['servePort']} ({row['role'].lower()} of {row['group']})"
    if not row["controlPort"]:
        return [], ""  # never registered, which the metaserver reports already
    findings = []
    for field, name in PORTS.items():
        try:
            connect(row["ip"], row[field])
        except Unreachable as error:
            findings.append(fail("broker ports", f"{label}, {name} port: {error}", FIREWALL))
    if not findings:
        findings.append(ok("broker ports", f"{label}: serve, sync, control and metrics answer"))
    try:
        page = read_page(Address(row["ip"], row["metricsPort"]), "/metrics", token)
    except Unreachable:
        return findings, ""  # reported as a port finding already
    clock = [judge_clock(label, page.clock)] if page.clock else []
    if page.status != 200:
        do = "use a token that may read its metrics"
        return [*findings, *clock, warn("disks", f"{label} does not show its metrics: {page.status}", do)], ""
    judged = judge_broker(label, row["role"], parse_metrics(page.text), read_clocks(page.text))
    causes, limits = judge_causes(label, page.text), judge_limits(label, page.text)
    return [*findings, *clock, *judged, *causes, *limits], read_version(page.text)


def _states(token: str, row: Mapping[str, Any]) -> list[Finding]:
    """Return findings about a broker's states; a silent broker is reported elsewhere."""
    try:
        page = read_page(Address(row["ip"], row["metricsPort"]), "/states", token)
        machines = json.loads(page.text) if page.status == 200 else []
    except (Unreachable, ValueError):
        return []
    return [judge_states(f"{row['hostname']}:{row['servePort']}", machine) for machine in machines]


def _versions(metaservers: Iterable[Mapping[str, Any]], brokers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    versions = {f"metaserver {row['http']}": row.get("version", "") for row in metaservers if row["up"]}
    brokers_up = (row for row in brokers if row["up"])
    return versions | {f"broker {row['hostname']}:{row['servePort']}": row.get("version", "") for row in brokers_up}


def _line(page: Page) -> str:
    return page.text.strip().partition("\n")[0][:200]
