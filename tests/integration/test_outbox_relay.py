"""Shell. A producer sends the rows of its outbox after an outage or a crash, without a watchdog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

from qmq.deploy.control import read_copy
from tests.integration.cluster_world import WAIT_S, running, until
from tests.support.http import ask
from tests.support.ports import kept_port
from tests.unit.idempotence.stores import async_url

SUBJECT = "order.paid"
SHOP = """
import logging, sys
import uvicorn
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
import qmq
from qmq.fastapi import Clients

metaserver, url, port = sys.argv[1:]
logging.basicConfig(level="INFO", format="%(levelname)s %(name)s %(message)s")
engine = create_async_engine(url)
producer = qmq.Producer(metaserver=metaserver, app="shop", timeout_s=2.0, outbox=engine, outbox_age_s=4.0)
clients = Clients(producer)
app = FastAPI(lifespan=clients.lifespan)

@app.post("/orders/{number}")
async def pay(number: int) -> str:
    async with AsyncSession(engine) as session, session.begin():
        await producer.send(qmq.Message("order.paid", {"n": str(number)}, id=f"order-{number}"), session=session)
    return "paid"

@app.get("/health", dependencies=[Depends(clients.check)])
async def health() -> str:
    return "well"

@app.get("/running", dependencies=[Depends(clients.check_running)])
async def running() -> str:
    return "running"

uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
"""


class Shop:
    """Application process with a log file."""

    def __init__(self, cluster, url, port, log):
        self._port, self.log = port, log
        command = [sys.executable, "-c", SHOP, cluster.metaserver, url, str(port)]
        with log.open("ab") as file:
            environment = os.environ | {"QMQ_TOKEN": cluster.token}
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        until(lambda: self.ask("/running") is not None, "the shop answers")

    def ask(self, path, method="GET"):
        """Return status and JSON; None without an answer."""
        answer = ask(f"http://127.0.0.1:{self._port}{path}", method)
        return answer and (answer.status_code, answer.json())

    def trouble(self):
        """Return the detail of a bad health answer, or an empty text."""
        status, answer = self.ask("/health")
        return answer["detail"] if status == 503 else ""

    def pay(self, numbers):
        assert {self.ask(f"/orders/{number}", "POST") for number in numbers} == {(200, "paid")}

    def lines(self, text):
        return [line for line in self.log.read_text().splitlines() if text in line]

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.process.wait(WAIT_S)


@contextmanager
def shop_of(*arguments):
    shop = Shop(*arguments)
    try:
        yield shop
    finally:
        shop.process.kill()
        shop.process.wait(WAIT_S)


def test_producer_sends_rows_of_an_outage_or_crash(tmp_path, database_url, application):
    url, log = async_url(database_url), tmp_path / "shop.log"
    with running(tmp_path / "cluster") as cluster:
        port = kept_port()  # while the ports of the metaserver are in use
        cluster.end("metaserver")
        with shop_of(cluster, url, port, log) as shop:
            shop.pay(range(5))
            until(
                lambda: shop.trouble().startswith("5 messages wait in the outbox, the oldest for"),
                "health reports the rows",
            )
            assert "sent no route" in shop.trouble()
            assert shop.ask("/running") == (200, "running") and application.count() == 5
            cluster.begin("metaserver")
            until(lambda: shop.ask("/health") == (200, "well"), "all rows are sent")
            assert application.count("1 = 1") == 0
            assert len(shop.lines("messages wait in the outbox")) == len(shop.lines("no message waits")) == 1

            cluster.end("metaserver")
            shop.end()
        with shop_of(cluster, url, port, log) as shop:
            shop.pay(range(5, 8))
            shop.end(signal.SIGKILL)
        assert application.count() == 3
        cluster.begin("metaserver")
        with shop_of(cluster, url, port, log) as shop:
            until(lambda: application.count("1 = 1") == 0, "the rows of the killed process are sent")
            shop.end()
        data = cluster.data(cluster.broker("g1", "master"))
    stored = Counter(id for subject, _, id in read_copy(data).messages if subject == SUBJECT)
    assert stored == Counter(f"order-{number}" for number in range(8))
