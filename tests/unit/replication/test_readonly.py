"""Core. Readonly reasons: each checker has its own (I12)."""

from __future__ import annotations

from itertools import combinations

import pytest

from qmq.errors import BrokerReadOnly
from qmq.replication.mastership import Readonly
from qmq.replication.readonly import Reason, explain
from tests.unit.broker.world import Group


def test_checker_clears_only_its_own_reason():
    for first, second in combinations(Reason, 2):
        readonly = Readonly()
        assert readonly.change(first, True) and not readonly.change(first, True)
        assert not readonly.change(second, False) and readonly.reasons == [first]
        readonly.change(second, True)
        readonly.change(second, False)
        assert readonly.reasons == [first] and not readonly.writable


def test_refusal_names_every_reason_and_remedy():
    readonly = Readonly()
    for reason in Reason:
        readonly.change(reason, True)
    with pytest.raises(BrokerReadOnly) as refusal:
        readonly.check("g1", "s")
    assert all(str(reason) in str(refusal.value) for reason in Reason)
    assert "UnMarkReadonly" in str(refusal.value)


def test_refusal_names_the_marked_subject():
    readonly = Readonly()
    readonly.mark_subjects(frozenset({"s"}))
    readonly.check("g1", "other")
    with pytest.raises(BrokerReadOnly, match="g1 is readonly for s: .*UnMarkReadonly"):
        readonly.check("g1", "s")
    assert readonly.writable


def test_unknown_reason_is_shown_unchanged():
    assert explain("draining") == "its roles are being swapped"
    assert explain("of a later version") == "of a later version"


def test_unmarking_leaves_reasons_of_checkers():
    readonly = Readonly()
    readonly.change(Reason.DISK, True)
    readonly.mark_subjects(frozenset({"*", "s"}))
    readonly.mark_subjects(frozenset())
    assert readonly.reasons == [Reason.DISK]


def test_operators_mark_survives_other_changes():
    group = Group.made().start()
    group.a.assign(group.a.node.assignment.role, 1, readonly_subjects=("*",))
    group.cut()
    group.agree()
    assert group.a.node.readonly_reasons == [Reason.OPERATOR]
    group.a.node.set_disk_full(True)
    group.a.node.set_disk_full(False)
    assert group.a.node.readonly_reasons == [Reason.OPERATOR]
