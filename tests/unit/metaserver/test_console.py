"""Shell. The console shows answers of actions, requires a session, and changes only by a confirmed plan."""

from __future__ import annotations

import base64
import html
import random
import re

import pytest

from qmq.errors import AccessError, NotServed
from qmq.metaserver.access import Access, new_token
from qmq.metaserver.actions import ACTIONS, Answer, Status
from qmq.metaserver.console import display, offers
from qmq.metaserver.console import sessions as sessions_module
from qmq.metaserver.console.pages import PAGES
from qmq.metaserver.console.sessions import SESSION_MS, Sessions
from qmq.metaserver.rpc.access import wall_ms
from qmq.rights import Caller, TokenRole
from tests.unit.metaserver.actions_world import place
from tests.unit.metaserver.console_world import CLUSTER, ConsoleWorld, text_of

HOSTILE = '<script>alert("1")</script>\'&'


async def test_each_page_shows_an_empty_installation(console):
    for page in PAGES:
        assert f"<h1>{page.title}" in await console.see(page.path)


async def test_each_page_works_without_the_database(console):
    await console.running_copies("g1")
    console.trouble = "connection refused"

    async def away(work, **options):
        raise NotServed("the database does not answer")

    console.context.database.read = away
    for page in PAGES:
        text = await console.read(page.path, name="g1")
        assert f"{page.title} " in text and "connection refused" in text
    assert "accepts produces" in await console.read()


async def test_pages_have_the_strict_content_policy(console):
    for path in ("", "/login", "/change?action=DrainGroup", "/nothing", "/console.css", "/console.js"):
        answer = await console.browser.get(f"/console{path}")
        if path == "/nothing":
            assert answer.status_code == 401
            continue
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'self';") and "unsafe" not in policy
        assert "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == ("max-age=300" if path.startswith("/console.") else "no-store")


async def test_pages_contain_nothing_that_the_policy_forbids(console):
    """Inline scripts, styles and handlers would not run; foreign addresses are never loaded."""
    await console.log_in("admin")
    await console.running_copies("g1")
    for path in [page.path for page in PAGES] + ["/change?action=MarkReadonlyBrokerGroup", "/group?name=g1"]:
        page = await console.see(path)
        page = page.replace('<script src="/console/console.js" defer></script>', "")
        assert not re.search(r"<script|\son\w+=|\sstyle=|<style|https?://|javascript:", page), path


async def test_overview_shows_readonly_groups_with_reasons(console):
    await console.running_copies("g1", "g2")
    console.beat("g2-a", writable=False, readonly_reasons=("slave_down",), log_end=9000)
    text = await console.read()
    assert "1 of 2 accept produces" in text
    assert re.search(
        r"g2 readonly its slave is missing: start it.* 2 of 2 up master g2-a:20881 .* 4.9 KB 9 KB g1", text
    )
    assert "?name=g1" not in await console.see(state="readonly") and "?name=g2" not in await console.see(name="g1")


async def test_mark_is_shown_as_readonly_reason(console):
    await console.running_copies("g1")
    await console.done("MarkReadonlyBrokerGroup", brokerGroup="g1")
    assert "an operator marked it: UnMarkReadonlyBrokerGroup ends it" in await console.read()
    assert "an operator marked it" in await console.read("/group", name="g1")


async def test_overview_shows_findings_of_doctor(console):
    await console.running_copies("g1")
    assert "Nothing needs attention. All 8 checks of Doctor are good" in await console.read()
    console.stop("g1-a")
    text = await console.read()
    assert "broker g1-a:20881 (MASTER of g1)" in text and "start it on 10.0.0.1" in text
    assert "qmq Failover --brokerGroup=g1 --masterGone=true" in text


