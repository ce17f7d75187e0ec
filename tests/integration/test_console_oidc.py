"""Shell. Login to the console with an OpenID provider, a process of its own."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from qmq.errors import AccessError, NotServed
from qmq.http_port import HttpPort, listen
from qmq.metaserver.console import routes
from qmq.metaserver.console.oidc import Provider, ProviderSettings, role_of
from qmq.metaserver.console.routes import LOGIN_COOKIE
from qmq.metaserver.console.sessions import ATTEMPT_MS
from qmq.metaserver.main import make_provider
from qmq.metaserver.settings import MetaserverSettings
from qmq.rights import TokenRole
from qmq.settings import InvalidSettings
from tests.support.chromium import Chromium
from tests.support.http import is_served
from tests.support.openid_provider import CLIENT, SECRET
from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.unit.metaserver.console_world import ConsoleWorld, text_of

ROLES = ((TokenRole.ADMIN, "qmq-admins"), (TokenRole.OPERATOR, "on-call"), (TokenRole.VIEWER, "lookers"))
BACK = "http://metaserver/console/oidc/callback"


@pytest.fixture(scope="module")
def issuer():
    [port] = free_ports(1)
    process = subprocess.Popen([sys.executable, "-m", "tests.support.openid_provider", str(port)])
    try:
        until(lambda: process.poll() is not None or is_served(f"http://127.0.0.1:{port}/keys"), "the provider answers")
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def settings_of(issuer, **more):
    words = {"client_id": CLIENT, "client_secret": SECRET, "redirect": BACK, "roles": ROLES}
    return ProviderSettings(issuer, **(words | {"roles_claim": "groups", "name_claim": "preferred_username"} | more))


@asynccontextmanager
async def console_of(issuer, tmp_path, **more):
    console = ConsoleWorld(tmp_path / "metaserver.db", provider=Provider(settings_of(issuer, **more)))
    await console.open()
    yield console
    console.close()


@pytest.fixture
async def console(issuer, tmp_path):
    async with console_of(issuer, tmp_path) as console:
        yield console


async def to_provider(console, next="/console/trail"):
    """Begin a login; return the provider's address."""
    begun = await console.browser.get("/console/oidc/login", params={"next": next})
    assert begun.status_code == 303, begun.text
    return begun.headers["location"]


def sent_back(address, who):
    """Log in at the provider as `who`; return the address of its redirect."""
    return httpx.get(f"{address}&as={who}", timeout=10).headers["location"]


async def log_in(console, who, **words):
    address = await to_provider(console, **words)
    back = await asyncio.to_thread(sent_back, address, who)
    return await console.browser.get(back)


@pytest.mark.parametrize("who, role", [("anna", "operator"), ("root", "admin"), ("vera", "viewer")])
async def test_login_has_the_role_of_its_claims(console, who, role):
    form = await console.browser.get("/console/login?next=/console/trail")
    assert "/console/oidc/login?next=%2Fconsole%2Ftrail" in form.text
    answer = await log_in(console, who)
    assert answer.status_code == 200 and f"You are oidc:{who}, {role}." in text_of(answer.text)
    assert 'content="0; url=/console/trail"' in answer.text and "qmq_console=" in answer.headers["set-cookie"]
    assert f"oidc:{who} · {role}" in await console.read("/trail")
    await console.copies("g1")
    await console.copies("g2")
    words = {"csrf": await console.csrf(), "action": "DrainGroup", "brokerGroup": "g1", "step": "confirm"}
    done = await console.send("/change", **words)
    assert (done.status_code == 200) == (role != "viewer")
    if role != "viewer":
        assert (await console.audit())[0].who == f"oidc:{who}"
    await console.send("/logout", csrf=words["csrf"])
    assert (await console.browser.get("/console/trail")).status_code == 303


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
async def test_bad_login_is_refused_and_logged(console, caplog, who, why):
    before = console.metrics.refused_tokens._value.get()
    answer = await log_in(console, who)
    assert answer.status_code == 403 and why in text_of(answer.text) and "you are not logged in" in answer.text
    assert not any(cookie.startswith("qmq_console=") for cookie in answer.headers.get_list("set-cookie"))
    assert console.metrics.refused_tokens._value.get() == before + 1 and why in caplog.text
    assert (await console.browser.get("/console")).status_code == 303


