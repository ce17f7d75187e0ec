"""Shell. Login to the console with an OpenID provider, a process of its own; who is not sent by it is refused."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from urllib.parse import parse_qs, urlsplit

import pytest

from qmq.errors import AccessError, NotServed
from qmq.http_port import HttpPort, listen
from qmq.metaserver.console.oidc import Provider, Wanted, role_of
from qmq.metaserver.console.routes import LOGIN_COOKIE
from qmq.metaserver.console.sessions import ATTEMPT_MS
from qmq.metaserver.main import make_provider
from qmq.metaserver.settings import MetaserverSettings
from qmq.rights import TokenRole
from qmq.settings import InvalidSettings
from tests.support.chromium import Chromium
from tests.support.openid_provider import CLIENT, SECRET
from tests.support.ports import free_ports
from tests.unit.metaserver.console_world import ConsoleWorld, text_of

ROLES = ((TokenRole.ADMIN, "qmq-admins"), (TokenRole.OPERATOR, "on-call"), (TokenRole.VIEWER, "lookers"))
BACK = "http://metaserver/console/oidc/callback"


@pytest.fixture(scope="module")
def issuer():
    [port] = free_ports(1)
    process = subprocess.Popen([sys.executable, "-m", "tests.support.openid_provider", str(port)])
    try:
        ends = time.monotonic() + 60
        while not _answers(f"http://127.0.0.1:{port}/keys"):
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except urllib.error.URLError:
        return False


def wanted(issuer, **more):
    words = {"client_id": CLIENT, "client_secret": SECRET, "redirect": BACK, "roles": ROLES}
    return Wanted(issuer, **(words | {"roles_claim": "groups", "name_claim": "preferred_username"} | more))


def in_console(tmp_path, issuer, test, **more):
    async def body():
        world = ConsoleWorld(tmp_path / "metaserver.db", provider=Provider(wanted(issuer, **more)))
        await world.open()
        try:
            await test(world)
        finally:
            world.database.close()

    asyncio.run(body())


async def to_provider(world, next="/console/trail"):
    """Begin a login; return where the provider is asked."""
    begun = await world.browser.get("/console/oidc/login", params={"next": next})
    assert begun.status_code == 303, begun.text
    return begun.headers["location"]


def sent_back(address, who):
    """Be `who` at the provider; return the address that it sends the browser to."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_):
            return None

    try:
        urllib.request.build_opener(Stay).open(f"{address}&as={who}", timeout=10)
    except urllib.error.HTTPError as answer:
        return answer.headers["location"]
    raise AssertionError("the provider sends the browser back")


async def log_in(world, who, **words):
    address = await to_provider(world, **words)
    back = await asyncio.to_thread(sent_back, address, who)
    return await world.browser.get(back)


@pytest.mark.parametrize("who, role", [("anna", "operator"), ("root", "admin"), ("vera", "viewer")])
def test_login_has_the_role_of_its_claims(tmp_path, issuer, who, role):
    async def test(world):
        form = await world.browser.get("/console/login?next=/console/trail")
        assert "/console/oidc/login?next=%2Fconsole%2Ftrail" in form.text
        answer = await log_in(world, who)
        assert answer.status_code == 200 and f"You are oidc:{who}, {role}." in text_of(answer.text)
        assert 'content="0; url=/console/trail"' in answer.text and "qmq_console=" in answer.headers["set-cookie"]
        assert f"oidc:{who} · {role}" in await world.read("/trail")
        await world.copies("g1")
        await world.copies("g2")
        words = {"csrf": await world.csrf(), "action": "DrainGroup", "brokerGroup": "g1", "step": "confirm"}
        done = await world.send("/change", **words)
        assert (done.status_code == 200) == (role != "viewer")
        if role != "viewer":
            assert (await world.audit())[0].who == f"oidc:{who}"
        await world.send("/logout", csrf=words["csrf"])
        assert (await world.browser.get("/console/trail")).status_code == 303

    in_console(tmp_path, issuer, test)


