"""Core. What operators set of a subject, or of one consumer group of it: SetLimits and LimitGroup.

The metaserver keeps them, brokers get all of them with their part, and each broker group applies them by itself: a
number of messages counts what lies in that group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OF_SUBJECT = "*"
"""In place of a consumer group: limits of the subject itself."""


class OperatorLimits(NamedTuple):
    """0, false and empty are no limit. The first two fields are whose they are."""

    subject: str
    group: str
    """A consumer group, or OF_SUBJECT."""
    expires_after_s: int = 0
    """Of a subject: a group does not get what was stored longer ago."""
    expired_die: bool = False
    """Of a subject: what expires becomes a dead letter of the group."""
    messages_max: int = 0
    """Of a subject: so many messages of each broker group may wait for a consumer group."""
    drops_oldest: bool = False
    """Of a subject: what is more is over for the consumer group, oldest first; else producers are refused."""
    per_second: int = 0
    """Of a consumer group: so many messages a second, from each broker group."""
    bytes_max: int = 0
    """As `messages_max`, in bytes."""
    dead_letters_to: str = ""
    """Of a consumer group: the subject that its dead letters go to, in place of `%DEAD_RETRY%subject%group`."""

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == OperatorLimits(*self.key)


def dead_letter_subjects(limits: Iterable[OperatorLimits]) -> dict[tuple[str, str], str]:
    """Return where dead letters go, by (subject, consumer group) of those for which an operator chose it."""
    return {one.key: one.dead_letters_to for one in limits if one.dead_letters_to}


def by_key(limits: tuple[OperatorLimits, ...]) -> dict[tuple[str, str], OperatorLimits]:
    return {one.key: one for one in limits}
