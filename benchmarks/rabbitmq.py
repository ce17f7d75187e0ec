"""Shell. The same producer load against RabbitMQ: two nodes on loopback with a classic mirrored queue, as plain
processes.

Needs RabbitMQ as packaged by Debian (`apt-get install rabbitmq-server`); its service may stay off. Node names, ports,
cookie, database, logs and the port mapper are our own, so a running RabbitMQ is left alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from benchmarks.figures import Clock, Figure
from benchmarks.speed import IN_FLIGHT, Sizes
from benchmarks.worker import Worker
from qmq.deploy.plan import HOST, is_free
from qmq.errors import NotServed

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
"""Debian's scripts without the wrapper that changes to RabbitMQ's own user."""
START_S = 90.0
STOP_S = 20.0
FIRST_PORT = 25_700
SETTINGS = """\
loopback_users = none
disk_free_limit.absolute = 1GB
cluster_name = benchmark
"""
POLICY = {"ha-mode": "all", "ha-sync-mode": "automatic"}


def is_installed() -> bool:
    return (SCRIPTS / "rabbitmq-server").exists() and shutil.which("epmd") is not None


class RabbitMq:
    """A cluster of two nodes, from `with` to its end. Clients connect to `port`; its node has the queues' masters, the
    other node their mirrors.
    """

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir.resolve()
        self._ports = _free_ports(5)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports[1]

    def __enter__(self) -> RabbitMq:
        shutil.rmtree(self._dir, ignore_errors=True)
        self._dir.mkdir(parents=True)
        cookie = self._dir / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(20))
        cookie.chmod(0o400)
        (self._dir / "rabbitmq.conf").write_text(SETTINGS)
        (self._dir / "plugins").write_text("[].\n")
        try:
            self._start_mapper()
            for number in (1, 2):
                self._start(number)
            self._join()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self._dir, ignore_errors=True)

    @property
    def pids(self) -> dict[str, int]:
        return {name: node.pid for name, node in self._nodes.items()}

    def control(self, number: int, *arguments: str) -> str:
        """Run rabbitmqctl against a node; raise NotServed with its output."""
        done = subprocess.run(
            [SCRIPTS / "rabbitmqctl", "-q", "-n", _name(number), *arguments],
            env=self._environment(number),
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        if done.returncode:
            raise NotServed(f"rabbitmqctl {arguments[0]}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _environment(self, number: int) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        return own | {
            "HOME": str(self._dir),
            "ERL_EPMD_PORT": str(self._ports[0]),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": _name(number),
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self._ports[number]),
            "RABBITMQ_DIST_PORT": str(self._ports[2 + number]),
            "RABBITMQ_MNESIA_BASE": str(self._dir / f"node{number}"),
            "RABBITMQ_LOG_BASE": str(self._dir / "logs"),
            "RABBITMQ_PID_FILE": str(self._dir / f"node{number}.pid"),
            "RABBITMQ_CONFIG_FILE": str(self._dir / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self._dir / "none.config"),
            "RABBITMQ_CONF_ENV_FILE": str(self._dir / "none.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._dir / "plugins"),
            # The virtual machine itself instead of a waiting shell: its pid is measured and ended.
            "RABBITMQ_ALLOW_INPUT": "1",
            # Spinning schedulers of two nodes would take the two cores from each other.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none -noinput"
            " -kernel inet_dist_use_interface {127,0,0,1}",
        }

    def _start_mapper(self) -> None:
        """Erlang's port mapper, in the foreground; a node would leave one behind as a daemon."""
        self._mapper = subprocess.Popen(
            ["epmd", "-port", str(self._ports[0]), "-address", HOST],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _start(self, number: int) -> None:
        with (self._dir / f"node{number}.log").open("wb") as log:
            self._nodes[f"rabbitmq{number}"] = subprocess.Popen(
                [SCRIPTS / "rabbitmq-server"],
                env=self._environment(number),
                cwd=self._dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _join(self) -> None:
        for number in (1, 2):
            self._await_running(number)
        self.control(2, "stop_app")
        self.control(2, "join_cluster", _name(1))
        self.control(2, "start_app")
        self.control(1, "set_policy", "mirror", ".*", json.dumps(POLICY), "--apply-to", "queues")

    def _await_running(self, number: int) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.control(number, "await_startup")
                return
            except NotServed:
                if time.monotonic() > deadline or self._nodes[f"rabbitmq{number}"].poll() is not None:
                    log = (self._dir / f"node{number}.log").read_text(errors="replace")[-2000:]
                    raise NotServed(f"RabbitMQ's node {number} does not start; its log ends with:\n{log}") from None
            time.sleep(0.5)

    def _stop(self) -> None:
        processes = [*reversed(self._nodes.values()), *filter(None, [self._mapper])]
        for process in processes:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _name(number: int) -> str:
    return f"qmqbench{number}@localhost"


def _free_ports(count: int) -> list[int]:
    ports = (port for port in range(FIRST_PORT, 32_768) if is_free(port))
    return [next(ports) for _ in range(count)]


QUEUE = "benchmark"
WINDOW = 1_000
"""Unconfirmed messages; RabbitMQ's rate hardly changes from 256 to 16,000."""


def missing() -> str:
    """Return the missing requirements of the comparison, or ""."""
    if not is_installed():
        return "RabbitMQ is not installed (Debian: apt-get install rabbitmq-server)"
    if importlib.util.find_spec("pamqp") is None:
        return "the Python package pamqp is not installed (it is in qmq's dev extra)"
    return ""


def measure(run_dir: Path, sizes: Sizes, say: Callable[[str], None]) -> list[Figure]:
    """Produces with publisher confirms into a mirrored queue of two nodes; one cluster for all measurements."""
    say("starting two RabbitMQ nodes")
    log = run_dir.parent / "rabbitmq-client.log"
    with RabbitMq(run_dir) as nodes, Worker("benchmarks.rabbitmq_client", log, str(nodes.port)) as client:
        loads = [("produce_1k", 1024, WINDOW), ("produce_100b", 100, WINDOW), ("send_each", 1024, IN_FLIGHT)]
        figures = [_rate(nodes, client, sizes, load, say) for load in loads]
        p50 = Figure("rabbitmq_send_one_p50_ms", more_is_better=False)
        for _ in range(sizes.repetitions):
            clock = Clock({})
            measured = client.run("send_one", subject=QUEUE, messages=sizes.peer_one, size=1024)
            p50.values.append(measured["p50_ms"])
            p50.elsewhere.append(clock.spent().elsewhere)
            say(f"{p50.name} {measured['p50_ms']:.3f}")
    return [*figures, p50]


def _rate(
    nodes: RabbitMq, client: Worker, sizes: Sizes, load: tuple[str, int, int], say: Callable[[str], None]
) -> Figure:
    name, size, in_flight = load
    figure = Figure(f"rabbitmq_{name}_per_s")
    pids = {"client": client.pid, **nodes.pids}
    cpu_s = dict.fromkeys(pids, 0.0)
    client.run("publish", subject=QUEUE, messages=sizes.peer // 5, size=size, in_flight=in_flight)
    for _ in range(sizes.repetitions):
        client.run("purge", subject=QUEUE)
        clock = Clock(pids)
        measured = client.run("publish", subject=QUEUE, messages=sizes.peer, size=size, in_flight=in_flight)
        spent = clock.spent()
        figure.values.append(measured["messages"] / measured["seconds"])
        figure.elsewhere.append(spent.elsewhere)
        cpu_s = {process: cpu_s[process] + seconds for process, seconds in spent.cpu_s.items()}
        say(f"{figure.name} {figure.values[-1]:,.0f}")
    messages = sizes.peer * sizes.repetitions
    figure.cpu_us = {process: seconds / messages * 1e6 for process, seconds in cpu_s.items()}
    return figure


def ratios(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Return our speed over RabbitMQ's, for times the inverse; only of figures measured on both sides."""
    found = {}
    for name, ours in figures.items():
        if (peer := figures.get(f"rabbitmq_{name}")) is not None:
            found[f"ratio_{name}"] = ours.value / peer.value if ours.more_is_better else peer.value / ours.value
    return found
