"""Core. Rights of a token: its role, and the subjects and broker groups to which it is limited.

    viewer      lists and states
    operator    the rights of a viewer; marks, drains, switches, offsets, routes
    admin       the rights of an operator; brokers, roles, tokens, databases, backup and restore
    client      routes of its subjects; to produce to them and to consume from them
    broker      to register and send heartbeats as a broker of its groups; to check tokens
    cluster     everything: the key of the installation, shared by metaservers and brokers as a setting

A pattern of a subject is an exact name, or a prefix that ends with `*`. It grants producing, consuming and redriving;
with `produce:`, `consume:` or `redrive:` before it, only one of them. Retry and dead-letter subjects are read with the
right to consume from the real subject, and written by brokers. To put messages into a retry subject, as Redrive and a
delay group's long retries do, is a right of its own, because it reaches only one consumer group. It is named by the
real subject or by the retry subject. Only brokers write dead letters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from qmq.errors import InvalidName, MissingRight
from qmq.subjects import DEAD_LETTER, check_name, is_derived_name, parse_derived, real_subject


class TokenRole(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    CLIENT = "client"
    BROKER = "broker"
    CLUSTER = "cluster"


_INCLUDES = {
    TokenRole.OPERATOR: {TokenRole.VIEWER},
    TokenRole.ADMIN: {TokenRole.VIEWER, TokenRole.OPERATOR},
    TokenRole.CLUSTER: set(TokenRole),
}

PRODUCE, CONSUME, REDRIVE = "produce", "consume", "redrive"
_RIGHTS = (PRODUCE, CONSUME, REDRIVE)


def includes(role: TokenRole, needed: TokenRole) -> bool:
    """Return whether `role` includes the rights of `needed`."""
    return role == needed or needed in _INCLUDES.get(role, ())


@dataclass(frozen=True, slots=True)
class _Patterns:
    exact: frozenset[str]
    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> _Patterns:
        texts = list(patterns)
        return cls(
            frozenset(text for text in texts if not text.endswith("*")),
            tuple(text[:-1] for text in texts if text.endswith("*")),
        )

    def match(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.prefixes)


def _patterns_for(right: str, patterns: Iterable[str]) -> Iterable[str]:
    for pattern in patterns:
        named, colon, rest = pattern.partition(":")
        if not colon or named not in _RIGHTS:
            yield pattern
        elif named == right:
            yield rest


@dataclass(frozen=True, slots=True)
class Scope:
    """Limits of a token; an empty list limits nothing."""

    subjects: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    _by_right: dict[str, _Patterns] = field(init=False, repr=False, compare=False)
    _groups: _Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_right = {right: _Patterns.of(_patterns_for(right, self.subjects)) for right in _RIGHTS}
        object.__setattr__(self, "_by_right", by_right)
        object.__setattr__(self, "_groups", _Patterns.of(self.groups))

    @property
    def all_subjects(self) -> bool:
        return not self.subjects

    def may(self, right: str, subject: str) -> bool:
        """Return whether the right PRODUCE, CONSUME or REDRIVE includes `subject`. To produce to a mailbox needs
        REDRIVE.
        """
        if right == PRODUCE and is_derived_name(subject):
            right = REDRIVE
        if right == REDRIVE and subject.startswith(f"{DEAD_LETTER}%"):
            return False
        if not self.subjects or self._by_right[right].match(subject):
            return True
        derived = parse_derived(subject)
        return derived is not None and self._by_right[right].match(derived.real)

    def has_group(self, group: str) -> bool:
        return not self.groups or self._groups.match(group)


EVERYTHING = Scope()


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a request: name and rights of its token, and its address."""

    name: str
    role: TokenRole
    scope: Scope = EVERYTHING
    peer: str = ""

    def may(self, needed: TokenRole) -> bool:
        return includes(self.role, needed)

    def require_role(self, *needed: TokenRole) -> None:
        """Raise MissingRight unless the token has one of these roles."""
        if not any(self.may(role) for role in needed):
            names = " or ".join(needed) or "a role that does not exist"
            raise MissingRight(f"token {self.name!r} has the role {self.role}; this needs {names}")

    def require_subject(self, right: str, subject: str) -> None:
        """Raise MissingRight unless the token has `right` (PRODUCE, CONSUME) to the subject."""
        if not self.scope.may(right, subject):
            to = "from" if right == CONSUME else "to"
            why = "it is limited to other subjects"
            if right != CONSUME and is_derived_name(subject):
                is_dead = subject.startswith(f"{DEAD_LETTER}%")
                why = "brokers alone write dead letters" if is_dead else f"that needs {REDRIVE}:{real_subject(subject)}"
            raise MissingRight(f"token {self.name!r} may not {right} {to} {subject!r}: {why}")

    def require_group(self, group: str) -> None:
        """Raise MissingRight unless the broker group is in the token's scope."""
        if not self.scope.has_group(group):
            raise MissingRight(f"token {self.name!r} may not use broker group {group!r}: it is limited to other groups")


def check_patterns(noun: str, patterns: Iterable[str], *, rights: bool) -> tuple[str, ...]:
    """Return the patterns if each is legal. With `rights` they may begin with `produce:`, `consume:` or `redrive:`.

    Raises:
        InvalidName: a pattern breaks a rule.
    """
    found = tuple(patterns)
    for pattern in found:
        right, colon, rest = pattern.partition(":")
        name = rest if rights and colon and right in _RIGHTS else pattern
        prefix = name.removesuffix("*")
        if "*" in prefix:
            raise InvalidName(f"{noun} {pattern[:100]!r}: a * stands at the end only")
        if prefix or not name:
            check_name(noun, prefix)
    return found