@pytest.mark.parametrize(
    "who, why",
    [
        ("nobody", "nothing in the claim groups has a role here"),
        ("audience", "the provider's token is invalid"),
        ("expired", "the provider's token is invalid"),
        ("issuer", "the provider's token is invalid"),
        ("nonce", "the provider's token is invalid"),
        ("key", "the provider's token is invalid"),
        ("unsigned", "the provider's token"),
        ("refuses", "the provider refused: access_denied they said no"),
    ],
)
def test_bad_login_is_refused_and_logged(tmp_path, issuer, caplog, who, why):
    async def test(world):
        before = world.metrics.refused_tokens._value.get()
        answer = await log_in(world, who)
        assert answer.status_code == 403 and why in text_of(answer.text) and "you are not logged in" in answer.text
        assert not any(cookie.startswith("qmq_console=") for cookie in answer.headers.get_list("set-cookie"))
        assert world.metrics.refused_tokens._value.get() == before + 1 and why in caplog.text
        assert (await world.browser.get("/console")).status_code == 303

    in_console(tmp_path, issuer, test)


def test_state_is_valid_once_and_in_one_browser(tmp_path, issuer, monkeypatch):
    async def test(world):
        address = await to_provider(world)
        back = await asyncio.to_thread(sent_back, address, "anna")
        another = world.new_browser()
        assert "not begun in this browser" in (await another.get(back)).text
        kept = world.browser.cookies[LOGIN_COOKIE]
        other_login = await to_provider(world)
        assert "not begun in this browser" in (await world.browser.get(back)).text, "the cookie is of a later login"
        for forged in (kept[:-1] + ("0" if kept[-1] != "0" else "1"), f"x{kept}", "", "x" * 10_000):
            another.cookies = {LOGIN_COOKIE: forged}
            assert (await another.get(back)).status_code == 403
        another.cookies = {LOGIN_COOKIE: kept}
        assert "You are oidc:anna" in (await another.get(back)).text
        another.cookies = {LOGIN_COOKIE: kept}
        assert "this login was finished before" in (await another.get(back)).text
        assert parse_qs(urlsplit(other_login).query)["state"] != parse_qs(urlsplit(address).query)["state"]
        back = await asyncio.to_thread(sent_back, await to_provider(world), "anna")
        from qmq.metaserver.console import routes

        late = routes.wall_ms() + ATTEMPT_MS
        monkeypatch.setattr(routes, "wall_ms", lambda: late)
        assert "longer than ten minutes" in (await world.browser.get(back)).text

    in_console(tmp_path, issuer, test)


def test_code_requires_its_verifier(tmp_path, issuer):
    async def test(world):
        query = parse_qs(urlsplit(await to_provider(world)).query)
        assert query["code_challenge_method"] == ["S256"] and len(query["code_challenge"][0]) == 43
        first = await asyncio.to_thread(sent_back, await to_provider(world), "anna")
        code = parse_qs(urlsplit(first).query)["code"][0]
        second = await asyncio.to_thread(sent_back, await to_provider(world), "anna")
        own = parse_qs(urlsplit(second).query)["code"][0]
        injected = await world.browser.get(second.replace(own, code))
        assert injected.status_code == 503 and "the provider answered 400" in injected.text
        answer = await log_in(world, "anna", next="https://elsewhere/console/")
        assert 'url=/console"' in answer.text

    in_console(tmp_path, issuer, test)


def test_absent_or_foreign_provider_logs_nobody_in(tmp_path, issuer):
    async def test(world):
        answer = await world.browser.get("/console/oidc/login")
        assert answer.status_code == 503 and "the provider does not answer" in answer.text
        token = await world.browser.post("/console/login", data={"token": world.tokens["viewer"]})
        assert token.status_code == 303, "a token goes on"

    [free] = free_ports(1)
    in_console(tmp_path, f"http://127.0.0.1:{free}", test)
    with pytest.raises(NotServed, match="issuer is"):
        asyncio.run(Provider(wanted(f"{issuer}/")).begin("/console", now_ms=0))


