"""Core. New subjects are rationed per token."""

from __future__ import annotations

from qmq.rations import NewSubjects
from qmq.rights import Caller, TokenRole


def test_new_subjects_are_rationed_per_token():
    """Weakness 31: anyone could fill the tables."""
    shop, other = Caller("shop", TokenRole.CLIENT), Caller("other", TokenRole.CLIENT)
    ration = NewSubjects(60)
    assert ration.allow(shop, 50, now_ms=0) == 50 and ration.allow(shop, 50, now_ms=0) == 10
    assert ration.allow(shop, 1, now_ms=999) == 0
    assert ration.allow(other, 50, now_ms=999) == 50
    assert ration.allow(shop, 5, now_ms=3000) == 3
    assert ration.allow(shop, 500, now_ms=600_000) == 60
    assert ration.allow(Caller("cluster", TokenRole.CLUSTER), 10_000, now_ms=0) == 10_000