async def test_group_page_shows_accepted_loss_until_acknowledged(console):
    await console.log_in("admin")
    await console.running_copies("g1")
    console.stop("g1-a")
    console.stop("g1-b")
    await console.done("ReplaceBroker", **place("g1", 0, "g1-b"), swap="true", acceptLoss="true")
    text = await console.read("/group", name="g1")
    assert "that acknowledged messages are lost" in text and "AcknowledgeLoss…" in text and "Failover…" in text
    await console.done("AcknowledgeLoss", brokerGroup="g1")
    assert "AcknowledgeLoss" not in await console.read("/group", name="g1")


async def test_groups_are_paged(console):
    await console.copies("g")
    (row,) = (await console.run("ListBrokerGroups")).data
    rows = [row | {"groupName": f"g{number}"} for number in range(101)]

    async def many(name, words, caller):
        return Answer(Status.DONE, data=rows if name == "ListBrokerGroups" else {"checks": []})

    console.actions.run = many
    first, second = await console.see(), await console.see("", page="1")
    assert (first.count("/group?name="), second.count("/group?name=")) == (100, 1)
    assert "Next" in first and "Next" not in second and "page=0" in second
    assert "No such broker group" in await console.read("", page="7")


# Access.


async def test_session_cookie_is_protected(console):
    answer = await console.log_in()
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "Path=/console", "SameSite=strict", f"Max-Age={SESSION_MS // 1000}"} <= set(cookie.split("; "))
    assert "Secure" not in cookie and console.tokens["viewer"] not in cookie
    secure = await console.new_browser().post(
        "https://metaserver/console/login", data={"token": console.tokens["viewer"]}
    )
    assert "Secure" in secure.headers["set-cookie"]


@pytest.mark.parametrize(
    "token, why",
    [
        ("", "not valid"),
        ("qmq_x_y", "not valid"),
        ("ä", "not valid"),
        (CLUSTER, "key of the installation"),
        ("client", "role"),
    ],
)
async def test_login_is_refused(console, token, why):
    before = console.metrics.refused_tokens._value.get()
    answer = await console.new_browser().post("/console/login", data={"token": console.tokens.get(token, token)})
    assert answer.status_code == 401 and why in answer.text and "set-cookie" not in answer.headers
    assert console.metrics.refused_tokens._value.get() == before + 1


async def test_login_redirects_to_the_requested_page(console):
    asked = await console.new_browser().get("/console/group?name=g%26h")
    to = asked.headers["location"]
    form = await console.new_browser().get(to)
    assert 'value="/console/group?name=g%26h"' in form.text
    for to, lands in {
        "/console/group?name=g%26h": "/console/group?name=g%26h",
        "https://elsewhere/console/": "/console",
        "//elsewhere": "/console",
        "/consoleX": "/console",
        "/console/\r\nX: y": "/console",
        "/console/subjects?prefix=Я": "/console",
        "/console/subjects?prefix=%D0%AF": "/console/subjects?prefix=%D0%AF",
    }.items():
        answer = await console.browser.post("/console/login", data={"token": console.tokens["viewer"], "next": to})
        assert answer.headers["location"] == lands


async def test_openid_login_needs_a_provider(console):
    stranger = console.new_browser()
    assert "OpenID" not in (await stranger.get("/console/login")).text
    assert (await stranger.get("/console/oidc/login")).status_code == 401


OPEN = {"/console/login", "/console/console.css", "/console/console.js", "/console/icon.svg"}


