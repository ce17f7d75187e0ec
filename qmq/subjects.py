"""Core. Legal names: subjects, consumer groups, consumer ids, broker groups; retry and dead-letter subjects.

QMQ passes any name on to the broker, where one of 256 bytes stops all indexing for ever (weakness W7). Here both ends
check a name before it is stored.

Messages that a consumer group did not handle go to subjects of its own, named by the real subject and the group:
`%RETRY%subject%group`, and at last `%DEAD_RETRY%subject%group`. They lie in the broker groups of the real subject. A
retry of a retry keeps the real subject, so names are never nested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from qmq.errors import InvalidName
from qmq.plain import plain

NAME_BYTES_MAX = 100
"""QMQ's limit for real subjects; consumer groups and ids share it."""

_ILLEGAL = re.compile(r"[\x00-\x1f\x7f/\\\u0085\u2028\u2029]")


def check_name(noun: str, name: str) -> str:
    """Return `name`, a plain str, if it is legal: 1 to 100 bytes of UTF-8, no slash, no control or line-breaking
    character.

    Raises:
        InvalidName: the name breaks a rule. `noun` names the argument, for instance "subject".
    """
    if not isinstance(name, str):
        raise InvalidName(f"{noun} is a str, not {name!r:.100}: give its text")
    name = plain(name)
    if not name:
        raise InvalidName(f"{noun} is empty")
    if len(name) > NAME_BYTES_MAX or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise InvalidName(f"{noun} {name[:20]!r}… is longer than {NAME_BYTES_MAX} bytes")
    if illegal := _ILLEGAL.search(name):
        raise InvalidName(
            f"{noun} {name!r} contains {illegal.group()!r}; slashes and control characters are not allowed"
        )
    if name != name.strip():
        raise InvalidName(f"{noun} {name!r} begins or ends with white space")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidName(f"{noun} {name!r} is not valid Unicode") from None
    return name


RETRY, DEAD_LETTER = "%RETRY", "%DEAD_RETRY"
"""Prefixes of the two kinds of names."""


class Derived(NamedTuple):
    """Parts of a retry or dead-letter subject's name."""

    kind: str
    """RETRY or DEAD_LETTER."""
    real: str
    group: str


def retry_subject(subject: str, group: str) -> str:
    """Return the subject of the messages that `group` retries."""
    return f"{RETRY}%{real_subject(plain(subject))}%{plain(group)}"


def dead_letter_subject(subject: str, group: str) -> str:
    """Return the subject of the messages that `group` has given up."""
    return f"{DEAD_LETTER}%{real_subject(plain(subject))}%{plain(group)}"


def parse_derived(name: str) -> Derived | None:
    """Parse the name of a retry or dead-letter subject; return None for a real subject.

    As QMQ does: split at each %, drop empty parts, trim the others; exactly three make such a name. A % in the subject
    or group makes the parts ambiguous, and the whole name is a subject like any other.
    """
    if not name.startswith((RETRY, DEAD_LETTER)):
        return None
    parts = [part.strip() for part in name.split("%") if part.strip()]
    if len(parts) != 3 or f"%{parts[0]}" not in (RETRY, DEAD_LETTER):
        return None
    return Derived(f"%{parts[0]}", parts[1], parts[2])


def is_derived_name(name: str) -> bool:
    """Return whether a name has the form of retry and dead-letter subjects, even with ambiguous parts."""
    return name.startswith((f"{RETRY}%", f"{DEAD_LETTER}%"))


def real_subject(name: str) -> str:
    """Return the subject whose broker groups hold the messages of `name`: `name` itself, or the real subject of a
    derived one.
    """
    derived = parse_derived(name)
    return derived.real if derived else name


def is_dead_letter_subject(name: str) -> bool:
    """Return whether a subject holds dead letters, which are delivered without limit and never become dead letters
    again.
    """
    derived = parse_derived(name)
    return derived is not None and derived.kind == DEAD_LETTER


def check_subject(name: str) -> str:
    """Return the name of a real or derived subject if it is legal; in a derived one, both parts may have 100 bytes.

    Raises:
        InvalidName: the name breaks a rule.
    """
    name = plain(name)
    derived = parse_derived(name) if isinstance(name, str) else None
    if derived is None:
        return check_name("subject", name)
    check_name("subject", derived.real)
    check_name("consumer group", derived.group)
    if name != f"{derived.kind}%{derived.real}%{derived.group}":
        raise InvalidName(f"subject {name!r} is not of the form {derived.kind}%subject%group")
    return name


def matching(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tests a name against `patterns`; one that ends in `*` is a prefix."""
    names = frozenset(pattern for pattern in patterns if not pattern.endswith("*"))
    starts = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return lambda name: name in names or (bool(starts) and name.startswith(starts))
