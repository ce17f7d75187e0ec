"""Core. Rations of a token: new subjects, new consumer groups, and bytes."""

from __future__ import annotations

import pytest

from qmq.errors import Overloaded
from qmq.rations import NewProducers, NewSubjects, Ration, SentBytes, TokenGroups, TokenRation
from qmq.rights import Caller, TokenRole


def test_new_subjects_are_rationed_per_token():
    """Weakness 31: any client could fill the tables."""
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    ration = NewSubjects(60, 1000)
    assert ration.allow(shop, 50, now_ms=0) == 50 and ration.allow(shop, 50, now_ms=0) == 10
    assert ration.allow(shop, 1, now_ms=999) == 0
    assert ration.allow(other, 50, now_ms=999) == 50
    assert ration.allow(shop, 5, now_ms=3000) == 3
    assert ration.allow(shop, 500, now_ms=600_000) == 60
    assert ration.allow(Caller("cluster", TokenRole.CLUSTER), 10_000, now_ms=0) == 10_000


def test_new_subjects_of_a_token_are_bounded():
    """A thousand a minute was any number in a day."""
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    ration = NewSubjects(60, 100)
    assert [ration.allow(shop, 60, now_ms=60_000 * minute) for minute in range(4)] == [60, 40, 0, 0]
    assert "100 new subjects" in str(ration.why_not(shop)) and "within a minute" in str(ration.why_not(other))
    assert [ration.why_not(caller).limit for caller in (shop, other)] == ["new_subjects_max", "new_subjects_per_minute"]
    assert ration.allow(other, 60, now_ms=240_000) == 60


def taken(sent: SentBytes, caller: Caller, sizes: list[int], *, now_ms: int) -> int:
    """Send batches at one time; return the bytes of the accepted ones."""
    bytes_taken = 0
    for size in sizes:
        try:
            sent.take(caller, size, now_ms=now_ms)
        except Overloaded:
            continue
        bytes_taken += size
    return bytes_taken


def test_each_token_has_its_byte_rate():
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    sent = SentBytes(1_000)
    assert taken(sent, shop, [400] * 10, now_ms=0) == 1_200, "a second's worth, as far as batches go"
    assert taken(sent, other, [400] * 10, now_ms=0) == 1_200
    assert sum(taken(sent, shop, [400] * 10, now_ms=now_ms) for now_ms in range(100, 10_001, 100)) == 10_000
    assert taken(sent, shop, [400] * 10, now_ms=3_600_000) == 1_200, "nobody saves up"


def test_large_batch_is_accepted_and_charged():
    shop, sent = Caller("shop", TokenRole.CLIENT), SentBytes(1_000)
    sent.take(shop, 5_000, now_ms=0)
    with pytest.raises(Overloaded, match=r"token 'shop' sends more than 1,000 bytes a second \(token_bytes_per_s\)"):
        sent.take(shop, 1, now_ms=3_999)
    sent.take(shop, 1, now_ms=4_001)


def test_connections_share_their_tokens_rations():
    shop, now = Caller("shop", TokenRole.CLIENT), [0]
    groups, sent = TokenGroups(1, 100), SentBytes(1_000)
    first, other = (TokenRation(shop, groups, sent, lambda: now[0]) for _ in range(2))
    first.begin_group()
    with pytest.raises(Overloaded, match="'shop' made too many new consumer groups within a minute") as no:
        other.begin_group()
    assert no.value.limit == "new_subjects_per_minute"
    first.write(5_000)
    with pytest.raises(Overloaded, match="token_bytes_per_s"):
        other.write(1)
    now[0] = 60_000
    other.begin_group()
    other.write(1)


def test_new_producers_are_rationed_per_token():
    """A token that made a producer per message pushed out the windows of all others, which stored repeats twice."""
    shop, other = (Caller(name, TokenRole.CLIENT) for name in ("shop", "other"))
    now, producers = [0], NewProducers(60)
    first, second, others = (
        TokenRation(caller, TokenGroups(1, 1), None, lambda: now[0], producers=producers)
        for caller in (shop, shop, other)
    )
    for _ in range(3):
        for producer in range(60):
            first.begin_producer(producer)
    with pytest.raises(Overloaded, match="'shop' made too many new producers within a minute") as no:
        second.begin_producer(0)
    assert no.value.limit == "new_producers_per_minute"
    others.begin_producer(0)
    now[0] = 60_000
    for producer in range(60, 120):
        second.begin_producer(producer)


def test_unbounded_bytes_are_not_counted():
    ration = TokenRation(Caller("shop", TokenRole.CLIENT), TokenGroups(1, 1), None, lambda: 0)
    for _ in range(10):
        ration.write(1 << 30)
        Ration().write(1 << 30)
        Ration().begin_group()
