"""Shell. Pages of the console: the actions that each page runs, and the values that its template shows.

A change is the operator's action itself, with `dryRun` for its plan: same checks, same rights, same audit trail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qmq.commands.action import DETAILS, DRY_RUN, IF_PLAN, differences
from qmq.ledger import LedgerDamaged
from qmq.metaserver.actions import ACTIONS, Action, Answer, Status
from qmq.metaserver.console.display import (
    SERIES_MAX,
    Rates,
    Reading,
    Readings,
    bars_of,
    body_of,
    chart_of,
    moment_ms,
    per_second,
    value_of,
    without_fate,
)
from qmq.metaserver.console.front import History, front_of
from qmq.metaserver.console.nights import Nights
from qmq.metaserver.console.offers import of_broker_group, of_consumer_group, of_subject
from qmq.metaserver.console.survey import Surveyor
from qmq.metaserver.http.endpoints import ANYBODY, ActionsPort, run_within
from qmq.metaserver.rpc.access import wall_ms
from qmq.rights import Caller

LOG_IN = "LogIn"


class PageRequest:
    """Actions that one request of a browser may run.

    Args:
        caller: caller that is logged in, or None.
        open_lists: lists that QMQ answers without a token need no login.
        readings: readings of subjects that are open in a console.
        nights: the audit's ledger; None if its directory is not set.
        surveyor: survey of the cluster; None in tests of single pages.
    """

    def __init__(
        self,
        actions: ActionsPort,
        caller: Caller | None,
        readings: Readings,
        *,
        open_lists: bool,
        nights: Nights | None = None,
        surveyor: Surveyor | None = None,
    ) -> None:
        self._actions = actions
        self.caller = caller
        self._open_lists = open_lists
        self.readings = readings
        self.nights = nights
        self.surveyor = surveyor

    async def ask(self, name: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Run an action; empty arguments are left out. Without a login, the answer is a refusal."""
        action, caller = ACTIONS[name], self.caller
        if caller is None and self._open_lists and not action.needs_token:
            caller = ANYBODY
        if caller is None:
            return Answer(Status.REFUSED, "log in to see this", code=LOG_IN)
        given = {name: str(value) for name, value in (arguments or {}).items() if value not in ("", None)}
        return await run_within(self._actions, action, given, caller)

    async def ask_for(self, seconds: float, name: str, arguments: Mapping[str, Any] | None = None) -> Answer:
        """Run an action with a time limit, for parts of a page that are not worth a longer wait."""
        try:
            async with asyncio.timeout(seconds):
                return await self.ask(name, arguments)
        except TimeoutError:
            return Answer(Status.WAIT, f"{name} takes longer than {seconds:g} s; ask for less, or on its own page")


RATES_S = 1.0
"""Time limit for a silent broker's rates."""
IN, OUT = "messages in", "messages out"
"""Labels with a space, so no consumer group has the same name."""
CONSUMERS_MAX = 100


async def group_rates(request: PageRequest, name: str) -> dict[str, Any]:
    """Return the values of `rates.html` for a broker group."""
    answer = await request.ask_for(RATES_S, "Rates", {"brokerGroup": name})
    for why in (answer.data or {}).get("unasked", {}).values():
        answer = Answer(Status.WAIT, why)
    rates = [
        Rates(row["at"], {label: row[field] for field, label in (("taken", IN), ("delivered", OUT)) if field in row})
        for row in (answer.data or {}).get("rates", ())
    ]
    empty = "Its master has just begun."
    return {"answer": answer, "chart": chart_of(rates, wall_ms()), "empty": empty}


async def subject_rates(request: PageRequest, subject: str, group: str) -> dict[str, Any]:
    """Return the values of `subject_live.html`."""
    arguments = {"subject": subject, "group": group}
    return drawn_of_subject(request, subject, group, await request.ask("Consumers", arguments))


