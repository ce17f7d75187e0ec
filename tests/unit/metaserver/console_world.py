"""Shell. The console over real actions: a browser that keeps its cookie, one token of each role, played brokers."""

from __future__ import annotations

import asyncio
import html
import random
import re

import httpx

from qmq.metaserver.access import Access, new_token
from qmq.metaserver.console.routes import Console
from qmq.metaserver.console.sessions import Sessions
from qmq.metaserver.http.app import build_app
from qmq.metaserver.http.guard import Limits
from qmq.metaserver.refusals import Refusals
from qmq.metaserver.rpc.tokens import wall_ms
from tests.unit.metaserver.actions_world import World

CLUSTER = "the key of the installation"
ROLES = ("viewer", "operator", "admin", "client")


class ConsoleWorld(World):
    """One metaserver with its console. Use it with `in_console`."""

    def __init__(self, database, **options):
        super().__init__(database)
        self.access, refusals = Access([CLUSTER]), Refusals(self.metrics)
        dice = random.Random(7).randbytes
        made = {role: new_token(role, role, known=(), random_bytes=dice, now_ms=wall_ms()) for role in ROLES}
        self.tokens = {role: text for role, (_, text) in made.items()}
        self.rows = [row for row, _ in made.values()]
        self.access.replace(self.rows)
        self.trouble = ""
        self.console = console = Console(
            self.actions, Sessions(self.access, [CLUSTER], dice), refusals,
            database_trouble=lambda: self.trouble, **options,
        )  # fmt: skip
        self.app = build_app(
            self.actions, self.access, self.metrics, refusals, address="10.0.0.1:8081", database_trouble=lambda: "",
            limits=Limits(65_536, 65_536, 1000), more=console.routes(),
        )  # fmt: skip
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
        """A page of the console as its HTML, which has to be whole."""
        answer = await self.browser.get(f"/console{path}", params=words or None)
        assert answer.status_code == 200 and answer.text.rstrip().endswith("</html>"), answer.text
        return answer.text

    async def read(self, path="", **words):
        """What people read on a page."""
        return text_of(await self.see(path, **words))

    async def send(self, path, /, **fields):
        return await self.browser.post(f"/console{path}", data=fields)

    async def csrf(self):
        page = await self.see("/change", action="MarkReadonlyBrokerGroup")
        return re.search(r'name="csrf" value="([^"]+)"', page)[1]


def text_of(page):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def in_console(test):
    """Run an async test in a world of its own, a viewer logged in."""

    def run(tmp_path):
        async def body():
            world = ConsoleWorld(tmp_path / "metaserver.db")
            await world.open()
            await world.log_in()
            try:
                await test(world)
            finally:
                world.database.close()

        asyncio.run(body())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
