"""Core. Which messages a consumer asks for by their tags: any of its words, or all of them.

A label's bits (qmq.codec) say "surely not" or "maybe"; the words in the message itself decide.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qmq.codec import FLAG_TAGS, tag_bits


class TagRule(NamedTuple):
    """What one consumer asks for. Rules that ask for the same are equal."""

    words: frozenset[bytes]
    is_all: bool
    bits: int

    @classmethod
    def of(cls, tags: Iterable[str], *, is_all: bool) -> TagRule | None:
        """Return the rule for these tags; None, which filters nothing, for none."""
        words = frozenset(tag.encode() for tag in tags)
        return cls(words, is_all and len(words) > 1, tag_bits(tags)) if words else None

    def candidates(self, labels: array[int], begin: int, end: int) -> Sequence[int]:
        """Return the places in `[begin, end)` whose messages may match, from the labels of their batch."""
        bits = self.bits
        if self.is_all:
            return [i for i in range(begin, end) if labels[i] & bits == bits]
        return [i for i in range(begin, end) if labels[i] & bits]

    def matches(self, message: bytes) -> bool:
        """Return whether an encoded message has the tags; one whose bytes are no message has none."""
        found = tag_words(message)
        return self.words.issubset(found) if self.is_all else not self.words.isdisjoint(found)


def tag_words(message: bytes) -> Sequence[bytes]:
    """Read the tags of an encoded message, as they stand there, and nothing else of it."""
    if not message or not message[0] & FLAG_TAGS:
        return ()
    try:
        at = 19 + (message[17] << 8 | message[18])
        at += 2 + (message[at] << 8 | message[at + 1])
        count, at, words = message[at], at + 1, []
        for _ in range(count):
            end = at + 2 + (message[at] << 8 | message[at + 1])
            words.append(message[at + 2 : end])
            at = end
        return words if at <= len(message) else ()
    except IndexError:
        return ()