async def test_each_address_requires_a_valid_session(console):
    """Invalid cookies are of no or another installation, of an ended session, of a revoked token, or of a client."""
    dice = random.Random(5).randbytes
    now = wall_ms()
    sessions, foreign = (Sessions(console.access, [key], dice) for key in (CLUSTER, "foreign"))
    cookies = {
        "none": "",
        "of another installation": Sessions(console.access, ["foreign"], dice).begin(
            console.tokens["admin"], now_ms=now
        ),
        "ended": sessions.begin(console.tokens["admin"], now_ms=now - SESSION_MS),
        "of a client": sessions._cookie(next(row.id for row in console.rows if row.name == "client"), now),
        "of a revoked token": sessions.begin(console.tokens["operator"], now_ms=now),
    }
    await console.log_in("admin")
    cookies["logged out"] = console.browser.cookies["qmq_console"]
    await console.send("/logout", csrf=await console.csrf())
    console.access.replace([row for row in console.rows if row.name != "operator"])
    asked = [(route.path, method) for route in console.served.routes() for method in route.methods - {"HEAD"}]
    assert {("/console/rates", "GET"), ("/console/change", "POST")} < set(asked)
    header = await console.new_browser().get("/console", headers={"X-Api-Token": console.tokens["admin"]})
    assert header.status_code == 303, "a token in a header is no session"
    for path, method in asked:
        for whose, cookie in cookies.items():
            browser = console.new_browser()
            browser.cookies.set("qmq_console", cookie)
            form = {"csrf": sessions.csrf(cookie), "action": "DrainGroup", "brokerGroup": "g1", "step": "confirm"}
            answer = await browser.request(method, path, data=form if method == "POST" else None)
            leads = answer.headers.get("location", "").startswith("/console/login") or answer.status_code == 401
            assert leads != (path in OPEN and method == "GET"), (path, method, whose, answer.status_code)


async def test_each_form_requires_csrf_and_same_site(console):
    await console.log_in("admin")
    others = await console.csrf()
    await console.log_in("admin")
    posted = [route.path for route in console.served.routes() if "POST" in route.methods]
    assert "/console/change" in posted
    for path in posted:
        for site in ("cross-site", "same-site", "none"):
            answer = await console.browser.post(path, data={}, headers={"Sec-Fetch-Site": site})
            assert answer.status_code == 403 and "another site" in answer.text, path
        if path != "/console/login":  # before the login; its cookie does not come from another site
            for csrf in ("", "x", "ä", others):
                answer = await console.browser.post(path, data={"csrf": csrf, "action": "DrainGroup"})
                assert answer.status_code == 403 and "belongs to another session" in answer.text, path
    await console.see()


async def test_logout_ends_one_session(console):
    answer = await console.send("/logout", csrf=await console.csrf())
    assert answer.status_code == 303 and 'qmq_console=""' in answer.headers["set-cookie"]
    await console.log_in()
    await console.see()  # another session of the same token goes on


def test_ended_sessions_are_remembered_until_expiry(monkeypatch):
    monkeypatch.setattr(sessions_module, "ENDED_MAX", 2)
    row, token = new_token("anna", "viewer", known=(), random_bytes=random.Random(3).randbytes, now_ms=0)
    access = Access([])
    access.replace([row])
    sessions = Sessions(access, ["key"], random.Random(4).randbytes)
    cookies = [sessions.begin(token, now_ms=at) for at in (1, 2, 3)]
    for cookie in cookies[:2]:
        sessions.end(cookie, now_ms=4)
        with pytest.raises(AccessError, match="logged out"):
            sessions.caller(cookie, now_ms=4, peer="")
    sessions.end(cookies[2], now_ms=1 + SESSION_MS)
    assert len(sessions._ended) == 2, "the first would be over by itself"
    sessions.end(sessions.begin(token, now_ms=4), now_ms=5)
    assert len(sessions._ended) == 2


