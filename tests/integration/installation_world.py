"""Shell. An installation: metaservers on one database behind nginx, a broker group, clients."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import httpx

import qmq
from qmq.deploy.control import manage
from qmq.deploy.nginx import nginx_conf
from qmq.deploy.plan import write_settings
from qmq.deploy.processes import Service, module_command
from tests.integration.cluster_world import SETTINGS, WAIT_S, until
from tests.support.ports import free_ports

TOKEN = "cluster token of a test"
HEADERS = {"X-Api-Token": TOKEN}
HOST = "127.0.0.1"
SUBJECT = "order.changed"
HEARTBEAT_TIMEOUT_MS = 4000
"""Longer than a busy machine pauses a process."""
STEADY_S = 6.0
"""Longer than the heartbeat timeout: a silent broker would count as down by then."""

NGINX_MAIN = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-fastcgi;
    uwsgi_temp_path {folder}/nginx-uwsgi;
    scgi_temp_path {folder}/nginx-scgi;
    include {folder}/qmq.conf;
}}
"""


def start_nginx(folder, conf):
    """Start nginx with this part of its configuration; return its process."""
    (folder / "qmq.conf").write_text(conf)
    (folder / "nginx.conf").write_text(NGINX_MAIN.format(folder=folder))
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert program, "these tests need Debian's nginx: apt-get install nginx"
    return subprocess.Popen([program, "-c", folder / "nginx.conf", "-e", folder / "nginx.log"], start_new_session=True)


class Installation:
    """Processes of one installation in one folder; tests stop and start `metaservers` and `brokers`."""

    def __init__(self, folder, database, *, metaservers=2, copies=2, **settings):
        self.folder, self.database, self.settings = folder, database, settings
        ports = free_ports(2 * metaservers + 4 * copies + 1)
        self.nginx_port, *ports = ports
        self.metaservers = [self._metaserver(f"m{number}", ports.pop(), ports.pop()) for number in range(metaservers)]
        self.url = f"http://{HOST}:{self.nginx_port}"
        self.brokers = [self._broker(f"b{number}", [ports.pop() for _ in range(4)]) for number in range(copies)]

    def _metaserver(self, name, http_port, grpc_port):
        settings = {
            "host": HOST,
            "http_port": http_port,
            "grpc_port": grpc_port,
            "database": self.database,
            "cluster_token": TOKEN,
            "heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS,
            "broker_timeout_ms": 2000,
            "database_timeout_ms": 3000,
            "snapshot": str(self.folder / f"{name}.snapshot"),
        } | self.settings
        service = self._service(name, "metaserver", settings)
        service.url, service.grpc = f"http://{HOST}:{http_port}", f"{HOST}:{grpc_port}"
        return service

    def _broker(self, name, ports):
        serve, sync, control, metrics = ports
        settings = SETTINGS | {
            "hostname": name,
            "ip": HOST,
            "serve_port": serve,
            "sync_port": sync,
            "control_port": control,
            "metrics_port": metrics,
            "data": str(self.folder / name / "data"),
            "metaserver": self.url,
            "token": TOKEN,
        }
        service = self._service(name, "broker", settings)
        service.control = control
        service.place = {"hostname": name, "ip": HOST, "servePort": serve, "syncPort": sync}
        return service

    def _service(self, name, module, settings):
        config = self.folder / name / f"{module}.toml"
        write_settings(config, settings)
        return Service(name, module_command(f"qmq.{module}", config), self.folder / f"{name}.log")

    def start(self):
        for service in self.metaservers:
            service.start()
        self.wait_all(self.answers, "it answers")
        self._start_nginx()
        for number, broker in enumerate(self.brokers):
            manage(self.url, TOKEN, "AddBroker", brokerGroup="g1", role=min(number, 1), **broker.place)
            broker.start()
        self.wait_writable()
        return self

    def _start_nginx(self):
        addresses = [service.url.removeprefix("http://") for service in self.metaservers]
        self.nginx = start_nginx(self.folder, nginx_conf(f"{HOST}:{self.nginx_port}", addresses))
        until(lambda: self.answers(self.url), "nginx answers")

    def stop(self):
        for service in (*self.brokers, *self.metaservers):
            if service.pid:
                service.signal(signal.SIGCONT)
                service.signal(signal.SIGTERM)
        for service in (*self.brokers, *self.metaservers):
            end(service, signal.SIGKILL) if service.pid and not ended(service, 30) else None
        if nginx := getattr(self, "nginx", None):
            nginx.terminate()
            nginx.wait(WAIT_S)

    @staticmethod
    def answers(url):
        with suppress(httpx.HTTPError):
            return httpx.get(f"{url}/meta/address", trust_env=False, timeout=10).status_code == 200
        return False

    @staticmethod
    def look(url, action="ListBrokerGroups", **words):
        """Return the answer of one metaserver, or of any through nginx."""
        answer = httpx.get(f"{url}/api/v1/{action}", params=words, headers=HEADERS, trust_env=False, timeout=20)
        answer.raise_for_status()
        return answer.json()["data"]

    def writable(self, url):
        with suppress(httpx.HTTPError):
            return all(group["writable"] for group in self.look(url))
        return False

    def wait_all(self, condition, what):
        """Wait until a condition on its URL holds at each metaserver."""
        for service in self.metaservers:
            until(lambda url=service.url: condition(url), f"{service.name}: {what}")

    def wait_writable(self):
        self.wait_all(self.writable, "all groups are writable")

    def up(self, url):
        return {row["hostname"]: row["up"] for row in self.look(url, "ListBrokers")}


