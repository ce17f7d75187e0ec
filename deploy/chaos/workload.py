"""Core. The subjects, producers and consumers of a trial, and its fixed orders of faults."""

from __future__ import annotations

from typing import NamedTuple

PLAIN, KEYED = "order.changed", "seat.booked"
"""Subjects; in the second one, nearly all messages have an order key."""
TAGS = ["red", "green", "blue"]
RETRY_DELAY_S = 0.3
"""After a handler failed."""


class Member(NamedTuple):
    """A consumer's place in a group: a listener with this many handlers; 0: a puller."""

    subject: str
    group: str
    concurrency: int
    tags: list[str]


ALL = Member(PLAIN, "all", 1, [])
SEATS = Member(KEYED, "seats", 16, [])
RED = Member(PLAIN, "red", 4, ["red"])

CONSUMERS: dict[str, list[Member]] = {
    "c1": [ALL, SEATS],
    "c2": [ALL, SEATS._replace(concurrency=1)],
    "c3": [ALL._replace(concurrency=0), SEATS._replace(concurrency=0)],
    "c4": [ALL._replace(concurrency=0), RED],
    "c5": [RED._replace(concurrency=0), SEATS],
}
"""Processes and their memberships. Every group has at least two."""
PRODUCERS = ("p1", "p2", "p3")

FAULTS = (
    "kill master",
    "swap roles",
    "kill slave",
    "lose the master's disk",
    "stop master",
    "kill during a swap",
    "kill both",
    "stop slave",
    "replace broker",
    "kill master",
    "swap roles",
    "kill in any order",
)
"""In this order, and again from the beginning, until everything is sent."""
ROLE_CHANGES = ("swap roles", "kill master")
"""The faults with more than two copies; each follows the one before at once."""
