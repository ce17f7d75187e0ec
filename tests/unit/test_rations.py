"""Core. New subjects are rationed per token."""

from __future__ import annotations

from qmq.rations import NewSubjects
from qmq.rights import Caller, TokenRole


def test_new_subjects_are_rationed_per_token():
    """Weakness 31: anyone could fill the tables."""
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    ration = NewSubjects(60, 1000)
    assert ration.allow(shop, 50, now_ms=0) == 50 and ration.allow(shop, 50, now_ms=0) == 10
    assert ration.allow(shop, 1, now_ms=999) == 0
    assert ration.allow(other, 50, now_ms=999) == 50
    assert ration.allow(shop, 5, now_ms=3000) == 3
    assert ration.allow(shop, 500, now_ms=600_000) == 60
    assert ration.allow(Caller("cluster", TokenRole.CLUSTER), 10_000, now_ms=0) == 10_000


def test_new_subjects_of_a_token_have_a_bound_in_all():
    """A thousand a minute made any number in a day."""
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    ration = NewSubjects(60, 100)
    assert [ration.allow(shop, 60, now_ms=60_000 * minute) for minute in range(4)] == [60, 40, 0, 0]
    assert "100 new subjects" in ration.why_not(shop) and "within a minute" in ration.why_not(other)
    assert ration.allow(other, 60, now_ms=240_000) == 60