def ended(service, timeout_s):
    deadline = time.monotonic() + timeout_s
    while service.pid and time.monotonic() < deadline:
        time.sleep(0.02)
    return not service.pid


def end(service, how):
    """Send a signal, and wait until the process has ended."""
    service.signal(how)
    assert ended(service, WAIT_S), f"{service.name} does not end"


@contextmanager
def installation(folder, database, **options):
    world = Installation(folder, database, **options)
    try:
        yield world.start()
    finally:
        world.stop()


class Observers:
    """Clients, and operators at nginx and at each metaserver; `problems` lists every failure that they met."""

    def __init__(self, world):
        self.world = world
        self.sent, self.problems, self.looks = 0, [], 0
        self.slowest_s = 0.0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._produce, self._list, self._watch_metaservers)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _produce(self):
        try:
            asyncio.run(self._send())
        except Exception as error:
            self.problems.append(f"producer: {error!r}")

    async def _send(self):
        async with qmq.Producer(metaserver=self.world.url, app="test", token=TOKEN) as producer:
            while not self._stop.is_set():
                began = time.monotonic()
                receipt = await producer.send(qmq.Message(SUBJECT, {"number": str(self.sent)}))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if receipt.outcome.name != "STORED":
                    self.problems.append(f"message {self.sent}: {receipt.outcome} {receipt.reason}")
                self.sent += 1
                await asyncio.sleep(0.005)

    def _list(self):
        """List through nginx: each answer must come, with all groups writable and all brokers up."""
        while not self._stop.wait(0.05):
            try:
                down = [group for group in self.world.look(self.world.url) if not group["writable"]]
                down += [name for name, up in self.world.up(self.world.url).items() if not up]
                self.problems += [f"operator: {each} is down" for each in down]
                self.looks += 1
            except httpx.HTTPError as error:
                self.problems.append(f"operator: {error!r}")

    def _watch_metaservers(self):
        """List at each metaserver: every answer that comes must show all brokers up."""
        while not self._stop.wait(0.05):
            for service in self.world.metaservers:
                with suppress(httpx.TransportError):
                    down = [name for name, up in self.world.up(service.url).items() if not up]
                    if down or not all(group["writable"] for group in self.world.look(service.url)):
                        self.problems.append(f"{service.name}: g1 is not writable, or {down} are down")