def drawn_of_subject(request: PageRequest, subject: str, group: str, consumers: Answer) -> dict[str, Any]:
    """Return the values of `subject_live.html`, from an answer of Consumers: rates, also of each connection."""
    readings: list[Reading] = []
    rows, speed = (consumers.data or {}).get("groups", ()), dict[str, float]()
    each = [(row, consumer) for row in rows for consumer in row["consumers"]]
    producers = [] if group else sorted((consumers.data or {}).get("producers", ()), key=lambda row: -row["messages"])
    if consumers.done and not consumers.data["unasked"]:  # a partial sum would look like a fall
        now = wall_ms()
        readings = request.readings.note(f"{subject} {group}", Reading(now, counts_of(rows)))
        given = {_connection(*pair): pair[1]["delivered"] for pair in each[:CONSUMERS_MAX]}
        given |= {_sender(row): row["messages"] for row in producers[:CONSUMERS_MAX]}
        steps = per_second(request.readings.note(f"{subject} {group} consumers", Reading(now, given))) if given else []
        speed = dict(steps[-1].values) if steps else {}
    elif consumers.done:
        consumers = Answer(Status.WAIT, "not every broker group answers", data=consumers.data)
    empty = "Counting begins now; the first values come in five seconds."
    shown = [(row, consumer, speed.get(_connection(row, consumer))) for row, consumer in each[:CONSUMERS_MAX]]
    return {
        "answer": consumers,
        "chart": chart_of(per_second(readings), wall_ms()),
        "empty": empty,
        "each": shown,
        "more_consumers": max(len(each) - CONSUMERS_MAX, 0),
        "producers": [(row, speed.get(_sender(row))) for row in producers[:CONSUMERS_MAX]],
        "more_producers": max(len(producers) - CONSUMERS_MAX, 0),
        "subject": subject,
    }


def _sender(row: Mapping[str, Any]) -> str:
    return f"{row['brokerGroup']} {row['peer']}"


def _connection(row: Mapping[str, Any], consumer: Mapping[str, Any]) -> str:
    return f"{row['brokerGroup']} {row['group']} {consumer['consumer']}"


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return the messages of a subject so far, and those that each consumer group is done with."""
    ends, done = dict[str, int](), dict[str, int]()
    for row in rows:
        ends[row["brokerGroup"]] = row["nextSequence"]
        done[row["group"]] = done.get(row["group"], 0) + row["nextSequence"] - row["messages"]
    return {IN: sum(ends.values())} | dict(list(done.items())[:SERIES_MAX]) if rows else {}


def arguments_of(action: Action, given: Mapping[str, str]) -> dict[str, str]:
    """Return the action's arguments from a form; empty fields are left out."""
    names = {parameter.name for parameter in action.parameters}
    return {name: text.strip() for name, text in given.items() if name in names and text.strip()}


