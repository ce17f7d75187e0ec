"""Core. Commands for messages: produce, consume, tail, browse, redrive, and for delayed messages.

Commands of MESSAGES connect to brokers as clients do, so they need a token with the right to produce or consume; an
operator's token may read. Commands of DELAYS call the metaserver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from qmq.errors import InvalidName
from qmq.subjects import check_name, check_subject
from qmq.tools.command import SUBJECT, Command, Kind, Option, bad, good, of_action, warning
from qmq.tools.table import Block, Cell, Column, Table, moment, size, span, utc

FORMATS = ("line", "json", "properties")
PROPERTY = Option("property", "only messages with this property; several times: with all of them", "", Kind.PAIR)
TAG = Option("tag", "only messages with this tag; a,b: with both", default="")
ID = Option("id", "only the message with this id", default="")
_BROKER_GROUP = Option("brokerGroup", "only messages of this broker group", default="")
SINCE = Option("since", "only messages stored at this time or later (2026-01-31T12:00:00Z; 90m: ago)", "", Kind.MOMENT)
UNTIL = Option("until", "only messages stored before this time", "", Kind.MOMENT)
_FORMAT = Option("format", "output format", default="line", choices=FORMATS)
_DEAD = Option("deadLetters", "show the dead letters of --group", "", Kind.FLAG, alone="true")
_DEAD_GROUP = Option("group", "consumer group of the dead letters", default="")


def names_fault(arguments: Mapping[str, str]) -> str:
    """Return the fault in the names of subject and consumer group, or an empty text."""
    try:
        check_subject(arguments["subject"])
        if arguments.get("group"):
            check_name("consumer group", arguments["group"])
    except InvalidName as error:
        return str(error)
    return ""


def _first_of(*problems: str) -> str:
    return next(filter(None, problems), "")


def _browse_fault(arguments: Mapping[str, str]) -> str:
    return _first_of(names_fault(arguments), *_dead_letter_faults(arguments), *_number_faults(arguments))


def _dead_letter_faults(arguments: Mapping[str, str]) -> Iterator[str]:
    if (arguments.get("deadLetters") == "true") != ("group" in arguments):
        yield "--deadLetters and --group go together: the dead letters of a consumer group"


def _destination_faults(arguments: Mapping[str, str]) -> Iterator[str]:
    if arguments.get("to"):
        try:
            check_name("subject", arguments["to"])
        except InvalidName as error:
            yield str(error)


def _number_faults(arguments: Mapping[str, str]) -> Iterator[str]:
    for name in ("limit", "count", "rate"):
        if name in arguments and int(arguments[name]) == 0:
            yield f"--{name} is at least 1"


def _produce_fault(arguments: Mapping[str, str]) -> str:
    given = [name for name in ("property", "json-body", "body") if name in arguments]
    if "file" in arguments and (given or arguments.get("count", "1") != "1"):
        return "--file excludes the other messages: its lines are sent"
    if "file" not in arguments and not given:
        return "nothing to send: give --property, --json-body, --body or --file"
    if "content-type" in arguments and "body" not in arguments:
        return "--content-type needs --body: it describes the body"
    return _first_of(names_fault(arguments), *_number_faults(arguments))


def _consume_fault(arguments: Mapping[str, str]) -> str:
    if arguments.get("ack") == "true" and "group" not in arguments:
        return "--ack needs --group: without one there is no consumer group to keep a position for"
    return _first_of(names_fault(arguments), *_number_faults(arguments))


MESSAGES = (
    Command(
        "Produce",
        "send messages and report the outcome of each",
        "--subject=order.changed --property orderNo=42 --tag=paid --body=@order.json",
        (
            SUBJECT,
            Option("property", "a property of the message; may be given several times", "", Kind.PAIR),
            Option("json-body", "a JSON object with the properties", default=""),
            Option("body", "the body: a text, or the content of a file; @- is standard input", "", Kind.BODY),
            Option("content-type", "media type of --body; default: application/json for a JSON object or list", ""),
            Option("file", "a file with one JSON object per line; - is standard input", "", Kind.LINES),
            Option("tag", "tags of the messages: a,b", default=""),
            Option("orderKey", "messages of one key are consumed in order", default=""),
            Option("count", "number of copies to send, each with its own id", "1", Kind.NUMBER),
            Option("wait", "time limit per message, in seconds; default: 30", "30000", Kind.SECONDS),
            Option("dry-run", "check the messages, send none", "", Kind.FLAG, alone="true"),
        ),
        runs="qmq.tools.messages.client:produce",
        fault_of=_produce_fault,
    ),
    Command(
        "Consume",
        "read messages as a consumer; without --ack they go back",
        "--subject=order.changed --start=earliest --limit=10",
        (
            SUBJECT,
            Option("group", "consumer group; default: a temporary one", default=""),
            Option("tags", "only messages with one of these tags: a,b", default=""),
            Option("start", "start of a new group", "latest", Kind.START),
            Option("limit", "end after this many messages; default: at Ctrl-C", "", Kind.NUMBER),
            Option("wait", "end after this many seconds without a message; default: wait on", "", Kind.SECONDS),
            Option("ack", "ack the messages: they do not go back", "", Kind.FLAG, alone="true"),
            _FORMAT,
        ),
        runs="qmq.tools.messages.client:consume",
        fault_of=_consume_fault,
    ),
    Command(
        "Tail",
        "show new messages of all broker groups; consumers are not affected",
        "--subject=order.changed --tag=paid",
        (
            SUBJECT,
            Option("last", "number of newest messages to show first", "10", Kind.NUMBER),
            TAG,
            PROPERTY,
            _DEAD,
            _DEAD_GROUP,
            _BROKER_GROUP,
            Option("limit", "end after this many messages; default: at Ctrl-C", "", Kind.NUMBER),
            _FORMAT,
        ),
        runs="qmq.tools.messages.browse:tail",
        fault_of=_browse_fault,
    ),
    Command(
        "Browse",
        "list stored messages; consumers are not affected",
        "--subject=order.changed --property orderNo=42 --since=24h",
        (
            SUBJECT,
            _DEAD,
            _DEAD_GROUP,
            Option("sequence", "first sequence, counted per broker group", "", Kind.NUMBER),
            SINCE,
            UNTIL,
            ID,
            PROPERTY,
            TAG,
            _BROKER_GROUP,
            Option("limit", "at most this many messages", "20", Kind.NUMBER),
            Option(
                "order",
                "default: newest first; with --sequence or --since, oldest first",
                "",
                choices=("newest", "oldest"),
            ),
        ),
        runs="qmq.tools.messages.browse:browse",
        fault_of=_browse_fault,
    ),
    Command(
        "Redrive",
        "return dead letters to their consumer group, or send them to a subject",
        "--subject=order.changed --group=billing --reason=timeout --rate=100 --out=receipt.json",
        (
            SUBJECT,
            Option("group", "consumer group of the dead letters"),
            Option("from", "subject with the dead letters, if LimitGroup --deadLettersTo set one", default=""),
            Option("to", "destination subject; default: back to that consumer group alone", default=""),
            ID,
            PROPERTY,
            TAG,
            Option("reason", "only dead letters with this text in their reason", default=""),
            SINCE,
            UNTIL,
            Option("limit", "at most this many; default: all", "", Kind.NUMBER),
            Option("rate", "at most this many a second", "1000", Kind.NUMBER),
            Option("out", "file for the receipt: ids, old and new sequences", "", Kind.PATH),
        ),
        runs="qmq.tools.messages.redrive:run",
        changes=True,
        look="Browse --subject={subject} --deadLetters --group={group}",
        fault_of=lambda arguments: _first_of(
            names_fault(arguments), *_destination_faults(arguments), *_number_faults(arguments)
        ),
    ),
)


def _stats(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("GROUP", "brokerGroup"),
            Column("PENDING", "pendingMessages"),
            Column("SIZE", lambda row: size(row["pendingBytes"]), drop=3),
            Column("LOADED", "loadedMessages", drop=2),
            Column("DUE", _due),
            Column("SINCE", lambda row: span(row["dueAgeMs"]) if row["dueMessages"] else "", drop=3),
            Column("UNDER WAY", _under_way, fold=12),
            Column("NEXT DUE", lambda row: utc(row["nextDue"]) if row["nextDue"] else "", drop=1),
            Column("CLOCK", _clock, drop=4),
        ),
        data["groups"],
        empty="no group of delay servers answered",
    )
    for group in data["groups"]:
        for subject in group["waiting"]:
            if subject["why"]:
                waiting = f"{subject['messages']:,} of {subject['subject']} wait, for {span(subject['ageMs'])}"
                yield warning(f"{group['brokerGroup']}: {waiting}: {subject['why']}")
    if data["hours"]:
        yield ""
        yield Table((Column("HOUR", moment("begin")), Column("MESSAGES", "messages")), data["hours"])
    yield from _unasked(data)


def _due(row: Mapping[str, Any]) -> Cell:
    messages = row["dueMessages"]
    return warning(f"{messages:,}") if messages else good("0")


def _under_way(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} {messages:,}" for name, messages in sorted(row["inFlight"].items())]


def _clock(row: Mapping[str, Any]) -> Cell:
    off_ms = row["clockOffMs"]
    return bad(f"off by {span(abs(off_ms))}") if abs(off_ms) > 1000 else good("agrees")


def _unasked(data: Mapping[str, Any]) -> Iterable[Block]:
    for name, why in (data.get("unasked") or {}).items():
        yield warning(f"without an answer: {name}, {why}")


def _listed(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("DUE", moment("due")),
            Column("SUBJECT", "subject"),
            Column("ID", lambda row: row["problem"] or row["id"], fold=12),
            Column("KEY", "key", drop=2, fold=12),
            Column("BYTES", "bytes", drop=3),
            Column("GROUP", "brokerGroup", drop=1),
        ),
        data["messages"],
        empty="no delayed message matches",
    )
    if data["more"]:
        yield "there are more: continue with --since, or raise --limit"
    yield from _unasked(data)


def _schedules(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("NEXT", moment("next")),
            Column("SUBJECT", "subject"),
            Column("NAME", "name", fold=16),
            Column("OWNER", "owner"),
            Column("CRON", "cron", fold=12),
            Column("ZONE", "timezone", drop=1),
            Column("GROUP", "brokerGroup", drop=2),
        ),
        data["schedules"],
        empty="there is no such schedule",
    )
    if data["more"]:
        yield "there are more: name a subject or an owner"
    yield from _unasked(data)


_FATES = {"cancelled": good("cancelled"), "sent": bad("was sent already"), "unknown": bad("unknown")}


def _cancelled(data: Any) -> Iterable[Block]:
    rows = [
        {"what": kind, "name": name, "fate": fate}
        for kind, fates in (("id", data["ids"]), ("key", data["keys"]))
        for name, fate in fates.items()
    ]
    yield Table((Column("", "what"), Column("MESSAGE", "name", fold=16), Column("BECAME", _fate)), rows)
    yield from _unasked(data)


def _fate(row: Mapping[str, Any]) -> Cell:
    return _FATES.get(row["fate"], Cell(row["fate"]))


DELAYS = (
    of_action("DelayStats", "--hours=24", _stats),
    of_action("ListDelayed", "--subject=order.unpaid --until=+2h", _listed),
    of_action("ListSchedules", "--subject=report.nightly", _schedules),
    of_action(
        "CancelDelayed",
        "--subject=order.unpaid --ids=20261121T120000.10.0.0.7.42.1",
        _cancelled,
        look="ListDelayed --subject={subject}",
    ),
)