def test_session_expires_and_cannot_be_forged():
    dice = random.Random(3).randbytes
    row, token = new_token("anna", "viewer", known=(), random_bytes=dice, now_ms=0)
    access = Access([])
    access.replace([row])
    sessions = Sessions(access, ["new key", "old key"], dice)
    cookie = sessions.begin(token, now_ms=5)
    assert sessions.caller(cookie, now_ms=5 + SESSION_MS - 1, peer="p").name == "anna"
    with pytest.raises(AccessError, match="ended"):
        sessions.caller(cookie, now_ms=5 + SESSION_MS, peer="")
    of_the_old_key = Sessions(access, ["old key"], dice).begin(token, now_ms=5)
    assert sessions.caller(of_the_old_key, now_ms=6, peer="").name == "anna"
    later = cookie.replace(f".{5 + SESSION_MS}.", f".{6 + SESSION_MS}.")
    foreign = Sessions(access, ["foreign key"], dice).begin(token, now_ms=5)
    for forged in (later, foreign, "", "...", "ä.1.x.y", cookie[:-1], cookie + "0", "x" * 10_000):
        with pytest.raises(AccessError):
            sessions.caller(forged, now_ms=6, peer="")
    for signed in (
        sessions.sealed("an attempt"),  # signed, but no session
        sessions._cookie("~not base64 of a list", 5),
        sessions._cookie(f"~{base64.urlsafe_b64encode(b'5').decode()}", 5),
        sessions._cookie(f"~{base64.urlsafe_b64encode(b'[1, 2]').decode()}", 5),
        sessions._cookie(f"a.dot.{row.id}", 5),
        f"form of {cookie}.{sessions.csrf(cookie)}",
    ):
        with pytest.raises(AccessError, match="log in"):
            sessions.caller(signed, now_ms=6, peer="")
    for name in ("oidc:" + "Я" * 60, "oidc:" + "\U00020000" * 60):
        of_a_person = sessions.begin_without_token(Caller(name, TokenRole.OPERATOR), now_ms=5)
        assert sessions.caller(of_a_person, now_ms=6, peer="").name == name, "as long as a name may be"
    assert sessions.is_csrf(cookie, sessions.csrf(cookie))
    for wrong in ("", "ä", sessions.csrf(of_the_old_key), cookie):
        assert not sessions.is_csrf(cookie, wrong)


async def test_open_lists_are_shown_without_login(tmp_path):
    """Lists that tools get without a token are shown without one."""
    console = ConsoleWorld(tmp_path / "metaserver.db", open_lists=True)
    await console.open()
    await console.running_copies("g1")
    text = await console.read()
    assert "1 of 1 accept produces" in text and "log in to see this" in text
    assert (await console.browser.get("/console/change?action=DrainGroup")).status_code == 303
    console.close()


# Changes.


async def test_change_is_planned_confirmed_and_recorded(console):
    await console.log_in("operator")
    await console.serving_copies("s1", "s2")
    words = {"csrf": await console.csrf(), "action": "MarkReadonlyBrokerGroup", "brokerGroup": "g1", "subject": "*"}
    before = len(await console.audit())
    planned = await console.send("/change", step="plan", **words)
    text = text_of(planned.text)
    assert "Reaches 2 subjects, 1 group, 0 clients" in text and "Do it" in text
    assert len(await console.audit()) == before and not console.registry.directory.is_marked("g1", "*")
    done = await console.send("/change", step="confirm", **words)
    assert "Done." in text_of(done.text) and console.registry.directory.is_marked("g1", "*")
    newest = (await console.audit())[0]
    assert (newest.who, newest.peer, newest.action) == ("operator", "10.0.0.9", "MarkReadonlyBrokerGroup")
    again = await console.send("/change", step="plan", **words)
    assert "Nothing would change" in again.text and "Do it" not in again.text


async def test_outdated_plan_is_refused(console):
    """Two operators confirm contradictory plans of one subject at the same time."""
    await console.log_in("operator")
    await console.serving_copies("s1")
    csrf, plans = await console.csrf(), []
    for seconds in ("60", "3600"):
        words = {"csrf": csrf, "action": "SetLimits", "subject": "s1", "expiresAfterS": seconds}
        planned = (await console.send("/change", step="plan", **words)).text
        plans.append(words | {"step": "confirm", "plan": re.search(r'name="plan" value="([^"]+)"', planned)[1]})
    assert "Done." in (await console.send("/change", **plans[0])).text
    refused = await console.send("/change", **plans[1])
    assert "the plan has changed since it was shown" in refused.text and "expiresAfterS=3600" in refused.text
    assert [limits.expires_after_s for limits in console.registry.directory.limits] == [60]
    assert "Done." in (await console.send("/change", **plans[0])).text  # nothing to change
    assert not any("ifPlan" in row.parameters for row in await console.audit())