def test_a_browser_comes_back_logged_in(tmp_path, issuer):
    """The session's cookie is not sent along on the way from another site: the page that follows has to find it."""
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"

    async def test(world):
        serving = asyncio.create_task(HttpPort(world.app, listen("127.0.0.1", port)).run())
        try:
            await asyncio.to_thread(_log_in_with_a_browser, address, tmp_path / "profile")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    in_console(tmp_path, issuer, test, redirect=f"{address}/console/oidc/callback")


def _log_in_with_a_browser(address, profile):
    with Chromium(profile) as browser:
        browser.open(f"{address}/console/trail")
        browser.run("document.querySelector('a.button').focus()")
        browser.follow()
        while "Audit trail" not in browser.run("document.querySelector('h1')?.innerText ?? ''"):
            browser.await_next("Page.loadEventFired")
        assert "oidc:anna · operator" in browser.text()
        assert "Log in" in browser.open(f"{address.replace('127.0.0.1', 'localhost')}/console"), "it is of one host"


async def test_without_a_provider_there_is_no_such_login(tmp_path):
    world = ConsoleWorld(tmp_path / "metaserver.db")
    await world.open()
    assert "OpenID" not in (await world.browser.get("/console/login")).text
    assert (await world.browser.get("/console/oidc/login")).status_code == 401
    world.database.close()


def test_a_metaservers_settings_become_a_provider(issuer):
    words = {"oidc_issuer": issuer, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET}
    words["oidc_redirect"] = BACK.replace("metaserver", "localhost")
    provider = make_provider(MetaserverSettings(cluster_token="a secret of all", oidc_roles=("admin=a=b",), **words))
    address, attempt = asyncio.run(provider.begin("/console", now_ms=5))
    query = parse_qs(urlsplit(address).query)
    assert (query["redirect_uri"], query["client_id"]) == ([words["oidc_redirect"]], [CLIENT])
    assert (attempt.to, attempt.until_ms, query["state"]) == ("/console", 5 + ATTEMPT_MS, [attempt.state])
    assert role_of({"groups": ["a=b"]}, provider.wanted) == TokenRole.ADMIN
    assert make_provider(MetaserverSettings(cluster_token="a secret of all")) is None


def test_roles_are_read_from_the_configured_claim():
    keycloak = wanted("http://p", roles_claim="realm_access.roles")
    assert role_of({"realm_access": {"roles": ["on-call"]}}, keycloak) == TokenRole.OPERATOR
    auth0 = wanted("http://p", roles_claim="https://shop.example/roles")
    assert role_of({"https://shop.example/roles": ["on-call"]}, auth0) == TokenRole.OPERATOR
    nested = wanted("http://p", roles_claim="resource_access.shop.web.roles")
    assert role_of({"resource_access": {"shop.web": {"roles": ["on-call"]}}}, nested) == TokenRole.OPERATOR
    assert role_of({"groups": "on-call"}, wanted("http://p")) == TokenRole.OPERATOR
    for groups in (True, 5, None, [["on-call"]], {"on-call": False}):
        with pytest.raises(AccessError, match="has a role here"):
            role_of({"groups": groups}, wanted("http://p"))


def test_settings_of_a_provider_are_checked_as_a_whole():
    good = {"oidc_issuer": "https://p", "oidc_client_id": "c", "oidc_redirect": "https://h/console/oidc/callback"}
    assert MetaserverSettings(cluster_token="a secret of all", oidc_roles=("operator=x=y",), **good).oidc_issuer
    with pytest.raises(InvalidSettings) as found:
        MetaserverSettings(cluster_token="a secret of all", oidc_issuer="http://p", oidc_roles=("owner=x", "admin="))
    assert [line.partition(":")[0] for line in found.value.complaints] == [
        "oidc_client_id",
        "oidc_issuer",
        "oidc_redirect",
        "oidc_roles",
        "oidc_roles",
    ]
