"""Core. The newest term that any broker of each group ever reported: terms are given out above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qmq.metaserver.model import Group

GROUPS_MAX = 10_000
"""Names of groups that do not exist here: a bound for what brokers with a wrong setting may report."""


class ReportedTerms:
    """Made by the registry. Reports of brokers that are refused count too: the database may have lost them."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    def note(self, group: str, term: int) -> None:
        """Take in a report; `group` empty: that broker never had a role."""
        if group and term > self._newest.get(group, 0) and (group in self._newest or len(self._newest) < GROUPS_MAX):
            self._newest[group] = term

    def note_rows(self, groups: Iterable[Group]) -> None:
        """Take in rows: their terms were given out, whether or not a broker has got them yet."""
        for group in groups:
            self._given[group.name] = max(group.term, self._given.get(group.name, 0))

    def note_promise(self, group: str, term: int) -> None:
        """Take in that a broker promised to be no part of older terms than this one, which no row may have yet."""
        if group in self._given:
            self._promised[group] = max(term, self._promised.get(group, 0))

    def newest(self, group: str) -> int:
        return self._newest.get(group, 0)

    def given(self, group: str) -> int:
        """The newest that a broker reported or a row had. A promised term above it may be asked for again."""
        return max(self._newest.get(group, 0), self._given.get(group, 0))

    def floor(self, group: str) -> int:
        """A new term is above this."""
        return max(self.given(group), self._promised.get(group, 0))

    def floors(self) -> dict[str, int]:
        return {group: self.floor(group) for group in self._given.keys() | self._newest.keys()}

    def above_rows(self, groups: Mapping[str, Group]) -> list[str]:
        """Names of the groups whose row is older than a report."""
        return [name for name, term in self._newest.items() if name in groups and groups[name].term < term]

    def unknown(self, groups: Iterable[str]) -> dict[str, int]:
        """Groups that brokers report, and that are not among `groups`, with the newest term."""
        known = set(groups)
        return {name: term for name, term in sorted(self._newest.items()) if name not in known}