async def test_filled_form_survives_the_login(console):
    words = {"action": "MarkReadonlyBrokerGroup", "brokerGroup": "g 1&x", "step": "confirm", "csrf": "x"}
    browser = console.new_browser()
    to = (await browser.post("/console/change", data=words)).headers["location"]
    login = re.search(r'name="next" value="([^"]*)"', (await browser.get(to)).text)[1]
    answer = await browser.post(
        "/console/login", data={"token": console.tokens["operator"], "next": html.unescape(login)}
    )
    form = await browser.get(answer.headers["location"])
    assert 'value="g 1&amp;x"' in form.text and "Show the plan" in form.text and "Do it" not in form.text
    long = await console.new_browser().post("/console/change", data=words | {"subject": "x" * 5000})
    other = await console.new_browser().post("/console/change", data=words | {"action": "AddToken"})
    assert long.headers["location"] == "/console/login" and other.headers["location"].startswith("/console/login")


async def test_refused_plan_cannot_be_confirmed(console):
    await console.log_in("operator")
    words = {"csrf": await console.csrf(), "action": "DrainGroup", "brokerGroup": "g9"}
    planned = await console.send("/change", step="plan", **words)
    assert "there is no broker group g9" in planned.text and "Do it" not in planned.text
    assert "Nothing was changed" in (await console.send("/change", step="confirm", **words)).text


async def test_viewer_gets_no_changes(console):
    await console.running_copies("g1")
    assert "/change?" not in await console.see("/group", name="g1")
    words = {"csrf": await console.csrf(), "action": "DrainGroup", "brokerGroup": "g1"}
    for step in ("plan", "confirm"):
        answer = await console.send("/change", step=step, **words)
        assert answer.status_code == 403 and "this needs operator" in answer.text
    await console.log_in("operator")
    assert "/change?action=DrainGroup" in await console.see("/group", name="g1")
    words = {"csrf": await console.csrf(), "action": "RemoveBroker", "hostname": "g1-a", "servePort": "20881"}
    assert (await console.send("/change", step="plan", **words)).status_code == 403


def test_actions_with_secrets_are_not_offered():
    left = {name for name, action in ACTIONS.items() if action.changes and offers.offered(name) is None}
    assert left == {"AddDb", "AddToken", "Restore", "AdoptDatabase"}
    assert offers.offered("ListBrokers") is None and offers.offered("x") is None


async def test_hostile_words_are_escaped(console):
    await console.log_in("admin")
    await console.running_copies("g1")
    words = {
        "csrf": await console.csrf(),
        "action": "MarkReadonlyBrokerGroup",
        "brokerGroup": HOSTILE,
        "subject": HOSTILE,
    }
    pages = [
        (await console.send("/change", step="plan", **words)).text,
        (await console.send("/change", step="confirm", **words)).text,
        (await console.new_browser().post("/console/login", data={"token": HOSTILE, "next": HOSTILE})).text,
    ]
    for page in pages:
        assert "<script>" not in page and "alert(" not in page.replace("&lt;script&gt;alert(", "")


@pytest.mark.parametrize(
    "value, text",
    [
        (display.utc(0), "–"),
        (display.utc(1_000_000_000_000), "2001-09-09 01:46:40"),
        (display.utc(10**30), f"{10**30} ms"),
        (display.duration(None), "–"),
        (display.duration(0.4), "0 s"),
        (display.duration(90_061), "1 d 1 h"),
        (display.number(1234567), "1,234,567"),
        (display.number(None), "–"),
        (display.moment_ms("1970-01-01T00:01"), 60_000),
        (display.moment_ms("1970-01-01T01:01+01:00"), 60_000),
        (display.moment_ms("now"), None),
    ],
)
def test_values_are_formatted(value, text):
    assert value == text
