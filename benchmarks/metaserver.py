"""Shell. `make bench-metaserver`: one metaserver with 100,000 subjects, 2,000 broker groups and 20,000 clients.

fill     groups are restored from a backup, their 4,000 brokers send heartbeats, clients create the subjects
start    the metaserver restarts with all of that in its database
console  each of its pages is requested, one by one
watch    a group is marked readonly and unmarked: times until the first and the last client confirm the route
look up  clients connect, request one subject, and leave, while nothing happens and while marks change
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from benchmarks.figures import MIB, Clock, Figure, cpu_seconds, describe, free_port, resident_bytes, rounded
from benchmarks.metaserver_load import HOT, group_name, subject_name
from qmq.deploy.plan import write_atomically
from qmq.errors import QmqError
from qmq.ledger import PROVEN, SUFFIX, Entry, encode_entry

PAGE_TIMES = 20
PAGES = {
    "overview": "/console",
    "overview_last": "/console?page=19",
    "overview_readonly": "/console?state=readonly",
    "overview_name": f"/console?name={group_name(7)}",
    "group": f"/console/group?name={group_name(7)}",
    "subjects": "/console/subjects",
    "subjects_prefix": f"/console/subjects?prefix={subject_name(1)}",
    "subjects_later": f"/console/subjects?after={subject_name(50_000)}",
    "subjects_of_group": f"/console/subjects?group={group_name(7)}",
    "consumers": "/console/consumers",
    "consumers_subject": f"/console/consumers?subject={HOT}",
    "messages": f"/console/messages?subject={HOT}",
    "delayed": "/console/delayed",
    "outbox": "/console/outbox",
    "trail": "/console/trail",
    "audit": "/console/audit",
    "change": "/console/change?action=DrainGroup",
}


NIGHTS = 30


def fill_ledger(folder: Path, groups: int) -> None:
    """Write a month of nights of every broker group."""
    folder.mkdir()
    for group in map(group_name, range(groups)):
        read = {"master": 1 << 30, "slave": 1 << 30}
        nights = [
            Entry(f"night {night}", 1_790_000_000_000 + 86_400_000 * night, group, PROVEN, verified=4096, read=read)
            for night in range(NIGHTS)
        ]
        (folder / f"{group}{SUFFIX}").write_bytes(b"".join(map(encode_entry, nights)))


def measure_console(port: int, token: str, note: Callable[[str, float, str], None]) -> None:
    """Log in and request each page; record the median and the maximum time, in milliseconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    cookie = _log_in(connection, token)
    for name, address in PAGES.items():
        times = sorted(_take(connection, cookie, address) for _ in range(PAGE_TIMES))
        note(f"console_{name}_p50_ms", times[PAGE_TIMES // 2] * 1000, "from the request to the last byte of the page")
        note(f"console_{name}_max_ms", times[-1] * 1000, f"the slowest of {PAGE_TIMES}")
    connection.close()


def _log_in(connection: http.client.HTTPConnection, token: str) -> str:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/login", urlencode({"token": token, "next": ""}), headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 303:
        raise QmqError(f"the console rejects the login: {answer.status}")
    return (answer.getheader("Set-Cookie") or "").partition(";")[0]


def _take(connection: http.client.HTTPConnection, cookie: str, address: str) -> float:
    began = time.monotonic()
    connection.request("GET", address, headers={"Cookie": cookie})
    answer = connection.getresponse()
    page = answer.read()
    if answer.status != 200 or not page.rstrip().endswith(b"</html>"):
        raise QmqError(f"{address}: {answer.status} {page[:300].decode('utf-8', 'replace')}")
    return time.monotonic() - began


GOALS = {
    "start_s": 5.0,
    "rss_mib": 1024.0 * 1000**3 / (1 << 30),  # 1 GB
    "mark_to_all_producers_2000_s": 1.0,
    "route_to_all_watchers_s": 2.0,
    "look_up_p99_ms": 20.0,
    **{f"console_{page}_p50_ms": 200.0 for page in PAGES},
}


@dataclass(frozen=True)
class Scale:
    """Numbers of subjects, groups and clients."""

    subjects: int = 100_000
    groups: int = 2_000
    watchers: int = 20_000
    first_watchers: int = 2_000
    """Watchers with a connection each."""
    connections: int = 2_000
    """Connections shared by the other watchers."""
    marks: int = 6
    look_ups: int = 3_000


QUICK = Scale(subjects=5_000, groups=100, watchers=1_000, first_watchers=200, connections=100, marks=2, look_ups=300)


class Process:
    """A load process, controlled by lines of JSON."""

    def __init__(self, words: dict[str, Any], log: IO[bytes]) -> None:
        command = [sys.executable, "-m", "benchmarks.metaserver_load", json.dumps(words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **words: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise QmqError(f"a load process ended with status {self._process.wait()}; see load.log")
        words: dict[str, Any] = json.loads(line)
        return words

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Metaserver:
    """The measured process, and requests to it."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self.token = secrets.token_hex(16)
        self.http_port = free_port()
        self.grpc_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> float:
        """Start it; return the time until it answered with the clients' address."""
        settings = {
            "DATABASE": f"sqlite:///{self._dir / 'metaserver.db'}",
            "HTTP_PORT": self.http_port,
            "GRPC_PORT": self.grpc_port,
            "CLUSTER_TOKEN": self.token,
            "LOG_LEVEL": "ERROR",
            "AUDIT_LEDGER": self._dir / "ledger",
        }
        environ = os.environ | {f"QMQ_METASERVER_{name}": str(value) for name, value in settings.items()}
        began = time.monotonic()
        with (self._dir / "metaserver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "qmq.metaserver"], env=environ, stdout=log, stderr=log
            )
        while time.monotonic() - began < 120:
            try:
                if self._ask("GET", "/meta/address")[0] == 200:
                    return time.monotonic() - began
            except OSError:
                pass
            if self._process.poll() is not None:
                raise QmqError("the metaserver ended; see metaserver.log")
            time.sleep(0.01)
        raise QmqError("the metaserver does not answer; see metaserver.log")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def act(self, action: str, **words: Any) -> Any:
        """Run an operator's action; return its data."""
        status, body = self._ask("POST", f"/api/v1/{action}", json.dumps(words))
        if status != 200:
            raise QmqError(f"{action}: {status} {body[:500].decode('utf-8', 'replace')}")
        return json.loads(body)["data"]

    def look_up(self, connection: http.client.HTTPConnection, subject: str) -> float:
        """Send GET /meta/routes; return its seconds."""
        began = time.monotonic()
        connection.request("GET", f"/meta/routes?subject={subject}", headers={"X-Api-Token": self.token})
        answer = json.loads(connection.getresponse().read())
        assert answer["routes"][0]["groups"]
        return time.monotonic() - began

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=180)
        try:
            headers = {"X-Api-Token": self.token, "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Bench:
    """One run."""

    def __init__(self, directory: Path, scale: Scale) -> None:
        self._dir = directory
        self._scale = scale
        self._began = time.monotonic()
        self._processes: list[Process] = []
        self._log = (directory / "load.log").open("wb")
        self.server = Metaserver(directory)
        self.figures: dict[str, Figure] = {}

    def run(self, *, console_alone: bool = False) -> None:
        """Measure everything, in the order of the module's docstring."""
        with self._ended():
            self.server.start()
            self._fill()
            if not console_alone:
                self._restart()
            self._console()
            if not console_alone:
                self._watch()

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for process in self._processes:
                process.end()
            self.server.stop()
            self._log.close()

    def _fill(self) -> None:
        scale = self._scale
        self._say(f"restoring {scale.groups} broker groups")
        backup = self.server.act("Backup")
        backup["tables"] |= _groups(scale.groups)
        began = time.monotonic()
        self.server.act("Restore", backup=backup)
        self._note("restore_s", time.monotonic() - began)
        self._start_brokers()
        self._say(f"clients bring {scale.subjects} subjects into being")
        fill = self._start("fill", connections=20, subjects=scale.subjects, each=min(1_000, scale.subjects))
        seconds = fill.receive()["seconds"]
        self._note("new_subjects_per_s", scale.subjects / seconds, "stored, and answered to the client")
        self._end(fill)

    def _start_brokers(self) -> None:
        scale = self._scale
        brokers = self._start("brokers", connections=min(200, scale.groups), first=0, groups=scale.groups)
        self._say(f"{brokers.receive()['ready']} brokers beat")

    def _restart(self) -> None:
        """Restart three times with all subjects in the database; brokers reconnect by themselves."""
        for _ in range(3):
            self.server.stop()
            self._note("start_s", self.server.start(), "to the first answer, from SQLite")
            self._note("start_cpu_s", cpu_seconds(self.server.pid), "CPU time of that, imports included")
        self._note("rss_after_start_mib", resident_bytes(self.server.pid) / MIB)

    def _console(self) -> None:
        """Measure with some groups marked readonly: they come first, with their reasons."""
        token = self.server.act("AddToken", name="bench", role="operator")["token"]
        for number in range(0, 20, 2):
            self.server.act("MarkReadonlyBrokerGroup", brokerGroup=group_name(number))
        fill_ledger(self._dir / "ledger", self._scale.groups)
        measure_console(self.server.http_port, token, self._note)
        for number in range(0, 20, 2):
            self.server.act("UnMarkReadonlyBrokerGroup", brokerGroup=group_name(number))

    def _watch(self) -> None:
        scale = self._scale
        lookups = self._start("lookups", connections=50, subjects=scale.subjects)
        lookups.receive()
        first = self._watchers(0, scale.first_watchers, scale.first_watchers)
        self._say(f"{scale.first_watchers} clients watch, each with a connection of its own")
        time.sleep(2)
        self._mark("_2000", [first])
        rest = scale.watchers - scale.first_watchers
        half = rest // 2
        others = [
            self._watchers(scale.first_watchers, half, scale.connections // 2),
            self._watchers(scale.first_watchers + half, rest - half, scale.connections // 2),
        ]
        self._say(f"{scale.watchers} clients watch")
        time.sleep(5)
        self._idle()
        lookups.send(count=scale.look_ups, per_s=200, new=False)
        self._note_spread("look_up", lookups.receive(), "one more subject on a stream that is open, 200 per second")
        lookups.send(count=scale.look_ups // 3, per_s=50, new=True)
        self._note_spread("new_client", lookups.receive(), "a new stream and its first route, 50 per second")
        self._look_up_http()
        self._mark("", [first, *others])
        lookups.send(count=scale.look_ups, per_s=100, new=False)
        self._mark("_busy", [first, *others])
        self._note_spread("look_up_busy", lookups.receive(), "while all clients receive marks and confirm them")
        self._note("rss_mib", resident_bytes(self.server.pid) / MIB)

    def _watchers(self, first: int, count: int, connections: int) -> Process:
        process = self._start(
            "watchers", connections=connections, first=first, watchers=count, subjects=self._scale.subjects
        )
        process.receive()
        return process

    def _idle(self) -> None:
        clock = Clock({"metaserver": self.server.pid})
        time.sleep(5)
        spent = clock.spent()
        note = f"of a core, with {self._scale.groups * 2} heartbeats per second"
        self._note("idle_cpu", spent.cpu_s["metaserver"] / spent.seconds, note)

    def _note_spread(self, name: str, spread: dict[str, float], note: str) -> None:
        self._note(f"{name}_p50_ms", spread["p50"], note)
        self._note(f"{name}_p99_ms", spread["p99"], note)
        self._note(f"{name}_max_ms", spread["p100"], note)

    def _look_up_http(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.http_port, timeout=30)
        step = max(1, self._scale.subjects // 500)
        names = [subject_name(number) for number in range(0, self._scale.subjects, step)]
        times = sorted(self.server.look_up(connection, name) for name in names)
        self._note("look_up_http_p99_ms", times[int(len(times) * 0.99)] * 1000, "GET /meta/routes, one by one")
        connection.close()

    def _mark(self, suffix: str, watchers: list[Process]) -> None:
        """Mark and unmark one of the hot subject's groups; all clients watch that subject."""
        name = _first_group(self.server.act("QuerySubjectRoute", subject=HOT))
        for process in watchers:
            process.send(group=name, writable=True)
        for process in watchers:
            process.receive()
        for number in range(self._scale.marks):
            writable = number % 2 == 1
            for process in watchers:
                process.send(group=name, writable=writable)
            time.sleep(0.2)  # the watchers have read their expectation by then
            pids = {"metaserver": self.server.pid, **{f"clients{n}": load.pid for n, load in enumerate(watchers)}}
            began, clock = time.monotonic(), Clock(pids)
            self.server.act("UnMarkReadonlyBrokerGroup" if writable else "MarkReadonlyBrokerGroup", brokerGroup=name)
            self._note(f"mark_answered{suffix}_s", time.monotonic() - began, "until the answer to the operator")
            answers = [process.receive() for process in watchers]
            last = max(words["last"] for words in answers) - began
            key = "mark_to_all_producers" if suffix == "_2000" else "route_to_all_watchers"
            self._note(f"{key}{suffix}_s", last, "from the operator's request to the last client")
            self._note(f"first_update{suffix}_s", min(words["first"] for words in answers) - began)
            self._note_cpu(suffix, clock.spent().cpu_s, sum(words["notified"] for words in answers))
            time.sleep(1.5)

    def _note_cpu(self, suffix: str, cpu_s: dict[str, float], informed: int) -> None:
        server_us = cpu_s.pop("metaserver") / informed * 1e6
        self._note(
            f"server_cpu_per_update{suffix}_us", server_us, "CPU time until the last client, heartbeats included"
        )
        self._note(
            f"client_cpu_per_update{suffix}_us", sum(cpu_s.values()) / informed * 1e6, "the same of simulated clients"
        )

    # Bookkeeping.

    def _start(self, role: str, **words: Any) -> Process:
        common = {"role": role, "address": self.server.address, "token": self.server.token}
        process = Process({**common, **words}, self._log)
        self._processes.append(process)
        return process

    def _end(self, process: Process) -> None:
        process.end()
        self._processes.remove(process)

    def _note(self, name: str, value: float, note: str = "") -> None:
        self.figures.setdefault(name, Figure(name, note=note, more_is_better="per_s" in name)).values.append(value)
        self._say(f"{name} {rounded(value)}")

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {line}", flush=True)


def _groups(count: int) -> dict[str, list[dict[str, Any]]]:
    """Return rows of `broker_group` and `broker`, as in a backup."""
    now = time.time_ns() // 1_000_000
    times = {"create_time": now, "update_time": now}
    groups, brokers = [], []
    for number in range(count):
        name = group_name(number)
        groups.append(
            {
                "group_name": name,
                "kind": 1,
                "term": 1,
                "half_swapped": False,
                "tag": "",
                "draining": False,
                "is_full": False,
                "min_copies": 2,
                "lost_term": 0,
                "failover": "default",
                "sync_mode": "automatic",
                **times,
            }
        )
        for role in (0, 1):
            brokers.append(
                {
                    "group_name": name,
                    "role": role,
                    "hostname": f"host{number:04d}-{role}",
                    "ip": "127.0.0.1",
                    "serve_port": 20881,
                    "sync_port": 20882,
                    "control_port": 20883,
                    "metrics_port": 20884,
                    "incarnation": f"disk{number:04d}-{role}",
                    "instance": "",
                    "complete": False,
                    "fill_id": "",
                    "fill_allowed": False,
                    **times,
                }
            )
    return {"broker_group": groups, "broker": brokers}


def _first_group(route: Any) -> str:
    """Return a broker group of QuerySubjectRoute's answer."""
    row = route[0] if isinstance(route, list) else route
    groups = row.get("brokerGroups") or row["groups"]
    first = groups[0]
    return str(first if isinstance(first, str) else first["brokerGroup"])


def table(figures: dict[str, Figure]) -> str:
    lines = [f"{'':<36}{'median':>10}{'worst':>10}  {'goal':<16}"]
    for figure in figures.values():
        goal = GOALS.get(figure.name)
        met = "" if goal is None else f"≤ {rounded(goal)} {'met' if figure.value <= goal else 'MISSED'}"
        numbers = f"{rounded(figure.value):>10,}{rounded(figure.worst):>10,}"
        lines.append(f"{figure.name:<36}{numbers}  {met:<16}{figure.note}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metaserver", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute that shows that all works; not figures to quote")
    parser.add_argument("--console", action="store_true", help="the console's pages alone")
    run_dir = Path(os.environ.get("RUN_DIR", ".run")) / "bench-metaserver"
    parser.add_argument("--dir", type=Path, default=run_dir, help="database and logs")
    parser.add_argument("--out", type=Path, default=Path(".run/bench-metaserver.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end all processes, as Ctrl-C does
    shutil.rmtree(options.dir, ignore_errors=True)
    options.dir.mkdir(parents=True)
    machine = describe(options.dir)
    bench = Bench(options.dir.resolve(), QUICK if options.quick else Scale())
    try:
        bench.run(console_alone=options.console)
    except QmqError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{table(bench.figures)}\n")
    content = {name: figure.as_json() for name, figure in bench.figures.items()}
    write_atomically(options.out, json.dumps({"figures": content, "machine": machine}, indent=2) + "\n")
    print(f"written to {options.out}")
    missed = [name for name, goal in GOALS.items() if name in bench.figures and bench.figures[name].value > goal]
    return 1 if missed and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
