"""Shell. The console in a real browser: accessibility by axe, order of Tab, content policy, colours."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from qmq.client.batch import Outcome, Receipt
from qmq.errors import NotServed
from qmq.http_port import HttpPort, listen
from qmq.metaserver.console import routes
from qmq.metaserver.console.pages import PAGES
from qmq.proto import qmq_pb2 as pb
from tests.support.chromium import Chromium
from tests.unit.metaserver.console_world import ConsoleWorld, with_something_on_every_page

STYLE = Path(routes.__file__).parent / "static" / "console.css"
CONTRAST_MIN = 4.5
"""WCAG 2.1, level AA, for text of normal size."""
ADDRESSES = [
    *(f"/console{page.path}" for page in PAGES if page.path != "/group"),
    "/console/group?name=g1",
    "/console/consumers?subject=order.changed",
    "/console/consumers?subject=order.changed&group=billing",
    "/console/messages?subject=order.changed&live=yes",
    "/console/messages?subject=order.changed&dead=billing",
    "/console/change?action=MarkReadonlyBrokerGroup&brokerGroup=g1",
    "/console/login",
]


@pytest.fixture
def state():
    """State of the console's world."""
    return "data"


@pytest.fixture
def console(tmp_path, state):
    """A browser, the address of a console, and its world, which is served by a thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_served(tmp_path, state)) as (address, world),
        Chromium(tmp_path / "profile") as browser,
    ):
        yield browser, address, world


@asynccontextmanager
async def _served(tmp_path, state):
    world = ConsoleWorld(tmp_path / "metaserver.db")
    await world.open()
    if state != "empty":
        await with_something_on_every_page(world, tmp_path / "ledger")
    if state == "database away":
        _take_the_database_away(world)
    await world.surveyor.look()
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(HttpPort(world.app, listener).run())
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", world
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        world.database.close()


def _take_the_database_away(world):
    async def away(work, **options):
        raise NotServed("the database does not answer")

    world.context.database.read, world.trouble = away, "connection refused"


def _log_in(browser, address, world, role="operator"):
    """With the keyboard alone: the field for the token has the focus, Enter sends the form."""
    assert "Log in" in browser.open(f"{address}/console")
    browser.type(world.tokens[role])
    assert f"{role} · {role}" in browser.follow()


@pytest.mark.parametrize("state", ["data", "empty", "database away"])
def test_pages_work_with_keyboard_and_screen_reader(console, state):
    browser, address, world = console
    _log_in(browser, address, world)
    found = []
    for path in ADDRESSES:
        text = browser.open(address + path)
        assert ("connection refused" in text) == (state == "database away"), (path, text)
        found += [f"{path}: {finding}" for finding in browser.axe() + browser.complaints()]
        wanted, had, unseen = browser.tab_walk()
        assert had == wanted, (path, had, wanted)
        found += [f"{path}: focus is not seen on {element}" for element in unseen]
    browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.command("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=False)
    for path in ADDRESSES if state == "data" else ():
        browser.open(address + path)
        if (wide := browser.run("document.documentElement.scrollWidth")) > 400:  # a wide table moves by itself
            found.append(f"{path}: {wide} wide on a telephone")
        found += [f"{path}, dark: {finding}" for finding in browser.axe(only=("color-contrast",))]
    assert not found, "\n".join(found)


def test_change_is_made_with_the_keyboard(console):
    browser, address, world = console
    _log_in(browser, address, world)
    browser.open(f"{address}/console/group?name=g1")
    _tab_to(browser, "DrainGroup…")
    assert "DrainGroup" in browser.follow()
    _tab_to(browser, "Show the plan")
    text = browser.follow()
    assert "Reaches 2 subjects, 1 group" in text and "Do it" in text
    assert not world.registry.directory.groups["g1"].draining
    _tab_to(browser, "Do it")
    assert "Done." in browser.follow()
    assert world.registry.directory.groups["g1"].draining
    assert "operator 127.0.0.1 DrainGroup brokerGroup=g1" in browser.open(f"{address}/console/trail")


def _tab_to(browser, text):
    for _ in range(100):
        browser.press("Tab")
        if browser.run("document.activeElement.innerText || ''").strip() == text:
            return
    raise AssertionError(f"Tab does not lead to {text}")


def test_pages_refresh_until_paused(console):
    browser, address, world = console
    _log_in(browser, address, world)
    browser.command("Page.addScriptToEvaluateOnNewDocument", source="window.setInterval = f => { window.renew = f; };")
    assert "messages in" in browser.open(f"{address}/console/group?name=g1")
    world.brokers.samples["g1"] = world.brokers.samples["g1"][:1]
    browser.run("window.renew()")
    assert "Its master has just begun" in browser.text() and not browser.complaints()
    _tab_to(browser, "Pause")
    browser.press("Enter", text="\r")
    world.brokers.samples["g1"] = []
    world.brokers.silent = {"g1"}
    browser.run("window.renew()")
    assert "No rates" not in browser.text()
    browser.press("Enter", text="\r")
    browser.run("window.renew()")
    assert "No rates" in browser.text()


ARRIVAL = """new Promise(found => {
    const list = document.querySelector('[data-tail]');
    const look = () => list.querySelector('[data-key="g1/2"]') && found(1);
    new MutationObserver(look).observe(list, {childList: true}); look(); })"""


def test_live_tail_follows_and_a_message_is_produced(console):
    browser, address, world = console
    sent = []

    async def send(message):
        sent.append(message)
        return Receipt(Outcome.STORED, "m-3", message.subject, "g1", 3, None)

    world.actions.run = type(world.actions).run.__get__(world.actions)
    world.actions._context = replace(world.context, send=send)
    world.brokers.stored = [_stored(1, "{}")]
    _log_in(browser, address, world)
    assert "m-1" in browser.open(f"{address}/console/messages?subject=order.changed&live=yes")
    world.brokers.stored = [_stored(2, '{"lines": [{"sku": "A-1"}], "html": "<b>bold</b>"}')]
    browser.run(ARRIVAL)
    text = browser.text()
    assert text.index("m-2") < text.index("m-1") and "lines: 1 item" in text and "<b>bold</b>" in text
    assert browser.axe() + browser.complaints() == []
    assert "Produce" in browser.click("Produce…")
    browser.fill("properties", '{"orderNo": "4711"}')
    browser.fill("body", '{"price": 5}')
    assert "Reaches 1 subject" in browser.click("Show the plan") and not sent
    assert "Done." in browser.click("Do it") and dict(sent[0].properties) == {"orderNo": "4711"}
    assert (sent[0].body, sent[0].content_type) == (b'{"price": 5}', "application/json")


def test_hostile_bodies_are_drawn_as_text(console):
    browser, address, world = console
    attack = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>\u202e\x1b[2J"
    bodies = [
        json.dumps({attack: attack, "id": 12345678901234567890, "price": 1e-7, "deep": [[[attack]]]}),
        f'{{"id": 98765432109876543210, "raw": "{attack}"}}',
        attack,
    ]
    world.actions.run = type(world.actions).run.__get__(world.actions)
    answer = pb.BrowseAnswer()
    for sequence, body in enumerate(bodies):
        kind = pb.Property(name="qmq_contentType", value="text/html" if body == attack else "application/json")
        row = answer.messages.add(sequence=sequence, id=attack, stored_ms=sequence + 1, properties=[kind])
        row.body, row.body_bytes = body.encode(), len(body.encode())
    world.brokers.stored = [answer]
    _log_in(browser, address, world)
    browser.open(f"{address}/console/messages?subject=order.changed")
    browser.run("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    text = browser.text()
    assert "id: 12345678901234567890" in text and "price: 1e-7" in text and "98765432109876543210" in text
    assert not set("\u202e\x1b") & set(browser.run("document.body.textContent")) and "\\u202e" in text
    assert browser.run("window.hit") is None and browser.run("document.querySelectorAll('main img').length") == 0
    assert browser.axe() + browser.complaints() == []


def _stored(sequence, body):
    message = pb.BrowsedMessage(sequence=sequence, id=f"m-{sequence}", stored_ms=sequence, stored_bytes=9)
    message.properties.append(pb.Property(name="body", value=body))
    return pb.BrowseAnswer(messages=[message])


def test_definitions_are_imported_in_a_browser(console):
    browser, address, world = console
    _log_in(browser, address, world, role="admin")
    text = browser.open(f"{address}/console/definitions")
    assert "Routes 2" in text
    document = browser.run("fetch('/console/definitions.json').then(answer => answer.json())")
    document["subjects"] = [{"name": "pay", "tag": "fast"}]
    browser.click("ImportDefinitions…")
    browser.fill("definitions", json.dumps(document))
    text = browser.click("Show the plan")
    assert "Reaches 1 subject" in text and "fast" in text
    assert "Done." in browser.click("Do it") and browser.complaints() == []
    assert world.registry.directory.subjects["pay"].tag == "fast"
    for path in ("/console/tokens", "/console/definitions"):
        browser.open(address + path)
        assert browser.axe() + browser.complaints() == []


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_its_background(theme):
    block = re.findall(r":root \{([^}]*)\}", STYLE.read_text())[theme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for name in ("text", "link", "good", "bad", "warn", "dim"):
        for back in ("back", "soft"):
            assert _contrast(colours[name], colours[back]) >= CONTRAST_MIN, (name, back)


def _contrast(text, back):
    bright, dark = sorted((_luminance(text), _luminance(back)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
