"""Shell. Plan of a local cluster: ports, token and settings files, chosen once and kept in its directory."""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from qmq.crc import of_known_fields
from qmq.descriptors import socket_family
from qmq.errors import NotServed
from qmq.types import Endpoint

HOST = "127.0.0.1"
HTTP_PORT = 8080
BROKER_PORT = 20881
"""QMQ's own ports, used if they are free."""
DELAY_SERVER = "delayserver"
DELAY_MASTER = 5
"""QMQ's number of the role; the slave's is the next one."""


class Groups(NamedTuple):
    """Names of everything beside the metaserver: broker groups, groups of delay servers, single processes."""

    brokers: tuple[str, ...]
    delay: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Single processes with one HTTP port."""
    copies: int = 2
    """Copies of each group."""


@dataclass(frozen=True)
class BrokerPlan:
    """Broker or delay server. `role` is its initial role; the metaserver has the present one. `module` is its
    program.
    """

    group: str
    hostname: str
    role: int
    serve_port: int
    sync_port: int
    control_port: int
    metrics_port: int
    module: str = "broker"

    @property
    def is_delay_server(self) -> bool:
        return self.module == DELAY_SERVER


@dataclass(frozen=True)
class Plan:
    """Ports, token, key and brokers of one local cluster."""

    token: str
    http_port: int
    grpc_port: int
    brokers: list[BrokerPlan]
    others: dict[str, int] = field(default_factory=dict)
    """HTTP ports of the single processes, by name."""
    password_key: str = ""
    """The metaserver's key for passwords of AddDb's databases; missing in old plans."""

    @property
    def metaserver(self) -> str:
        return f"http://{Endpoint(HOST, self.http_port)}"

    @property
    def ports(self) -> list[int]:
        return [self.http_port, self.grpc_port, *self.others.values()] + [
            port for b in self.brokers for port in (b.serve_port, b.sync_port, b.control_port, b.metrics_port)
        ]


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port), family=socket_family(HOST)).close()
    except OSError:
        return False
    return True


def _free_ports(first: int, taken: set[int]) -> Iterator[int]:
    """Yield distinct free ports from `first` upwards. Outgoing connections take none below 32768."""
    for port in range(first, 32_768):
        if port not in taken and is_free(port):
            taken.add(port)
            yield port
    raise NotServed(f"no free port between {first} and 32768 on {HOST}")


def make_plan(groups: Groups, http_port: int, broker_port: int) -> Plan:
    """Choose the first free ports from the given ones, and a token."""
    taken: set[int] = set()
    web, ports = _free_ports(http_port, taken), _free_ports(broker_port, taken)
    http, grpc = next(web), next(web)
    others = dict(zip(groups.others, web))
    return Plan(secrets.token_hex(16), http, grpc, _plan_groups(groups, ports), others, make_password_key())


def make_password_key() -> str:
    """Return a value for the setting `password_keys`: 32 random bytes in URL-safe base64."""
    return base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()


def _plan_groups(groups: Groups, ports: Iterator[int]) -> list[BrokerPlan]:
    kinds = ((groups.brokers, "broker", 0), (groups.delay, DELAY_SERVER, DELAY_MASTER))
    return [
        BrokerPlan(
            group,
            f"{group}-{letter}",
            role + (letter != "a"),
            next(ports),
            next(ports),
            next(ports),
            next(ports),
            module,
        )
        for names, module, role in kinds
        for group in names
        for letter in "abcde"[: groups.copies]
    ]


def load_plan(path: Path, groups: Groups, http_port: int, broker_port: int) -> Plan:
    """Load the plan of an earlier start, to continue with its data, or make a new one.

    Groups of delay servers, single processes and a key for passwords are added to an old plan.

    Raises:
        NotServed: another program uses a port of this cluster now.
    """
    if not path.exists():
        plan = make_plan(groups, http_port, broker_port)
        write_atomically(path, json.dumps(asdict(plan), indent=2))
        return plan
    fields = json.loads(path.read_text())
    brokers = [of_known_fields(BrokerPlan, broker) for broker in fields["brokers"]]
    plan = of_known_fields(Plan, fields | {"brokers": brokers})
    known = {broker.group for broker in plan.brokers}
    delay = tuple(name for name in groups.delay if name not in known)
    others = [name for name in groups.others if name not in plan.others]
    if delay or others or not plan.password_key:
        plan = replace(plan, password_key=plan.password_key or make_password_key())
        plan.brokers.extend(
            _plan_groups(Groups((), delay, copies=groups.copies), _free_ports(broker_port, set(plan.ports)))
        )
        plan.others.update(zip(others, _free_ports(http_port, set(plan.ports))))
        write_atomically(path, json.dumps(asdict(plan), indent=2))
    if busy := [port for port in plan.ports if not is_free(port)]:
        raise NotServed(
            f"port {', '.join(map(str, busy))} of this cluster is in use by another program; stop that, or remove "
            f"{path} to choose other ports (the brokers must then be replaced at the metaserver: ReplaceBroker)"
        )
    return plan


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file atomically; only its owner may read it, as it may hold a token."""
    beside = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    os.replace(beside, path)


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Write a flat TOML file; JSON and TOML write texts, numbers, booleans and lists of texts alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
