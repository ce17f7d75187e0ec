"""Core. Consumers that operators switched off: they stay subscribed and keep what they hold, but are handed nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

ANY = "*"


class Offline:
    """Rules (subject, consumer group, consumer); `*` in a place stands for all."""

    def __init__(self, rules: Iterable[tuple[str, str, str]] = ()) -> None:
        self._rules = frozenset(rules)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        rules = self._rules
        return bool(rules) and any(rule in rules for rule in product(*((name, ANY) for name in key)))
