"""Core. Operators' limits of a subject, or of one consumer group of it: SetLimits and LimitGroup.

The metaserver stores them, and brokers get all of them with their assignment. Each broker group applies them by itself:
a number of messages is per broker group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OF_SUBJECT = "*"
"""Value in place of a consumer group, for limits of the subject itself."""


class OperatorLimits(NamedTuple):
    """Limits of the subject or group in the first two fields; 0, false and empty mean no limit."""

    subject: str
    group: str
    """A consumer group, or OF_SUBJECT."""
    expires_after_s: int = 0
    """For a subject: age after which a group no longer gets a message."""
    expired_die: bool = False
    """For a subject: whether expired messages become dead letters of the group."""
    messages_max: int = 0
    """For a subject: maximum of messages waiting for a consumer group, per broker group."""
    drops_oldest: bool = False
    """For a subject: whether the consumer group's oldest messages above the maximum are dropped; otherwise producers
    are rejected.
    """
    per_second: int = 0
    """For a consumer group: messages a second, from each broker group."""
    bytes_max: int = 0
    """For a consumer group: bytes a second, from each broker group."""
    dead_letters_to: str = ""
    """For a consumer group: subject of its dead letters, in place of `%DEAD_RETRY%subject%group`."""

    @property
    def key(self) -> tuple[str, str]:
        return self.subject, self.group

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == OperatorLimits(*self.key)


def dead_letter_subjects(limits: Iterable[OperatorLimits]) -> dict[tuple[str, str], str]:
    """Return the chosen subjects of dead letters by (subject, consumer group)."""
    return {limit.key: limit.dead_letters_to for limit in limits if limit.dead_letters_to}


def by_key(limits: tuple[OperatorLimits, ...]) -> dict[tuple[str, str], OperatorLimits]:
    return {limit.key: limit for limit in limits}
