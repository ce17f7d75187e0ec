"""Shell. Console over real actions: a browser with a cookie, one token of each role, fake brokers."""

from __future__ import annotations

import html
import random
import re
from dataclasses import replace

import httpx

from qmq.ledger import FINDINGS, PROVEN, Entry, Ledger
from qmq.metaserver.access import Access, new_token
from qmq.metaserver.actions import Answer, Status
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.routes import Console
from qmq.metaserver.console.sessions import Sessions
from qmq.metaserver.console.survey import Surveyor
from qmq.metaserver.http.app import build_app
from qmq.metaserver.http.guard import Limits
from qmq.metaserver.model import LeaseRow
from qmq.metaserver.rpc.access import Refusals, wall_ms
from qmq.proto import qmq_pb2 as pb
from tests.unit.metaserver.actions_world import World, left

CLUSTER = "the key of the installation"
ROLES = ("viewer", "operator", "admin", "client")


class ConsoleWorld(World):
    """One metaserver with its console."""

    def __init__(self, database, **options):
        super().__init__(database)
        self.access, refusals = Access([CLUSTER]), Refusals(self.metrics)
        dice = random.Random(7).randbytes
        made = {role: new_token(role, role, known=(), random_bytes=dice, now_ms=wall_ms()) for role in ROLES}
        self.tokens = {role: text for role, (_, text) in made.items()}
        self.rows = [row for row, _ in made.values()]
        self.access.replace(self.rows)
        self.trouble = ""
        self.surveyor = Surveyor(self.context, token=CLUSTER)
        self.served = Console(
            self.actions,
            Sessions(self.access, [CLUSTER], dice),
            refusals,
            surveyor=self.surveyor,
            database_trouble=lambda: self.trouble,
            **options,
        )
        self.app = build_app(
            self.actions,
            self.access,
            self.metrics,
            refusals,
            address="10.0.0.1:8081",
            database_trouble=lambda: "",
            limits=Limits(65_536, 65_536, 1000),
            more=self.served.routes(),
        )
        self.browser = self.new_browser()

    def new_browser(self):
        transport = httpx.ASGITransport(self.app, client=("10.0.0.9", 5))
        return httpx.AsyncClient(transport=transport, base_url="http://metaserver")

    async def log_in(self, role="viewer"):
        self.browser = self.new_browser()
        answer = await self.browser.post("/console/login", data={"token": self.tokens[role], "next": ""})
        assert answer.status_code == 303, answer.text
        return answer

    async def see(self, path="", **words):
        """Return a page's HTML after a new survey, and check that it is complete."""
        if not path:
            await self.surveyor.look()
        answer = await self.browser.get(f"/console{path}", params=words or None)
        assert answer.status_code == 200 and answer.text.rstrip().endswith("</html>"), answer.text
        return answer.text

    async def read(self, path="", **words):
        """Return the visible text of a page."""
        return text_of(await self.see(path, **words))

    async def send(self, path, /, **fields):
        return await self.browser.post(f"/console{path}", data=fields)

    async def csrf(self):
        page = await self.see("/change", action="MarkReadonlyBrokerGroup")
        return re.search(r'name="csrf" value="([^"]+)"', page)[1]


def text_of(page):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


URL = "mmm://db1:3306"
LEASE = LeaseRow("watchdog/default", "w1", 0, 1, "10.0.0.7:8083")


DELAY_GROUP = {
    "brokerGroup": "d1",
    "pendingMessages": 7,
    "dueMessages": 3,
    "dueAgeMs": 61_000,
    "nextDue": 1,
    "inFlight": {"g1": 2},
    "waiting": [{"subject": "s", "messages": 3, "why": "no route"}],
}
DELAYED = {"brokerGroup": "d1", "subject": "s", "id": "m-9", "key": "k", "due": 1, "bytes": 9, "problem": ""}
SCHEDULE = {
    "brokerGroup": "d1",
    "subject": "report",
    "name": "nightly",
    "owner": "shop",
    "cron": "0 3 * * *",
    "timezone": "Europe/Berlin",
    "next": 1,
}


