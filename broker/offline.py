"""Core. Consumers that operators switched off: they stay subscribed and keep what they hold, but are handed nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from qmq.subjects import real_subject

ANY = "*"


class Offline:
    """Rules (subject, consumer group, consumer); `*` in a place stands for all. A rule for a subject is one for its
    retry and dead-letter subjects, too: they belong to its consumers."""

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = frozenset(rules)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        rules, (subject, group, consumer) = self._rules, key
        if not rules:
            return False
        subjects = (subject, real_subject(subject), ANY)
        return any(rule in rules for rule in product(subjects, (group, ANY), (consumer, ANY)))
