"""Shell. `/console`: pages for people, over the same actions as `/management`, `/api/v1` and the tools.

A browser sends its session in a cookie. Every address except the login checks it here, not in the guard, whose answers
are for programs. The content policy allows one script of a few lines, which refreshes charts, and nothing inline.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.routing import Route

from qmq.errors import AccessError, NotServed
from qmq.metaserver.actions import ACTIONS, Status
from qmq.metaserver.console import display, offers, pages
from qmq.metaserver.console.display import Readings
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.pages import (
    LOG_IN,
    PAGES,
    SECTIONS,
    Page,
    PageRequest,
    group_rates,
    overview,
    subject_rates,
)
from qmq.metaserver.console.sessions import ATTEMPT_MS, SESSION_MS, Attempt, ProviderPort, Sessions
from qmq.metaserver.console.survey import Surveyor
from qmq.metaserver.http.endpoints import ActionsPort
from qmq.metaserver.http.guard import PEER_CHARS_MAX, open_to_all
from qmq.metaserver.rpc.access import Refusals, wall_ms
from qmq.rights import Caller
from qmq.version import VERSION

log = logging.getLogger("qmq.metaserver")

ROOT = "/console"
COOKIE, LOGIN_COOKIE = "qmq_console", "qmq_console_login"
FIELDS_MAX = 100
FORM_CHARS_MAX = 4000
"""Longer values do not fit into every address, and would be lost at the login."""
STATIC = {
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Files of every page. Without our icon, browsers request /favicon.ico, which the log reports as a refusal each
time.
"""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Given(dict[str, str]):
    """Values of an address or a form; missing ones are empty."""

    def __missing__(self, name: str) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a browser. `caller` is None before the login."""

    request: Request
    cookie: str
    caller: Caller | None
    query: Given
    form: Given


Serve = Callable[[Visit], Awaitable[Response]]


class Console:
    """Console of one metaserver. Made by main; `routes` are for `build_app`."""

    def __init__(
        self,
        actions: ActionsPort,
        sessions: Sessions,
        refusals: Refusals,
        *,
        open_lists: bool = False,
        database_trouble: Callable[[], str] = lambda: "",
        nights: Nights | None = None,
        provider: ProviderPort | None = None,
        surveyor: Surveyor | None = None,
    ) -> None:
        self._actions = actions
        self._sessions = sessions
        self._refusals = refusals
        self._open_lists = open_lists
        self._database_trouble = database_trouble
        self._nights = nights
        loader = PackageLoader("qmq.metaserver.console")
        self._templates = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._templates.filters.update(display.FILTERS)
        static = files("qmq.metaserver.console").joinpath("static")
        self._static = {name: static.joinpath(name).read_bytes() for name in STATIC}
        self._readings = Readings()
        self._provider = provider
        self._surveyor = surveyor

    def routes(self) -> Iterator[Route]:
        """Return the routes of the console."""
        for page in PAGES:
            yield self._route("GET", page.path, self._shows(page))
        yield self._route("GET", "/login", self._ask_to_log_in)
        yield self._route("POST", "/login", self._log_in)
        yield self._route("POST", "/logout", self._log_out)
        if self._provider is not None:
            yield self._route("GET", "/oidc/login", self._go_to_provider)
            yield self._route("GET", "/oidc/callback", self._come_from_provider)
        yield self._route("GET", "/change", self._show_form)
        yield self._route("POST", "/change", self._change)
        yield self._route("GET", "/rates", self._renew_rates)
        yield self._route("GET", "/live", self._renew_overview)
        yield self._route("GET", "/tail", self._renew_tail)
        yield self._route("GET", "/definitions.json", self._send_definitions)
        for name in STATIC:
            yield self._route("GET", f"/{name}", self._send_static)

    def _route(self, method: str, path: str, serve: Serve) -> Route:
        @open_to_all  # open for the guard; the session is checked here
        async def endpoint(request: Request) -> Response:
            visit = await self._visit(request)
            if method == "POST" and request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
                response = self._page(
                    visit, "refused.html", 403, title="Refused", why="another site sent this form; nothing was changed"
                )
            else:
                response = await serve(visit)
            response.headers.update({**HEADERS, **dict(response.headers)})
            return response

        return Route(f"{ROOT}{path}", endpoint, methods=[method])

    async def _visit(self, request: Request) -> Visit:
        cookie = request.cookies.get(COOKIE, "")
        peer = request.client.host[:PEER_CHARS_MAX] if request.client else ""
        caller = None
        if cookie:
            try:
                caller = self._sessions.caller(cookie, now_ms=wall_ms(), peer=peer)
            except AccessError as error:
                self._refusals.note("console", peer, str(error))
                cookie = ""
        return Visit(request, cookie, caller, Given(request.query_params), _read_form(await request.body()))

    # Login and logout.

    async def _ask_to_log_in(self, visit: Visit) -> Response:
        return self._page(visit, "login.html", title="Log in", why="", next=_inside(visit.query["next"]))

    async def _log_in(self, visit: Visit) -> Response:
        to = _inside(visit.form["next"])
        try:
            cookie = self._sessions.begin(visit.form["token"].strip(), now_ms=wall_ms())
        except AccessError as error:
            peer = visit.request.client.host if visit.request.client else ""
            self._refusals.note("console", peer, str(error))
            return self._page(visit, "login.html", 401, title="Log in", why=str(error), next=to)
        return self._logged_in(visit, _go(to), cookie)

    def _logged_in(self, visit: Visit, response: Response, cookie: str) -> Response:
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=SESSION_MS // 1000,
            path=ROOT,
            httponly=True,
            samesite="strict",
            secure=visit.request.url.scheme == "https",
        )
        return response

    async def _go_to_provider(self, visit: Visit) -> Response:
        assert self._provider is not None, "else there is no such address"
        try:
            address, attempt = await self._provider.begin(_inside(visit.query["next"]), now_ms=wall_ms())
        except NotServed as error:
            return self._refuse_login(visit, str(error), 503)
        response = _go(address)
        response.set_cookie(
            LOGIN_COOKIE,
            self._sessions.sealed(attempt.text()),
            max_age=ATTEMPT_MS // 1000,
            path=f"{ROOT}/oidc",
            httponly=True,
            samesite="lax",  # it must come along when the provider sends the browser back
            secure=visit.request.url.scheme == "https",
        )
        return response

    async def _come_from_provider(self, visit: Visit) -> Response:
        assert self._provider is not None, "else there is no such address"
        now_ms = wall_ms()
        try:
            attempt = Attempt.of(self._sessions.unsealed(visit.request.cookies.get(LOGIN_COOKIE, "")))
            caller = await self._provider.finish(visit.query, attempt, now_ms=now_ms)
            cookie = self._sessions.begin_without_token(caller, now_ms=now_ms)
        except AccessError as error:
            return self._refuse_login(visit, str(error), 403)
        except NotServed as error:
            return self._refuse_login(visit, str(error), 503)
        log.info("console login caller=%s role=%s", caller.name, caller.role)
        # A page that leads on, not a redirect: on a redirect from another site, browsers do not send the session's
        # cookie.
        page = self._page(visit, "welcome.html", title="Logged in", person=caller, to=_inside(attempt.to))
        response = self._logged_in(visit, page, cookie)
        response.delete_cookie(LOGIN_COOKIE, path=f"{ROOT}/oidc", httponly=True, samesite="lax")
        return response

    def _refuse_login(self, visit: Visit, why: str, status: int) -> Response:
        peer = visit.request.client.host if visit.request.client else ""
        self._refusals.note("console", peer, why)
        response = self._page(visit, "refused.html", status, title="Not logged in", why=f"{why}; you are not logged in")
        response.delete_cookie(LOGIN_COOKIE, path=f"{ROOT}/oidc", httponly=True, samesite="lax")
        return response

    async def _log_out(self, visit: Visit) -> Response:
        if visit.caller is not None:
            if not self._sessions.is_csrf(visit.cookie, visit.form["csrf"]):
                return self._refuse_form(visit)
            self._sessions.end(visit.cookie, now_ms=wall_ms())
        response = _go(f"{ROOT}/login")
        response.delete_cookie(COOKIE, path=ROOT, httponly=True, samesite="strict")
        return response

    # Pages.

    def _shows(self, page: Page) -> Serve:
        async def show(visit: Visit) -> Response:
            if visit.caller is None and not self._open_lists:
                return _to_login(visit)
            return self._page(
                visit, page.template, title=page.title, **await page.read_values(self._page_request(visit), visit.query)
            )

        return show

    def _page_request(self, visit: Visit) -> PageRequest:
        return PageRequest(
            self._actions,
            visit.caller,
            self._readings,
            open_lists=self._open_lists,
            nights=self._nights,
            surveyor=self._surveyor,
        )

    async def _renew_rates(self, visit: Visit) -> Response:
        """Return the part of a page that its script refreshes."""
        if visit.caller is None and not self._open_lists:
            return Response(status_code=401)
        page_request, query = self._page_request(visit), visit.query
        if query["subject"]:
            drawn = await subject_rates(page_request, query["subject"], query["group"])
            return self._part("subject_live.html", **drawn)
        return self._part("rates.html", **await group_rates(page_request, query["brokerGroup"]))

    async def _renew_tail(self, visit: Visit) -> Response:
        """Return the newest messages, for the live tail."""
        if visit.caller is None:
            return Response(status_code=401)
        found = await pages.tail(self._page_request(visit), visit.query)
        return self._part("tail.html", **found, query=visit.query, link=_link)

    async def _renew_overview(self, visit: Visit) -> Response:
        if visit.caller is None and not self._open_lists:
            return Response(status_code=401)
        shown = await overview(self._page_request(visit), visit.query)
        return self._part("live.html", **shown, query=visit.query, link=_link, root=ROOT, now_ms=wall_ms())

    def _part(self, template: str, **context: Any) -> Response:
        text = self._templates.get_template(template).render(**context)
        return Response(text.encode("utf-8", "replace"), media_type="text/html; charset=utf-8")

    async def _send_definitions(self, visit: Visit) -> Response:
        if visit.caller is None:
            return _to_login(visit)
        answer = await self._page_request(visit).ask("ExportDefinitions")
        if not answer.done:
            return self._page(visit, "refused.html", 403, title="Refused", why=answer.message)
        text = json.dumps(answer.data, ensure_ascii=False, indent=1) + "\n"
        headers = {"Content-Disposition": 'attachment; filename="definitions.json"'}
        return Response(text.encode("utf-8", "replace"), headers=headers, media_type="application/json")

    async def _send_static(self, visit: Visit) -> Response:
        name = visit.request.url.path.rpartition("/")[2]
        return Response(self._static[name], media_type=STATIC[name], headers={"Cache-Control": "max-age=300"})

    # Changes.

    async def _show_form(self, visit: Visit) -> Response:
        if visit.caller is None:
            return _to_login(visit)
        action = offers.offered(visit.query["action"])
        if action is None:
            return self._page(
                visit, "refused.html", 404, title="Refused", why="the console does not offer this change; use the tools"
            )
        arguments = pages.arguments_of(action, visit.query)
        return self._page(visit, "change.html", title=action.name, action=action, arguments=arguments, step="form")

    async def _change(self, visit: Visit) -> Response:
        if visit.caller is None:
            return self._to_login_and_back(visit)
        if not self._sessions.is_csrf(visit.cookie, visit.form["csrf"]):
            return self._refuse_form(visit)
        action = offers.offered(visit.form["action"])
        if action is None:
            return self._page(
                visit, "refused.html", 404, title="Refused", why="the console does not offer this change; use the tools"
            )
        page_request, arguments = (
            PageRequest(self._actions, visit.caller, self._readings, open_lists=False),
            pages.arguments_of(action, visit.form),
        )
        if not visit.caller.may(action.role):
            why = f"token {visit.caller.name} has the role {visit.caller.role}; this needs {action.role}"
            return self._page(visit, "refused.html", 403, title="Refused", why=why)
        if visit.form["step"] == "confirm":
            answer = await pages.carry_out(page_request, action, arguments, visit.form["plan"])
            return self._page(
                visit, "changed.html", title=action.name, action=action, arguments=arguments, answer=answer
            )
        planned = await pages.plan(page_request, action, arguments)
        return self._page(
            visit, "change.html", title=action.name, action=action, arguments=arguments, step="plan", **planned
        )

    def _to_login_and_back(self, visit: Visit) -> Response:
        """Show the form again after a new login: the session ended while it was filled in."""
        action = offers.offered(visit.form["action"])
        form = _link("/change", action=action.name, **pages.arguments_of(action, visit.form)) if action else ROOT
        return _go(_link("/login", next=form)) if len(form) <= FORM_CHARS_MAX else _go(f"{ROOT}/login")

    def _refuse_form(self, visit: Visit) -> Response:
        why = "this form belongs to another session; nothing was changed. Open the page again"
        return self._page(visit, "refused.html", 403, title="Refused", why=why)

    def _page(self, visit: Visit, template: str, status: int = 200, /, *, title: str, **context: Any) -> Response:
        here = visit.request.url.path
        text = self._templates.get_template(template).render(
            title=title,
            pages=[page for page in PAGES if page.section],
            sections=SECTIONS,
            root=ROOT,
            here=here,
            caller=visit.caller,
            query=visit.query,
            csrf=self._sessions.csrf(visit.cookie) if visit.cookie else "",
            now_ms=wall_ms(),
            version=VERSION,
            trouble=self._database_trouble(),
            Status=Status,
            LOG_IN=LOG_IN,
            link=_link,
            has_provider=self._provider is not None,
            can=lambda name: _may(visit.caller, name),
            **context,
        )
        return Response(text.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


def _may(caller: Caller | None, name: str) -> bool:
    """Return whether a link is useful: to a change that the console offers, or to a list that the caller may see."""
    action = offers.offered(name) if ACTIONS[name].changes else ACTIONS[name]
    return caller is not None and action is not None and caller.may(action.role)


def _link(path: str, **arguments: Any) -> str:
    """Return an address within the console; empty arguments are left out."""
    text = urlencode({name: value for name, value in arguments.items() if value not in ("", None)})
    return f"{ROOT}{path}?{text}" if text else f"{ROOT}{path}"


def _inside(address: str) -> str:
    """Return the page after the login: an address of the console that fits into a header, else the first page."""
    is_plain = address.isascii() and address.isprintable()
    return address if is_plain and address.startswith((f"{ROOT}/", f"{ROOT}?")) else ROOT


def _to_login(visit: Visit) -> Response:
    url = visit.request.url
    if visit.request.method != "GET" or url.path == ROOT:
        return _go(f"{ROOT}/login")
    return _go(f"{ROOT}/login?next={quote(url.path + (f'?{url.query}' if url.query else ''), safe='')}")


def _go(address: str) -> Response:
    return Response(status_code=303, headers={"Location": address})


def _read_form(body: bytes) -> Given:
    try:
        return Given(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:
        return Given()