class PlayedWatchdogs:
    """The active watchdog of one room, with one parked row.

    Args:
        reason: why the row is parked.
    """

    def __init__(self, reason):
        self.asked = []
        self.fails = None
        self.answer = {"database": URL, "retried": 1}
        self._reason = reason

    async def ask(self, address, path, words, *, changes=False):
        self.asked.append((address, path, changes))
        if changes:
            if self.fails:
                raise self.fails
            return {"databases": [self.answer]}
        if path == "/settings":
            return {"room": "default", "token": "set, not shown"}
        row = {"id": 17, "state": "parked", "age": 61.5, "errors": 3, "subject": "order.new", "messageId": "m-1"}
        database = {"database": URL, "parked": 1, "pending": 0, "claimed": 0, "oldest": 0.0}
        return {
            "databases": [
                database | {"rows": [row | {"reason": self._reason}]},
                {"database": "x://y:1", "problem": "away"},
            ]
        }


def night(ledger, group, at_ms, verdict=PROVEN, **more):
    """Append a run of the nightly audit to a ledger."""
    ledger.append(Entry(f"run {at_ms}", at_ms, group, verdict, verified=4096 * at_ms, by="audit@mq1", **more))


async def with_something_on_every_page(world, folder):
    """Groups, one of them readonly; lag; dead letters; parked rows; delayed messages; nights of the audit."""
    await world.serving_copies("order.changed", "quiet", groups=("g1", "g2"))
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g2")
    now = wall_ms()
    stuck = left("order.changed", "billing", 1234, now - 3_725_000)
    stuck.consumers.append(pb.ConsumerProgress(consumer="c1", connected=False, unacked=7))
    stuck.causes.append("no consumer")
    world.brokers.progress["g1"] = [stuck]
    world.brokers.samples["g1"] = [
        pb.RateSample(at_ms=now - 5_000 * (100 - n), taken=250 * n + n % 7 * 90, delivered=200 * n) for n in range(101)
    ]
    await world.database.write(lambda repository: repository.hold_lease(LEASE, take=True, release=False))
    await world.done("AddDb", host="db1", port=3306, username="qmq", password="secret of db1")
    world.actions._context = replace(world.context, watchdogs=PlayedWatchdogs("ValueError: no subject"))
    ledger = Ledger(folder)
    for name, verdict in (("g1", PROVEN), ("g2", FINDINGS)):
        more = {"found": {"lost": 1}, "findings": [{"what": "lost", "id": "m-7"}]} if verdict == FINDINGS else {}
        ledger.append(Entry("2026-11-22", now - 9_000_000, name, verdict, verified=4096, by="audit@mq1", **more))
    world.served._nights = Nights(folder)
    _play_messages(world, now)


def _play_messages(world, now):
    dead = pb.BrowsedMessage(
        sequence=1,
        id="m-1",
        stored_ms=now - 60_000,
        stored_bytes=40,
        body=b'{"lines": [{"sku": "A-1"}]}',
        body_bytes=27,
        properties=[
            pb.Property(name=name, value=value)
            for name, value in (("qmq_deadReason", "ValueError: no price"), ("qmq_times", "5"), ("note", "x" * 300))
        ],
    )
    group = DELAY_GROUP | {"nextDue": now}
    message, schedule = DELAYED | {"due": now}, SCHEDULE | {"next": now}
    played = {
        "DelayStats": {"groups": [group], "hours": [{"begin": now, "messages": 4}], "unasked": {"d2": "silent"}},
        "ListDelayed": {"messages": [message], "more": True},
        "ListSchedules": {"schedules": [schedule], "more": False, "unasked": {}},
    }
    run = world.actions.run

    async def answer(name, words, caller):
        if name == "Browse":
            world.brokers.stored = [pb.BrowseAnswer(messages=[dead])]
        return Answer(Status.DONE, data=played[name]) if name in played else await run(name, words, caller)

    world.actions.run = answer
