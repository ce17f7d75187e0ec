"""Shell. A whole cluster on this machine, run as by a service manager: a metaserver, broker groups of two, …

    with Cluster(directory) as cluster:
        cluster.kill("g1", "master")
        cluster.wait_writable("g1")

The directory holds everything: `cluster.json` (present addresses and processes), `plan.json` (ports, token, key for
passwords), `logs/`, and a folder of settings and data per process. A second start continues with the same data.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from qmq.deploy.control import answers, broker_state, manage
from qmq.deploy.plan import (
    BROKER_PORT,
    DELAY_SERVER,
    HOST,
    HTTP_PORT,
    BrokerPlan,
    Groups,
    load_plan,
    write_atomically,
    write_settings,
)
from qmq.deploy.processes import Service, end_leftovers, module_command, prometheus_command, stop_all
from qmq.deploy.prometheus.config import find_targets, write_config
from qmq.errors import NotServed, OperatorError, QmqError
from qmq.types import Endpoint

WATCHDOG, PROMETHEUS = "watchdog", "prometheus"
SCRAPE_S = 2
"""Short, as a developer watches the scrape."""
RESTART_S = 1.0
REFRESH_S = 0.5
"""Maximum age of `cluster.json`."""
MIN_COPIES = 2
"""Copies that acknowledge in a new group. It has to be more than half, before a copy is added."""
START_S = 120.0
SWAP_S = 60.0
TICK_S = 0.05


class AlreadyRunning(QmqError):
    """Another runner owns this directory. Stop it first, or use another directory."""

    def __init__(self, run_dir: Path, owner: int) -> None:
        super().__init__(
            f"a cluster runs in {run_dir} already (process {owner}); `qmq dev stop` ends it, --dir uses another place"
        )
        self.owner = owner


class Cluster:
    """Cluster in `run_dir`, which runs from `start` to `stop`. Its methods may be called from any one thread at a time.

    Args:
        groups: names of the broker groups.
        copies: copies of each group: a master, and slaves.
        watchdog: run one, for the databases of AddDb.
        prometheus: run one, with the alert rules and all processes as targets.
        broker: settings for every broker's file, over the defaults.
        metaserver: settings for the metaserver's file, over the defaults.
        http_port, broker_port: first ports to try, at the first start in this directory.
        refresh_s: interval of updates of the roles in `cluster.json`.
        say: called in the keeper's thread with a line about each end and restart of a process.
        launch: starts a process, as `subprocess.Popen` does.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        groups: tuple[str, ...] = ("g1", "g2"),
        delay_groups: tuple[str, ...] = (),
        copies: int = 2,
        watchdog: bool = False,
        prometheus: bool = False,
        broker: dict[str, Any] | None = None,
        delay_server: dict[str, Any] | None = None,
        metaserver: dict[str, Any] | None = None,
        http_port: int = HTTP_PORT,
        broker_port: int = BROKER_PORT,
        restart_s: float = RESTART_S,
        refresh_s: float = REFRESH_S,
        say: Callable[[str], None] = lambda line: None,
        launch: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.run_dir = run_dir.resolve()
        self._restart_s = restart_s
        self._refresh_s = refresh_s
        self._ports = (http_port, broker_port)
        self._groups = Groups(groups, delay_groups, (WATCHDOG,) * watchdog + (PROMETHEUS,) * prometheus, copies)
        self._settings = {"broker": broker or {}, DELAY_SERVER: delay_server or {}}
        self._metaserver_settings = metaserver or {}
        self._say = say
        self._launch = launch
        self._services: dict[str, Service] = {}
        self._roles: dict[str, str] = {}
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="cluster keeper", daemon=True)
        self._refresh_at = 0.0
        self._kept = threading.Event()
        """Set once the keeper has written `cluster.json`."""
        self._written = ""

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and wait until every group is writable.

        Raises:
            AlreadyRunning: another runner owns the directory.
            NotServed: a port is taken, or a process does not come up; the text ends with the last lines of its log.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(self.run_dir)
        try:
            end_leftovers(recorded_pids(self.run_dir), self.run_dir)
            self.plan = load_plan(self.run_dir / "plan.json", self._groups, *self._ports)
            self._start_metaserver()
            self._add_brokers()
            self._start_brokers()
            self._start_watchdog()
            self._start_prometheus()
            self._keeper.start()
            self.wait_writable()
            if PROMETHEUS in self._groups.others:
                self._write_targets()  # by now every broker has registered its scrape address
            self._kept.clear()  # written before any caller sees the cluster as running
            self._refresh_at = 0.0
            self.wait(self._kept.is_set, f"{self.run_dir / 'cluster.json'} cannot be written")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything: brokers first, then the metaserver; after a bound each is killed."""
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join()
        stop_all([service for name, service in self._services.items() if name != "metaserver"])
        stop_all([service for name, service in self._services.items() if name == "metaserver"])
        if self._lock is not None:
            if self._written:
                with suppress(OSError):  # a full disk: the processes are gone all the same
                    self._write()
            self._lock.close()
            self._lock = None

    @property
    def metaserver(self) -> str:
        return self.plan.metaserver

    @property
    def token(self) -> str:
        return self.plan.token

    @property
    def others(self) -> dict[str, str]:
        """URLs of the single processes, by name."""
        return {name: f"http://{Endpoint(HOST, self.plan.others[name])}" for name in self._groups.others}

    def service(self, name: str) -> Service:
        """Return the process of a broker, by hostname, or "metaserver"."""
        return self._services[name]

    @property
    def starts(self) -> int:
        """Process starts since `start`, restarts included."""
        return sum(service.starts for service in self._services.values())

    def manage(self, action: str, **parameters: object) -> Any:
        """Run an operator's action at the metaserver; raise OperatorError if it is refused."""
        return manage(self.metaserver, self.token, action, **parameters)

    def describe(self) -> dict[str, Any]:
        """Return the contents of `cluster.json`. The pid of a process that is down is null."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in self._groups.brokers}
        delay: dict[str, dict[str, Any]] = {group: {} for group in self._groups.delay}
        for broker in self.plan.brokers:
            members = (delay if broker.is_delay_server else groups).setdefault(broker.group, {})
            role = self._roles[broker.hostname]
            members[role if role not in members else f"{role} {broker.hostname}"] = {
                "pid": self._services[broker.hostname].pid,
                "hostname": broker.hostname,
                "port": broker.serve_port,
                "sync_port": broker.sync_port,
                "control_port": broker.control_port,
                "metrics_port": broker.metrics_port,
                "data": str(self.data(broker)),
            }
        return {
            "metaserver": self.metaserver,
            "metaserver_pid": self._services["metaserver"].pid,
            "token": self.token,
            "groups": groups,
            **({"delay_groups": delay} if delay else {}),
            **{name: {"pid": self._services[name].pid, "url": url} for name, url in self.others.items()},
        }

    def broker(self, group: str, role: str) -> BrokerPlan:
        """Return the present "master" or "slave" of a group, by the metaserver."""
        self._refresh_roles()
        return next(b for b in self.plan.brokers if b.group == group and self._roles[b.hostname] == role)

    def kill(self, group: str, role: str, number: int = signal.SIGKILL) -> BrokerPlan:
        """Send a signal to the master or slave of a group, which is restarted `restart_s` after its end.

        With SIGKILL, the process has ended when this returns.
        """
        broker = self.broker(group, role)
        if number == signal.SIGKILL:
            self._services[broker.hostname].kill()
        else:
            self._services[broker.hostname].signal(number)
        return broker

    def end(self, *names: str) -> None:
        """Kill processes with SIGKILL; they stay down until `begin`."""
        for name in names:
            self.service(name).is_held = True
        for name in names:
            self.service(name).kill()

    def begin(self, *names: str) -> None:
        """Start processes stopped by `end`."""
        for name in names:
            service = self.service(name)
            if service.pid is None:
                service.start()
            service.is_held = False

    def data(self, broker: BrokerPlan) -> Path:
        """Return a broker's data directory."""
        return self._folder(broker) / "data"

    def swap_roles(self, group: str, timeout_s: float = SWAP_S, *, to: str = "") -> None:
        """Swap master and slave (`to`: one of several slaves); repeat while the action is refused after a restart."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.manage("SwapRoles", brokerGroup=group, to=to)
                return
            except OperatorError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(REFRESH_S)

    def writable(self, group: str) -> bool:
        """Return whether the group's master reports that it is writable."""
        state = broker_state(str(Endpoint(HOST, self.broker(group, "master").control_port)), self.token)
        return state is not None and state.writable

    def wait_metaserver(self, timeout_s: float = START_S) -> None:
        """Wait until the metaserver answers. Groups may be writable before: restarted brokers resume their roles alone.

        Raises:
            NotServed: see `wait`.
        """
        self.wait(lambda: answers(f"{self.metaserver}/meta/address"), "the metaserver does not answer", timeout_s)

    def wait_writable(self, *groups: str, timeout_s: float = START_S) -> None:
        """Wait until the groups, or all groups, are writable; else raise NotServed with the reasons."""
        for group in groups or (*self._groups.brokers, *self._groups.delay):
            self.wait(partial(self.writable, group), f"group {group} is not writable", timeout_s)

    def wait(self, ready: Callable[[], bool], complaint: str, timeout_s: float = START_S) -> None:
        """Wait until `ready`; after a timeout raise NotServed with the complaint and the ends of the logs."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if ended := [s for s in self._services.values() if s.exit_status == 2]:
                raise NotServed(f"{ended[0].name} refuses its settings:\n{ended[0].log_tail()}")
            if time.monotonic() > deadline:
                tails = "\n".join(f"  {s.name}, {s.log}:\n{s.log_tail()}" for s in self._services.values())
                raise NotServed(f"{complaint} after {timeout_s:.0f} s; the ends of the logs:\n{tails}")
            time.sleep(TICK_S)

    def _folder(self, broker: BrokerPlan) -> Path:
        return self.run_dir / broker.hostname

    def _service(self, name: str, module: str, settings: dict[str, Any]) -> Service:
        config = self.run_dir / name / f"{module}.toml"
        write_settings(config, settings)
        command, log = module_command(f"qmq.{module}", config), self.run_dir / "logs" / f"{name}.log"
        self._services[name] = Service(name, command, log, launch=self._launch)
        return self._services[name]

    def _start_metaserver(self) -> None:
        settings = {
            "host": HOST,
            "http_port": self.plan.http_port,
            "grpc_port": self.plan.grpc_port,
            "advertised_ip": HOST,
            "database": f"sqlite:///{self.run_dir / 'metaserver' / 'metaserver.db'}",
            "cluster_token": self.token,
            "password_keys": [self.plan.password_key],
        }
        self._service("metaserver", "metaserver", settings | self._metaserver_settings).start()
        self.wait_metaserver()

    def _add_brokers(self) -> None:
        """Add each broker once: a swap changes its role, which must stay."""
        known = {row["hostname"]: row for row in self.manage("ListBrokers")}
        copies = Counter(row["group"] for row in known.values())
        for broker in self.plan.brokers:
            if broker.hostname not in known:
                copies[broker.group] += 1
                if (majority := copies[broker.group] // 2 + 1) > MIN_COPIES:
                    self.manage("SetCopies", brokerGroup=broker.group, minCopies=majority)
                self.manage(
                    "AddBroker",
                    brokerGroup=broker.group,
                    role=broker.role,
                    hostname=broker.hostname,
                    ip=HOST,
                    servePort=broker.serve_port,
                    syncPort=broker.sync_port,
                )
        self._refresh_roles()

    def _start_brokers(self) -> None:
        for broker in self.plan.brokers:
            settings = {
                "hostname": broker.hostname,
                "ip": HOST,
                "serve_port": broker.serve_port,
                "sync_port": broker.sync_port,
                "control_port": broker.control_port,
                "metrics_port": broker.metrics_port,
                "data": str(self.data(broker)),
                "metaserver": self.metaserver,
                "token": self.token,
            }
            self._service(broker.hostname, broker.module, settings | self._settings[broker.module]).start()

    def _start_watchdog(self) -> None:
        if WATCHDOG in self._groups.others:
            port = self.plan.others[WATCHDOG]
            settings = {"metaserver": self.metaserver, "token": self.token, "host": HOST, "http_port": port}
            self._service(WATCHDOG, WATCHDOG, settings).start()
            self.wait(lambda: answers(f"http://{Endpoint(HOST, port)}/health"), "the watchdog does not answer", START_S)

    def _start_prometheus(self) -> None:
        if PROMETHEUS not in self._groups.others:
            return
        directory, port = self.run_dir / PROMETHEUS, self.plan.others[PROMETHEUS]
        directory.mkdir(exist_ok=True)
        write_atomically(directory / "token", self.token)
        config = self._write_targets()
        log = self.run_dir / "logs" / f"{PROMETHEUS}.log"
        self._services[PROMETHEUS] = Service(PROMETHEUS, prometheus_command(config, directory / "data", port), log)
        self._services[PROMETHEUS].start()
        self.wait(lambda: answers(f"http://{Endpoint(HOST, port)}/-/ready"), "Prometheus does not answer", START_S)

    def _write_targets(self) -> Path:
        directory = self.run_dir / PROMETHEUS
        others = (str(Endpoint(HOST, self.plan.others[name])) for name in self._groups.others if name == WATCHDOG)
        targets = find_targets(self.manage, others)
        return write_config(directory, targets, token_file=directory / "token", interval_s=SCRAPE_S)

    def _refresh_roles(self) -> None:
        """Update the roles from the metaserver; while it is down, keep them."""
        try:
            for row in self.manage("ListBrokers"):
                self._roles[row["hostname"]] = str(row["role"]).lower().removeprefix("delay_")
        except NotServed:
            pass

    def _keep(self) -> None:
        """Run the keeper's thread: restart ended processes and update `cluster.json`. A full disk must not end it."""
        complaint = ""
        while not self._stopping.wait(TICK_S):
            try:
                self._keep_once(time.monotonic())
                complaint = ""
            except (OSError, QmqError) as error:
                if str(error) != complaint:
                    self._say(f"{error}; trying again")
                complaint = str(error)

    def _keep_once(self, now: float) -> None:
        for service in self._services.values():
            if restart := service.keep_alive(now, self._restart_s):
                self._say(restart)
        if now >= self._refresh_at:
            self._refresh_roles()
            self._refresh_at = now + self._refresh_s
        self._write()
        self._kept.set()

    def _write(self) -> None:
        text = json.dumps(self.describe(), indent=2) + "\n"
        if text != self._written:
            write_atomically(self.run_dir / "cluster.json", text)
            self._written = text


def lock_directory(run_dir: Path) -> IO[str]:
    """Lock a run directory while the returned file is open; the file holds the owner's pid.

    Raises:
        AlreadyRunning: another process owns it.
    """
    lock = (run_dir / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        owner = int(lock.read() or 0)
        lock.close()
        raise AlreadyRunning(run_dir, owner) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def recorded_pids(run_dir: Path) -> list[int]:
    """Return the process ids in a cluster.json; they may be outdated."""
    try:
        cluster = json.loads((run_dir / "cluster.json").read_text())
    except (OSError, ValueError):
        return []
    groups = [*cluster["groups"].values(), *cluster.get("delay_groups", {}).values()]
    pids = [broker["pid"] for group in groups for broker in group.values()]
    pids += [cluster["metaserver_pid"], *(cluster.get(name, {}).get("pid") for name in (WATCHDOG, PROMETHEUS))]
    return [pid for pid in pids if pid]
