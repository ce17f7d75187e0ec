"""Shell. The page with the buttons: runs a cluster, a watchdog and the shop, kills them on request, and shows the
results.

    python docs/examples/shop/panel.py

All data is in one directory, so the next start finds the same orders.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from deaths import Step
from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from qmq.deploy.cluster import Cluster
from qmq.deploy.processes import ROOT

HERE = Path(__file__).parent
RESTART_S = 1.0
"""Pause before a killed process is started again; long enough to be seen on the page."""
ANSWER_S = 10.0
OPEN_S = 60.0
"""Time that a customer waits for a starting shop."""
AGE_S = 3
"""Age at which the watchdog sends a row. In production it is a minute, longer than a producer tries."""


class Kept:
    """A process that is restarted when it ends."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.deaths = 0
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_at = 0.0

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(ANSWER_S)

    async def keep(self) -> None:
        while True:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env=os.environ | self._environment, stdout=log, stderr=log, cwd=ROOT
                )
            await asyncio.to_thread(self._process.wait)
            self.deaths += 1
            await asyncio.sleep(RESTART_S)


class Panel:
    """All processes, and the orders since the panel was started."""

    def __init__(self, directory: Path, cluster_port: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._database = directory.resolve() / "shop.db"
        self._engine = create_engine(f"sqlite:///{self._database}")
        self._directory = directory.resolve()
        self._cluster_port = cluster_port
        self._payments: list[dict[str, Any]] = []
        self.kept: dict[str, Kept] = {}

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.cluster = Cluster(
            self._directory / "cluster",
            groups=("g1",),
            http_port=self._cluster_port,
            broker_port=self._cluster_port + 2,
            restart_s=RESTART_S,
        )
        await asyncio.to_thread(self.cluster.start)
        keepers: list[asyncio.Task[None]] = []
        try:
            await asyncio.to_thread(self._register)
            self._shop_port = _free_port()
            self._keep(
                "shop",
                ["-m", "uvicorn", "shop:app", "--app-dir", str(HERE), "--port", str(self._shop_port)],
                {
                    "SHOP_DATABASE": f"sqlite+aiosqlite:///{self._database}",
                    "QMQ_METASERVER": self.cluster.metaserver,
                    "QMQ_TOKEN": self.cluster.token,
                },
            )
            self._keep(
                "watchdog",
                ["-m", "qmq.watchdog"],
                {
                    "QMQ_WATCHDOG_METASERVER": self.cluster.metaserver,
                    "QMQ_WATCHDOG_TOKEN": self.cluster.token,
                    "QMQ_WATCHDOG_HTTP_PORT": str(_free_port()),
                },
            )
            keepers += [asyncio.create_task(kept.keep()) for kept in self.kept.values()]
            yield
        finally:
            for keeper in keepers:
                keeper.cancel()
            for kept in self.kept.values():
                kept.end()
            await asyncio.to_thread(self.cluster.stop)
            self._engine.dispose()

    def _keep(self, name: str, arguments: list[str], environment: dict[str, str]) -> None:
        log = self._directory / f"{name}.log"
        self.kept[name] = Kept(name, [sys.executable, *arguments], environment, log)

    def _register(self) -> None:
        """Register the shop's database with the watchdog, as `tools.sh AddDb` does."""
        self.cluster.manage("AddDb", type="sqlite", database=str(self._database), age=AGE_S)

    # Actions of the buttons.

    async def pay(self, die: Step | None) -> None:
        payment = {"number": await asyncio.to_thread(self._next_number), "die": die, "answer": "…"}
        self._payments.append(payment)
        url = f"http://127.0.0.1:{self._shop_port}/orders/{payment['number']}" + (f"?die={die}" if die else "")
        payment["answer"] = await asyncio.to_thread(_post, url)

    def _next_number(self) -> int:
        known: list[int] = [payment["number"] for payment in self._payments]
        return 1 + max([0, *known, *self._read("SELECT number FROM orders")])

    def kill(self, name: str) -> None:
        if name == "master":
            self.cluster.kill("g1", "master")
        elif name in self.kept:
            self.kept[name].kill()
        else:
            raise HTTPException(404, f"there is no {name}")

    # Contents of the page.

    def state(self) -> dict[str, Any]:
        paid = set(self._read("SELECT number FROM orders"))
        tickets = self._read("SELECT order_number FROM tickets")
        answers = {payment["number"]: payment for payment in self._payments}
        return {
            "processes": {name: {"up": kept.is_up, "deaths": kept.deaths} for name, kept in self.kept.items()}
            | {"master": {"up": self.cluster.writable("g1"), "deaths": self.cluster.starts - 3}},
            "outbox": len(self._read("SELECT id FROM qmq_msg_queue")),
            "paid": len(paid),
            "tickets": len(tickets),
            "orders": [
                {
                    "number": number,
                    "paid": number in paid,
                    "tickets": tickets.count(number),
                    "die": answers.get(number, {}).get("die"),
                    "answer": answers.get(number, {}).get("answer", ""),
                }
                for number in sorted(paid | answers.keys(), reverse=True)[:100]
            ],
        }

    def _read(self, statement: str) -> list[int]:
        try:
            with self._engine.connect() as connection:
                return list(connection.execute(text(statement)).scalars())
        except OperationalError:
            return []  # the shop has not created its tables yet


def application(panel: Panel) -> FastAPI:
    app = FastAPI(title="Panel", lifespan=panel.lifespan)
    app.get("/")(lambda: FileResponse(HERE / "page.html"))
    app.get("/state")(panel.state)

    @app.post("/pay")
    async def pay(die: Step | None = None) -> dict[str, Any]:
        await panel.pay(die)
        return await asyncio.to_thread(panel.state)

    @app.post("/kill/{name}")
    def kill(name: str) -> dict[str, Any]:
        panel.kill(name)
        return panel.state()

    return app


def _post(url: str) -> str:
    """Send a POST to the shop, which may be starting; return its answer as text."""
    opener, deadline = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + OPEN_S
    while True:
        try:
            with opener.open(urllib.request.Request(url, method="POST"), timeout=ANSWER_S):
                return "paid"
        except OSError as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ConnectionRefusedError) or time.monotonic() > deadline:
                return f"no answer: {reason}"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".shop"), help="data and logs; default: .shop")
    parser.add_argument("--port", type=int, default=8000, help="of the page; default: 8000")
    parser.add_argument("--cluster-port", type=int, default=8180, help="where the cluster looks for free ports")
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    app = application(Panel(options.dir, options.cluster_port))
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
