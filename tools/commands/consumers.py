"""Core. Commands for consumers and clients: lag, positions, switches, limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qmq.tools.command import good, listing, of_action, warning
from qmq.tools.table import Block, Cell, Column, Table, Tone, good_or_bad, moment, span


def _messages(row: Mapping[str, Any]) -> Cell:
    return Cell(str(row["messages"]), is_number=True, tone=Tone.PLAIN if row["messages"] else Tone.GOOD)


def _unasked(data: Mapping[str, Any]) -> Iterable[Block]:
    """Name the brokers without an answer: the figures lack them."""
    unasked = data.get("unasked") or {}
    for name in unasked:
        yield warning(f"not counted: {name}{f', {unasked[name]}' if isinstance(unasked, Mapping) else ''}")


def _lags(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("SUBJECT", "subject"),
            Column("GROUP", "group"),
            Column("LAG", _messages),
            Column("OLDEST", lambda row: span(row["ageSeconds"] * 1000) if row["messages"] else ""),
            Column("BECAUSE OF", lambda row: ", ".join(row.get("causes", ())), fold=24),
            Column("BY BROKER GROUP", "brokerGroups", drop=1, fold=16),
        ),
        data["lag"],
        empty="no consumer group is known",
    )
    yield from _unasked(data)


def _consumers(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("SUBJECT", "subject"),
            Column("GROUP", "group"),
            Column("BROKER GROUP", "brokerGroup"),
            Column("LAG", _messages),
            Column("POSITION", "position", drop=1),
            Column("NEXT", "nextSequence", drop=2),
            Column("CONSUMERS", lambda row: len(row["consumers"])),
            Column("OLDEST", moment("oldest"), drop=3),
        ),
        data["groups"],
        empty="no consumer group is known",
    )
    consumers = [
        {**consumer, **{name: row[name] for name in ("subject", "group", "brokerGroup")}}
        for row in data["groups"]
        for consumer in row["consumers"]
    ]
    if consumers:
        yield ""
        yield Table(_CONSUMER, consumers)
    if data.get("producers"):
        yield ""
        yield Table(_PRODUCER, data["producers"])
    yield from _unasked(data)


_PRODUCER = (
    Column("PRODUCER", "app"),
    Column("BROKER GROUP", "brokerGroup", drop=1),
    Column("MESSAGES", "messages"),
    Column("FROM", "peer", drop=2),
)
_CONSUMER = (
    Column("CONSUMER", "consumer"),
    Column("SUBJECT", "subject"),
    Column("GROUP", "group"),
    Column("BROKER GROUP", "brokerGroup", drop=1),
    Column("CONNECTED", good_or_bad("connected")),
    Column("OFFLINE", "offline", drop=3),
    Column("UNACKED", "unacked"),
    Column("FROM", "peer", drop=2),
)


def _reset(data: Any) -> Iterable[Block]:
    yield good(f"{data['group']} continues in {data['subject']}: {data['to']}")
    yield from _moved(data)


def _removed(data: Any) -> Iterable[Block]:
    yield good(f"{data['group']} is removed from {data['subject']}; messages under SKIPPED were not consumed")
    yield from _moved(data)


def _moved(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("BROKER GROUP", "brokerGroup"),
            Column("BEFORE", "before"),
            Column("AFTER", "after"),
            Column("SKIPPED", "skipped"),
            Column("REPEATED", "repeated"),
        ),
        [{"brokerGroup": name, **row} for name, row in data["brokerGroups"].items()],
    )


def _position_fault(arguments: Mapping[str, str]) -> str:
    if ("code" in arguments) == ("to" in arguments):
        return "name the new position once: --action=1|2, or --to=earliest|latest|sequence|time"
    to, with_value = arguments.get("to"), arguments.get("to") in ("sequence", "time")
    if with_value and "value" not in arguments:
        return f"--to={to} needs --value"
    if "value" in arguments and not with_value:
        return f"{f'--to={to}' if to else '--action'} takes no --value"
    return ""


def _switched(data: Any) -> Iterable[Block]:
    consumer = f"{data['clientId']} of {data['consumerGroup']} at {data['subject']}"
    yield good(f"{consumer} is {data['state']}" if data["rules"] else f"{consumer} was {data['state']} already")


def _offline(rows: Any) -> Table:
    return Table(
        (Column("SUBJECT", "subject"), Column("GROUP", "consumerGroup"), Column("CONSUMER", "clientId")),
        rows,
        empty="no consumer is switched off",
    )


def _limited(data: Any) -> Iterable[Block]:
    yield good(f"limits of {data['subject']}" + ("" if data["group"] == "*" else f", group {data['group']}"))
    yield _limits([data])


def _limits(rows: Any) -> Table:
    return Table(
        (
            Column("SUBJECT", "subject"),
            Column("GROUP", "group"),
            Column("EXPIRES AFTER S", "expiresAfterS"),
            Column("EXPIRED", "expired"),
            Column("MESSAGES MAX", "messagesMax"),
            Column("BYTES MAX", "bytesMax"),
            Column("WHEN FULL", "whenFull"),
            Column("PER SECOND", "perSecond"),
            Column("DEAD LETTERS TO", "deadLettersTo"),
        ),
        rows,
        empty="nothing is limited",
    )


def _clients(data: Any) -> Iterable[Block]:
    yield Table(
        (
            Column("APP", "app"),
            Column("CLIENT", "clientId"),
            Column("FROM", "peer"),
            Column("PRODUCES", "produces", drop=1),
            Column("SUBJECTS", "subjects", fold=20),
            Column("METASERVER", "metaserver", drop=2),
        ),
        data["clients"],
        empty="no client is connected to a metaserver",
    )
    yield from _unasked(data)


CONSUMERS = (
    of_action(
        "ResetOffset",
        "--subject=order.changed --group=billing --to=time --value=2026-01-31T12:00:00Z",
        _reset,
        look="Consumers --subject={subject} --group={group}",
        fault_of=_position_fault,
    ),
    of_action(
        "RemoveConsumerGroup",
        "--subject=order.changed --group=billing-test",
        _removed,
        look="Consumers --subject={subject} --group={group}",
    ),
    of_action("Consumers", "--subject=order.changed", _consumers),
    of_action("Lag", "--subject=order.changed --group=billing", _lags),
    of_action(
        "OnOffline",
        "--state=offline --subject=order.changed --consumerGroup=billing",
        _switched,
        look="ListOffline --subject={subject}",
    ),
    of_action("ListOffline", "", listing(_offline)),
    of_action(
        "SetLimits", "--subject=price.changed --expiresAfterS=60", _limited, look="ListLimits --subject={subject}"
    ),
    of_action(
        "LimitGroup",
        "--subject=order.changed --group=billing --perSecond=100",
        _limited,
        look="ListLimits --subject={subject}",
    ),
    of_action("ListLimits", "", listing(_limits)),
    of_action("Clients", "--app=shop", _clients),
)