async def test_state_is_valid_once_and_in_one_browser(console, monkeypatch):
    address = await to_provider(console)
    back = await asyncio.to_thread(sent_back, address, "anna")
    another = console.new_browser()
    assert "not begun in this browser" in (await another.get(back)).text
    kept = console.browser.cookies[LOGIN_COOKIE]
    other_login = await to_provider(console)
    assert "not begun in this browser" in (await console.browser.get(back)).text, "the cookie is of a later login"
    for forged in (kept[:-1] + ("0" if kept[-1] != "0" else "1"), f"x{kept}", "", "x" * 10_000):
        another.cookies = {LOGIN_COOKIE: forged}
        assert (await another.get(back)).status_code == 403
    another.cookies = {LOGIN_COOKIE: kept}
    assert "You are oidc:anna" in (await another.get(back)).text
    another.cookies = {LOGIN_COOKIE: kept}
    assert "this login was finished before" in (await another.get(back)).text
    assert parse_qs(urlsplit(other_login).query)["state"] != parse_qs(urlsplit(address).query)["state"]
    back = await asyncio.to_thread(sent_back, await to_provider(console), "anna")
    late = routes.wall_ms() + ATTEMPT_MS
    monkeypatch.setattr(routes, "wall_ms", lambda: late)
    assert "longer than ten minutes" in (await console.browser.get(back)).text


async def test_code_requires_its_verifier(console):
    query = parse_qs(urlsplit(await to_provider(console)).query)
    assert query["code_challenge_method"] == ["S256"] and len(query["code_challenge"][0]) == 43
    first = await asyncio.to_thread(sent_back, await to_provider(console), "anna")
    code = parse_qs(urlsplit(first).query)["code"][0]
    second = await asyncio.to_thread(sent_back, await to_provider(console), "anna")
    own = parse_qs(urlsplit(second).query)["code"][0]
    injected = await console.browser.get(second.replace(own, code))
    assert injected.status_code == 503 and "the provider answered 400" in injected.text
    answer = await log_in(console, "anna", next="https://elsewhere/console/")
    assert 'url=/console"' in answer.text


async def test_absent_or_foreign_provider_is_refused(tmp_path, issuer):
    [free] = free_ports(1)
    async with console_of(f"http://127.0.0.1:{free}", tmp_path) as console:
        answer = await console.browser.get("/console/oidc/login")
        assert answer.status_code == 503 and "the provider does not answer" in answer.text
        token = await console.browser.post("/console/login", data={"token": console.tokens["viewer"]})
        assert token.status_code == 303, "a token is accepted as before"
    with pytest.raises(NotServed, match="issuer is"):
        await Provider(settings_of(f"{issuer}/")).begin("/console", now_ms=0)


async def test_browser_returns_logged_in(tmp_path, issuer):
    """Browsers do not send the session's cookie with a redirect from another site; the page after it finds it."""
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    async with console_of(issuer, tmp_path, redirect=f"{address}/console/oidc/callback") as console:
        serving = asyncio.create_task(HttpPort(console.app, listen("127.0.0.1", port)).run())
        try:
            await asyncio.to_thread(_log_in_with_a_browser, address, tmp_path / "profile")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def _log_in_with_a_browser(address, profile):
    with Chromium(profile) as browser:
        browser.open(f"{address}/console/trail")
        browser.run("document.querySelector('a.button').focus()")
        browser.follow()
        while "Audit trail" not in browser.run("document.querySelector('h1')?.innerText ?? ''"):
            browser.await_next("Page.loadEventFired")
        assert "oidc:anna · operator" in browser.text()
        assert "Log in" in browser.open(f"{address.replace('127.0.0.1', 'localhost')}/console"), (
            "a session belongs to one host"
        )


def test_settings_make_a_provider(issuer):
    words = {"oidc_issuer": issuer, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET}
    words["oidc_redirect"] = BACK.replace("metaserver", "localhost")
    provider = make_provider(MetaserverSettings(cluster_token="a secret of all", oidc_roles=("admin=a=b",), **words))
    address, attempt = asyncio.run(provider.begin("/console", now_ms=5))
    query = parse_qs(urlsplit(address).query)
    assert (query["redirect_uri"], query["client_id"]) == ([words["oidc_redirect"]], [CLIENT])
    assert (attempt.to, attempt.until_ms, query["state"]) == ("/console", 5 + ATTEMPT_MS, [attempt.state])
    assert role_of({"groups": ["a=b"]}, provider.settings) == TokenRole.ADMIN
    assert make_provider(MetaserverSettings(cluster_token="a secret of all")) is None


def test_roles_are_read_from_the_configured_claim():
    keycloak = settings_of("http://p", roles_claim="realm_access.roles")
    assert role_of({"realm_access": {"roles": ["on-call"]}}, keycloak) == TokenRole.OPERATOR
    auth0 = settings_of("http://p", roles_claim="https://shop.example/roles")
    assert role_of({"https://shop.example/roles": ["on-call"]}, auth0) == TokenRole.OPERATOR
    nested = settings_of("http://p", roles_claim="resource_access.shop.web.roles")
    assert role_of({"resource_access": {"shop.web": {"roles": ["on-call"]}}}, nested) == TokenRole.OPERATOR
    assert role_of({"groups": "on-call"}, settings_of("http://p")) == TokenRole.OPERATOR
    for groups in (True, 5, None, [["on-call"]], {"on-call": False}):
        with pytest.raises(AccessError, match="has a role here"):
            role_of({"groups": groups}, settings_of("http://p"))


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
