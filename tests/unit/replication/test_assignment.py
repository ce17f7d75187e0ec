"""Core. A broker's assignment: its peers, its missing fields, and its stored form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.operator_limits import OperatorLimits
from qmq.replication.assignment import Address, Assignment, SyncMode
from qmq.types import Role

A, B, C = (Address(f"10.0.0.{at}", 1, 2, 3) for at in (1, 2, 3))


def test_peers_of_master_and_slave():
    assert Assignment("g", 1, Role.MASTER, A, (B, C)).peers == (B, C)
    assert Assignment("g", 1, Role.SLAVE, A, (B, C)).peers == (A,)
    assert Assignment("g", 1, Role.SLAVE, None, (B, C)).peers == ()


@pytest.mark.parametrize(
    ("role", "slaves", "min_copies", "may"),
    [
        pytest.param(Role.SLAVE, 1, 2, False, id="each message is on both"),
        pytest.param(Role.SLAVE, 2, 2, True, id="the other slave may have it"),
        pytest.param(Role.SLAVE, 2, 3, False, id="each message is on all three"),
        pytest.param(Role.MASTER, 2, 2, False, id="a master has all acknowledged frames"),
    ],
)
def test_copy_may_be_behind_if_others_suffice(role, slaves, min_copies, may):
    assert Assignment("g", 1, role, A, (B, C)[:slaves], min_copies=min_copies).may_be_behind == may


def test_assignments_with_equal_peer_addresses_meet_alike():
    before = Assignment("g", 1, Role.MASTER, A, (B, C))
    elsewhere = replace(before, term=2, slaves=(C, replace(B, serve_port=9, control_port=9)))
    assert before.meets_as(elsewhere)
    for slaves in ((B,), (B, A), (B, replace(C, sync_port=9)), (B, replace(C, ip="10.0.0.9"))):
        assert not before.meets_as(replace(before, slaves=slaves))


def test_assignment_survives_its_json():
    whole = Assignment(
        "g",
        7,
        Role.SLAVE,
        A,
        (B, C),
        ("s",),
        (("s", "*", "c"),),
        3,
        (OperatorLimits("s", "", expires_after_s=5),),
        SyncMode.MANUAL,
        (("b-1/0", True), ("c-1/0", False)),
    )
    assert Assignment.from_json(whole.to_json()) == whole
    alone = Assignment("g", 1, Role.MASTER)
    assert Assignment.from_json(alone.to_json()) == alone


@pytest.mark.parametrize("slave", [None, {"ip": "10.0.0.2", "serve_port": 1, "sync_port": 2, "control_port": 3}])
def test_assignment_of_an_older_version_is_read(slave):
    old = {"group": "g", "term": 1, "role": int(Role.MASTER), "master": None, "slave": slave, "readonly_subjects": []}
    assert Assignment.from_json(old) == Assignment("g", 1, Role.MASTER, None, (B,) if slave else ())
