"""Core. Tags of an encoded message, damaged ones too, and equality of rules."""

from __future__ import annotations

import pytest

from qmq.broker.labels import TagRule, tag_words

LONG = b"x" * 300


def string(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def encoded(*tags: bytes, flags: int = 4) -> bytes:
    """A message up to its tags."""
    times = bytes(16)
    return bytes([flags]) + times + string(LONG) + string(LONG) + bytes([len(tags)]) + b"".join(map(string, tags))


@pytest.mark.parametrize("tags", [(), (b"a",), (LONG, b"b", b"")])
def test_cut_messages_have_no_tags(tags):
    message = encoded(*tags)
    for size in range(len(message) + 9):
        found = tag_words((message + bytes(9))[:size])
        assert tuple(found) == (tags if size >= len(message) else ()), size


@pytest.mark.parametrize(("flags", "expected"), [(0, ()), (3, ()), (7, (b"a",))])
def test_only_flagged_messages_have_tags(flags, expected):
    assert tuple(tag_words(encoded(b"a", flags=flags))) == expected


@pytest.mark.parametrize(
    ("asked", "is_all", "expected"),
    [
        (["a", "b"], False, [True, True, True, False]),
        (["a", "b"], True, [False, False, True, False]),
        (["a"], True, [True, False, True, False]),
    ],
)
def test_rule_matches_any_or_all_words(asked, is_all, expected):
    rule = TagRule.of(asked, is_all=is_all)
    assert [rule.matches(encoded(*tags)) for tags in ((b"a",), (b"b",), (b"a", b"b", b"c"), (b"c",))] == expected


def test_equivalent_rules_are_equal():
    assert TagRule.of(["a"], is_all=True) == TagRule.of(["a"], is_all=False)
    assert TagRule.of(["a", "b"], is_all=True) == TagRule.of(["b", "a"], is_all=True)
    assert TagRule.of(["a", "b"], is_all=True) != TagRule.of(["a", "b"], is_all=False)
    assert TagRule.of([], is_all=True) is None