async def plan(request: PageRequest, action: Action, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return the plan of a change."""
    answer = await request.ask(action.name, {**arguments, DRY_RUN: "true"})
    shown = answer.data if isinstance(answer.data, dict) and DRY_RUN in answer.data else None
    changed = differences(shown["before"], shown["after"]) if shown else []
    return {"answer": answer, "plan": shown, "differences": changed}


async def carry_out(request: PageRequest, action: Action, arguments: Mapping[str, str], shown: str) -> Answer:
    """Make the change, unless its plan differs from the one that was `shown`."""
    has_details = action.parameter(DETAILS) is not None
    return await request.ask(action.name, {**arguments, IF_PLAN: shown, **({DETAILS: "true"} if has_details else {})})


FILTERS_OF_MESSAGES = ("subject", "id", "tag", "property", "brokerGroup", "sequence")
TAIL, TAIL_MS = 50, 10_000
"""Messages of a live tail per look. A busier subject has more; the tail skips some."""
CONTENT_CHARS_MAX, PAGE_CHARS_MAX, CUT_CHARS = 20_000, 250_000, 200
"""Characters of one message, and of all on a page; beyond that, each message is cut to the last number."""
ALONE_CHARS_MAX = 200_000
"""Characters of a message that is chosen by its id."""
DUMP_BYTES, ALONE_DUMP_BYTES = 64, 1_024
"""Bytes of a binary body in a list, and of a message that is chosen by its id."""

Query = Mapping[str, str]
"""Query string of the page; missing values are empty."""
ReadValues = Callable[[PageRequest, Query], Awaitable[dict[str, Any]]]

ROWS = 100
"""Number of groups, subjects or messages per page."""
ASKED_MAX = 100
"""Number of broker groups asked by default: a page that asks 2,000 takes seconds."""
CLIENTS_S = 1.0
"""Time limit for the clients of all metaservers."""
LAG_MS = 12 * 3_600_000
OUTBOX_S, STUCK_S = 3.0, 30.0
"""Time limit for outboxes: a hanging database keeps its watchdog for 20 s. Only the page of one database waits."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page: address below /console, title, questions.

    Args:
        section: its part of the menu; empty: other pages link to it.
    """

    path: str
    title: str
    template: str
    read_values: ReadValues
    section: str = ""


async def overview(request: PageRequest, query: Query) -> dict[str, Any]:
    groups = await request.ask("ListBrokerGroups")
    surveyor, survey = request.surveyor, None
    if surveyor is not None and request.caller is not None:
        survey = surveyor.see()
    wanted, state = query["name"], query["state"]
    rows = [row for row in groups.data or () if wanted in row["groupName"]]
    counts = {"all": len(rows), "taking": sum(row["writable"] for row in rows)}
    rows = [row for row in rows if state != "readonly" or not row["writable"]]
    rows.sort(key=lambda row: row["writable"])  # urgent rows come first
    paged = _paged(rows, query)
    front = front_of(survey, surveyor.history if surveyor else History(), paged["rows"], wall_ms())
    return {"groups": groups, "counts": counts, "is_known": request.caller is not None, **paged, **front}


async def _group(request: PageRequest, query: Query) -> dict[str, Any]:
    arguments = {"brokerGroup": query["name"]}
    groups, status, readonly, rates = await asyncio.gather(
        request.ask("ListBrokerGroups", arguments),
        request.ask("ReplicaStatus", arguments),
        request.ask("ListReadonly", arguments),
        group_rates(request, query["name"]),
    )
    group = next((row for row in groups.data or () if row["groupName"] == arguments["brokerGroup"]), None)
    values = {"group": group, "groups": groups, "status": status, "readonly": readonly, **rates}
    survey = request.surveyor.see() if request.surveyor and request.caller else None
    parts = [row for row in survey.processes if row.group == query["name"]] if survey and group else []
    line = survey.rates.get(query["name"], {}) if survey else {}
    return values | {"parts": parts, "line": line, "actions": of_broker_group(group) if group else []}


async def _doctor(request: PageRequest, query: Query) -> dict[str, Any]:
    return {"doctor": await request.ask("Doctor")}


async def _subjects(request: PageRequest, query: Query) -> dict[str, Any]:
    arguments = {"prefix": query["prefix"], "after": query["after"], "brokerGroup": query["group"], "limit": ROWS + 1}
    routes = await request.ask("ListSubjectRoutes", arguments)
    return {"routes": routes, "rows": (routes.data or [])[:ROWS], "more": len(routes.data or ()) > ROWS}


async def _consumers(request: PageRequest, query: Query) -> dict[str, Any]:
    """Return the values of one subject, or of one of its consumer groups; else the groups with the largest lag."""
    if query["subject"]:
        return await _subject(request, query["subject"], query["group"])
    count = len((await request.ask("ListBrokerGroups")).data or ())
    if count > ASKED_MAX and query["all"] != "yes":
        return {"lag": None, "count": count}
    return {"lag": await request.ask("Lag", {"group": query["group"], "limit": ROWS}), "count": count}


async def _subject(request: PageRequest, subject: str, group: str) -> dict[str, Any]:
    arguments = {"subject": subject, "group": group}
    lag, consumers, limits, route, clients = await asyncio.gather(
        request.ask("Lag", arguments),
        request.ask("Consumers", arguments),
        request.ask("ListLimits", {"subject": subject}),
        request.ask("QuerySubjectRoute", {"subject": subject}),
        request.ask_for(CLIENTS_S, "Clients", {"subject": subject, "limit": ROWS}),
    )
    drawn = drawn_of_subject(request, subject, group, consumers)
    rows = (lag.data or {}).get("lag", ())
    return {
        "lag": lag,
        "count": 0,
        "facts": facts_of((consumers.data or {}).get("groups", ()), rows)
        | {"bytes": sum((consumers.data or {}).get("bytes", {}).values())},
        "limits": [row for row in limits.data or () if row["group"] in ("*", group) or not group],
        "route": route,
        "clients": clients,
        "lag_chart": _lag_chart(request, subject, [row["group"] for row in rows]),
        "actions": of_consumer_group() if group else of_subject(),
        **drawn,
    }


def facts_of(rows: Iterable[Mapping[str, Any]], lags: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return figures of a subject: kept messages, unacked ones, lag, dead letters."""
    rows, lags = list(rows), list(lags)
    kept = {row["brokerGroup"]: row["nextSequence"] - row["firstSequence"] for row in rows}
    return {
        "kept": sum(kept.values()),
        "lag": sum(row["messages"] for row in lags),
        "age": max((row["ageSeconds"] for row in lags if row["messages"]), default=0),
        "unacked": sum(consumer["unacked"] for row in rows for consumer in row["consumers"]),
        "dead": sum(row["deadLetters"] for row in lags),
        "connected": len(
            {consumer["consumer"] for row in rows for consumer in row["consumers"] if consumer["connected"]}
        ),
    }


def _lag_chart(request: PageRequest, subject: str, groups: Iterable[str]) -> dict[str, Any] | None:
    """Return the chart of the lag over the last hours, from the survey's history."""
    if request.surveyor is None or request.caller is None:
        return None
    request.surveyor.see()
    history = request.surveyor.history
    series = {group: history.long("lag", subject, group) for group in list(groups)[:SERIES_MAX]}
    values: dict[int, dict[str, float]] = {}
    for group, points in series.items():
        for at_ms, value in points:
            values.setdefault(at_ms, {})[group] = value
    return chart_of([Rates(at_ms, values[at_ms]) for at_ms in sorted(values)], wall_ms(), LAG_MS)


async def _trail(request: PageRequest, query: Query) -> dict[str, Any]:
    arguments = {name: query[name] for name in ("who", "name", "brokerGroup", "subject", "before", "request")}
    since, until, wrong = _times(query)
    return {"trail": await request.ask("AuditTrail", {**arguments, "since": since, "until": until}), "wrong": wrong}


async def _audit(request: PageRequest, query: Query) -> dict[str, Any]:
    """Return the nights of the ledger. It is a directory, so no action checks rights: callers with the right to the
    whole trail see it.
    """
    if request.caller is None or request.caller.scope.subjects or request.caller.scope.groups:
        return {"set": True, "trouble_of_ledger": "this needs a token for all subjects and groups", "status": []}
    if request.nights is None:
        return {"set": False, "trouble_of_ledger": "", "status": []}
    groups = await request.ask("ListBrokerGroups")
    there = {row["groupName"] for row in groups.data} if groups.done else None
    try:
        nights = await asyncio.to_thread(request.nights.shown, query["group"], now_ms=wall_ms(), there=there)
    except (LedgerDamaged, OSError) as error:
        return {"set": True, "trouble_of_ledger": str(error), "status": []}
    return {"set": True, "trouble_of_ledger": "", **nights}


async def _messages(request: PageRequest, query: Query) -> dict[str, Any]:
    """Return stored messages; with `dead`, the dead letters of that consumer group; with `live`, the newest as they
    come.
    """
    since, until, wrong = _times(query)
    if not query["subject"]:
        return {"found": None, "wrong": wrong, "shown": []}
    arguments: dict[str, Any] = {name: query[name] for name in FILTERS_OF_MESSAGES}
    arguments |= {"deadLettersOf": query["dead"], "since": since, "until": until}
    arguments["limit"] = TAIL if query["live"] else ROWS
    arguments["bodyBytes"] = most = ALONE_CHARS_MAX if query["id"] else CONTENT_CHARS_MAX
    answer = await request.ask("Browse", arguments)
    return {"found": answer, "wrong": wrong, "shown": shown_messages(answer, most, is_dead=bool(query["dead"]))}


async def tail(request: PageRequest, query: Query) -> dict[str, Any]:
    """Return the newest messages. With a filter only those of the last seconds: a search through all takes long."""
    arguments: dict[str, Any] = {name: query[name] for name in FILTERS_OF_MESSAGES}
    arguments |= {"limit": TAIL, "bodyBytes": CONTENT_CHARS_MAX}
    if any(query[name] for name in ("id", "tag", "property")):
        arguments["since"] = wall_ms() - TAIL_MS
    answer = await request.ask("Browse", arguments)
    return {"found": answer, "shown": shown_messages(answer, CONTENT_CHARS_MAX, is_dead=False)}


def shown_messages(answer: Answer, chars_max: int, *, is_dead: bool) -> list[dict[str, Any]]:
    """Return messages with `content`, their properties as JSON, and `shown_body`.

    All together are bounded: later ones are cut short.
    """
    shown, left = [], PAGE_CHARS_MAX
    dump_bytes = ALONE_DUMP_BYTES if chars_max == ALONE_CHARS_MAX else DUMP_BYTES
    for message in (answer.data or {}).get("messages", ()):
        properties = without_fate(message["properties"]) if is_dead else message["properties"]
        body = body_of(message, min(chars_max, max(left, CUT_CHARS)), dump_bytes)
        left -= len(body["text"]) if body else 0
        text = value_of(properties) if properties or not body else ""
        most = min(chars_max, max(left, CUT_CHARS))
        left -= min(len(text), most)
        shown.append(message | {"content": text[:most], "cut": max(len(text) - most, 0), "shown_body": body})
    return shown


async def _delayed(request: PageRequest, query: Query) -> dict[str, Any]:
    since, until, wrong = _times(query)
    arguments = {"subject": query["subject"], "since": since, "until": until}
    stats, listed, schedules = await asyncio.gather(
        request.ask("DelayStats", {"subject": query["subject"]}),
        request.ask("ListDelayed", arguments),
        request.ask("ListSchedules", {"subject": query["subject"], "owner": query["owner"], "limit": ROWS}),
    )
    drawn = bars_of(stats.data["hours"] if stats.done else (), wall_ms())
    return {"stats": stats, "listed": listed, "schedules": schedules, "wrong": wrong, "drawn": drawn}


async def _outbox(request: PageRequest, query: Query) -> dict[str, Any]:
    """Return the outboxes registered at the metaserver, and their rows as reported by the watchdogs."""
    arguments = {"room": query["room"], "database": query["database"], "limit": ROWS}
    seconds = STUCK_S if query["database"] else OUTBOX_S
    databases, watchdogs, stuck = await asyncio.gather(
        request.ask("ListDbs"), request.ask("ListWatchdogs"), request.ask_for(seconds, "OutboxStuck", arguments)
    )
    shown = list(_of_rows((stuck.data or {}).get("databases", ()), ROWS))
    return {"databases": databases, "watchdogs": watchdogs, "stuck": stuck, "stuck_shown": shown}


async def _tokens(request: PageRequest, query: Query) -> dict[str, Any]:
    tokens = await request.ask("ListTokens")
    rows = sorted(tokens.data or (), key=lambda row: (not row["valid"], row["name"], row["created"]))
    return {"tokens": tokens, **_paged(rows, query)}


async def _settings(request: PageRequest, query: Query) -> dict[str, Any]:
    answer = await request.ask("Settings", {"brokerGroup": query["group"]})
    return {"settings": answer, "kinds": settings_by_kind((answer.data or {}).get("processes", ()))}


def settings_by_kind(processes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return, for each kind of process and each setting, the values and the processes that have them."""
    kinds: dict[str, dict[str, dict[str, list[str]]]] = {}
    for process in processes:
        settings = kinds.setdefault(process["kind"], {})
        for name, value in process["settings"].items():
            settings.setdefault(name, {}).setdefault(value, []).append(process["process"])
    return kinds


async def _definitions(request: PageRequest, query: Query) -> dict[str, Any]:
    answer = await request.ask("ExportDefinitions")
    counts = {name: len(rows) for name, rows in (answer.data or {}).items() if isinstance(rows, list)}
    return {"definitions": answer, "counts": counts}


def _of_rows(databases: Iterable[dict[str, Any]], rows_max: int) -> Iterator[dict[str, Any]]:
    """Return the first databases, limited to this number of rows together; a heading counts as one."""
    rows = 0
    for database in databases:
        if rows >= rows_max:
            return
        rows += 1 + len(database.get("rows", ()))
        yield database


def _times(query: Query) -> tuple[int | None, int | None, str]:
    """Read `since` and `until`; report a text that is no moment."""
    texts = [query["since"], query["until"]]
    since, until = (moment_ms(text) if text else None for text in texts)
    wrong = [text for text, ms in zip(texts, (since, until), strict=True) if text and ms is None]
    return since, until, wrong[0] if wrong else ""


def _paged(rows: list[Any], query: Query) -> dict[str, Any]:
    """Return one page of a list, with `page` counted from 0."""
    text = query["page"]
    page = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0
    begin = page * ROWS
    return {"rows": rows[begin : begin + ROWS], "page": page, "more": begin + ROWS < len(rows), "total": len(rows)}


SECTIONS = ("Now", "Messages", "Proof", "Set-up")
"""Parts of the menu, in its order."""
PAGES = (
    Page("", "Overview", "overview.html", overview, "Now"),
    Page("/group", "Broker group", "group.html", _group),
    Page("/consumers", "Consumers", "consumers.html", _consumers, "Now"),
    Page("/delayed", "Delayed", "delayed.html", _delayed, "Now"),
    Page("/outbox", "Outbox", "outbox.html", _outbox, "Now"),
    Page("/subjects", "Subjects", "subjects.html", _subjects, "Messages"),
    Page("/messages", "Messages", "messages.html", _messages, "Messages"),
    Page("/doctor", "Doctor", "doctor.html", _doctor, "Proof"),
    Page("/audit", "Nightly audit", "audit.html", _audit, "Proof"),
    Page("/trail", "Audit trail", "trail.html", _trail, "Proof"),
    Page("/settings", "Settings", "settings.html", _settings, "Set-up"),
    Page("/tokens", "Tokens", "tokens.html", _tokens, "Set-up"),
    Page("/definitions", "Definitions", "definitions.html", _definitions, "Set-up"),
)
