"""Shell. The console in a real browser: the page has its answer, its policy is kept, its colours can be read."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from qmq.http_port import HttpPort, listen
from qmq.metaserver.console import routes
from qmq.metaserver.rpc.tokens import wall_ms
from tests.unit.metaserver.console_world import ConsoleWorld

STYLE = Path(routes.__file__).parent / "static" / "console.css"
LOAD_S = 180
CONTRAST_MIN = 4.5
"""WCAG 2.1, level AA, for text of normal size."""


def test_a_browser_shows_the_page_and_finds_nothing_that_the_policy_forbids(tmp_path, monkeypatch):
    asyncio.run(_browse(tmp_path, monkeypatch))


async def _browse(tmp_path, monkeypatch):
    world = ConsoleWorld(tmp_path / "metaserver.db")
    await world.open()
    await world.running_copies("g1")
    await world.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    cookie = world.console._sessions.begin(world.tokens["viewer"], now_ms=wall_ms())
    visited = world.console._visit

    async def logged_in(request):  # a headless browser has no hand to type the token with
        request.cookies.setdefault(routes.COOKIE, cookie)
        return await visited(request)

    monkeypatch.setattr(world.console, "_visit", logged_in)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(HttpPort(world.app, listener).run())
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/console"
        page, said = await asyncio.to_thread(_dump, address, tmp_path / "profile")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        world.database.close()
    assert "an operator marked it: UnMarkReadonlyBrokerGroup ends it" in page
    assert re.search(r'<a href="/console" aria-current="page">Overview</a>', page)
    assert "Content Security Policy" not in said, said


def _dump(address, profile):
    ended = subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         f"--user-data-dir={profile}", address], capture_output=True, text=True, timeout=LOAD_S,
    )  # fmt: skip
    return ended.stdout, ended.stderr


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_its_background(theme):
    block = re.findall(r":root \{([^}]*)\}", STYLE.read_text())[theme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for name in ("text", "link", "good", "bad", "warn", "dim"):
        for back in ("back", "soft"):
            assert _contrast(colours[name], colours[back]) >= CONTRAST_MIN, (name, back)


def _contrast(one, other):
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
