"""Shell. What is drawn of messages a second: of a broker group as its master kept it, of a subject as looked at."""

from __future__ import annotations

from typing import Any

from qmq.metaserver.actions import Answer, Status
from qmq.metaserver.console.asking import Asking
from qmq.metaserver.console.drawing import chart_of
from qmq.metaserver.console.rates import SERIES_MAX, Look, Rates, per_second
from qmq.metaserver.rpc.access import wall_ms

RATES_S = 1.0
"""A page is not worth more of a silent broker's time."""
IN, OUT = "messages in", "messages out"
"""No consumer group can be called so: they have a space."""


async def group_rates(asking: Asking, name: str) -> dict[str, Any]:
    """What `rates.html` shows of a broker group."""
    answer = await asking.ask_for(RATES_S, "Rates", {"brokerGroup": name})
    for why in (answer.data or {}).get("unasked", {}).values():
        answer = Answer(Status.WAIT, why)
    rates = [
        Rates(row["at"], {label: row[field] for field, label in (("taken", IN), ("delivered", OUT)) if field in row})
        for row in (answer.data or {}).get("rates", ())
    ]
    empty = "Its master began this moment."
    return {"answer": answer, "chart": chart_of(rates, wall_ms()), "empty": empty}


async def subject_rates(asking: Asking, subject: str, group: str) -> dict[str, Any]:
    """What `rates.html` shows of a subject."""
    words = {"subject": subject, "group": group}
    return drawn_of_subject(asking, subject, group, await asking.ask("Consumers", words))


def drawn_of_subject(asking: Asking, subject: str, group: str, consumers: Answer) -> dict[str, Any]:
    """As `subject_rates`, of consumers that were asked for already."""
    looks: list[Look] = []
    if consumers.done and not consumers.data["unasked"]:  # a part of the sum would look like a fall
        look = Look(wall_ms(), counts_of(consumers.data["groups"]))
        looks = asking.looks.note(f"{subject} {group}", look)
    elif consumers.done:
        consumers = Answer(Status.WAIT, "not every broker group answers")
    empty = "They are counted from now on: the first ones come in five seconds."
    return {"answer": consumers, "chart": chart_of(per_second(looks), wall_ms()), "empty": empty}


def counts_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Messages of the subject so far, and those that each consumer group is done with."""
    ends, done = dict[str, int](), dict[str, int]()
    for row in rows:
        ends[row["brokerGroup"]] = row["nextSequence"]
        done[row["group"]] = done.get(row["group"], 0) + row["nextSequence"] - row["messages"]
    return {IN: sum(ends.values())} | dict(list(done.items())[:SERIES_MAX]) if rows else {}
