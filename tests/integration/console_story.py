"""Shell. A real cluster on a bad night: the scene of the console's walk and of its pictures.

python -m tests.integration.console_story FOLDER      draws each page into FOLDER (make console-pictures)
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import qmq
import qmq.blocking
from qmq.ledger import PROVEN, Entry, Ledger
from tests.integration.cluster_world import running, until
from tests.integration.watchdog_world import KEY, Application, WatchdogProcess, register
from tests.support.chromium import Chromium

NIGHT_MS = 86_400_000


@contextmanager
def bad_night(folder):
    """The cluster; an outbox with a poisoned row; three nights of the audit.

    g2 is marked readonly; billing has not consumed most of order.changed; mail gave up on three messages of
    mail.wanted.
    """
    ledger = _nights(folder / "ledger")
    settings = {"audit_ledger": str(ledger), "password_keys": [KEY]}
    application = Application(f"sqlite:///{folder}/shop.db")
    with (
        running(folder / "cluster", groups=("g1", "g2"), delay_groups=("d1",), metaserver=settings) as cluster,
        WatchdogProcess(cluster, folder) as watchdog,
    ):
        cluster.send_all("order.changed", 20)
        cluster.consume_all("order.changed", "billing", 20)
        cluster.send_all("order.changed", 40, name="later")
        cluster.consume_all("order.changed", "search", 60)
        asyncio.run(_dead_letters(cluster))
        until(lambda: watchdog.is_leader, "the watchdog leads")
        application.write_rows(["poison"])
        register(cluster, application.source)
        until(lambda: application.count("status = -2") == 1, "the poison is parked")
        cluster.manage("MarkReadonlyBrokerGroup", brokerGroup="g2")
        _delayed(cluster)
        until(lambda: len(cluster.manage("Rates", brokerGroup="g1")["rates"]) > 1, "there is something to draw")
        yield cluster
    application.close()


def _nights(folder):
    ledger, now = Ledger(folder), time.time_ns() // 1_000_000
    for night in (3, 2, 1):
        at_ms = now - night * NIGHT_MS + 7_200_000
        for group in ("g1", "g2", "d1"):
            run = time.strftime("%Y-%m-%dT%H%M", time.gmtime(at_ms / 1000))
            ledger.append(Entry(run, at_ms, group, PROVEN, verified=4096 * (5 - night), by="audit@mq1"))
    return folder


async def _dead_letters(cluster):
    async with cluster.producer() as sender:
        for number in range(3):
            order = 4711 + number
            mail_body = {"order": order, "to": None, "lines": [{"sku": f"A-{number}", "price": 12.5}]}
            await sender.send(qmq.Message.of("mail.wanted", mail_body, {"order": str(order)}))
    mail = cluster.consumer()

    @mail.listen("mail.wanted", group="mail", start="earliest", retries_max=1, retry_delay=0.05)
    async def send_mail(message):
        raise ValueError(f"no address for order {message['order']}")

    running = asyncio.create_task(mail.run())
    while len(await asyncio.to_thread(_dead, cluster)) < 3:
        await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _dead(cluster):
    return cluster.manage("Browse", subject="mail.wanted", deadLettersOf="mail")["messages"]


def _delayed(cluster):
    with qmq.blocking.Producer(metaserver=cluster.metaserver, token=cluster.token, app="shop") as sender:
        sender.put_recurring(qmq.Message("report.wanted"), name="nightly", cron="0 3 * * *", timezone="Europe/Berlin")
        for hours in (1, 2, 2, 5, 9):
            sender.send(qmq.Message("reminder", {"n": str(hours)}), delay=hours * 3600)


@contextmanager
def something_late(cluster):
    """Make a message late: it is due while no group accepts messages."""
    cluster.manage("MarkReadonlyBrokerGroup", brokerGroup="g1")
    with qmq.blocking.Producer(metaserver=cluster.metaserver, token=cluster.token, app="shop") as sender:
        sender.send(qmq.Message("nowhere", {"n": "1"}), delay=1)
    until(lambda: cluster.manage("DelayStats")["groups"][0]["dueMessages"], "one is late")
    yield
    cluster.manage("UnMarkReadonlyBrokerGroup", brokerGroup="g1")


PICTURES = {
    "overview": ("/console", 1100),
    "group": ("/console/group?name=g1", 900),
    "subjects": ("/console/subjects", 420),
    "consumers": ("/console/consumers?subject=order.changed", 1100),
    "messages": ("/console/messages?subject=mail.wanted", 620),
    "dead": ("/console/messages?subject=mail.wanted&dead=mail", 620),
    "delayed": ("/console/delayed", 860),
    "outbox": ("/console/outbox", 640),
    "trail": ("/console/trail", 560),
    "audit": ("/console/audit", 560),
    "doctor": ("/console/doctor", 560),
    "change": ("/console/change?action=OnOffline&subject=order.changed&consumerGroup=billing", 620),
}
"""Page -> its address and the height of its picture."""
WIDTH = 1280
PLACE = """(w => { while (w.nextNode()) w.currentNode.data = w.currentNode.data.replaceAll('FOLDER', '/srv') })
    (document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT))"""
"""The folder of this run means nothing to a reader."""


def _some_traffic(cluster, browser):
    """Half a minute in which there is something to draw; a subject is counted while its page is looked at."""
    for step, count in enumerate((200, 500, 900, 650, 800, 300, 450, 400)):
        cluster.send_all("order.changed", count, name=f"step{step}")
        cluster.consume_all("order.changed", "search", count)
        browser.open(cluster.metaserver + PICTURES["consumers"][0])
        time.sleep(4)


def draw(into):
    with tempfile.TemporaryDirectory() as folder, bad_night(Path(folder)) as cluster:
        token = cluster.manage("AddToken", name="anna", role="operator")["token"]
        with Chromium(Path(folder) / "profile") as browser:
            browser.command(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=1200, deviceScaleFactor=1, mobile=False
            )
            browser.open(f"{cluster.metaserver}/console")
            browser.type(token)
            browser.follow()
            _some_traffic(cluster, browser)
            for name, (path, height) in PICTURES.items():
                with something_late(cluster) if name == "delayed" else nullcontext():
                    browser.open(cluster.metaserver + path)
                browser.run(PLACE.replace("FOLDER", folder))
                shown = min(height, browser.run("document.documentElement.scrollHeight"))
                (into / f"console-{name}.png").write_bytes(browser.picture(WIDTH, shown))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
