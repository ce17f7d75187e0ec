"""Core. States of a process and their transitions, as shown over HTTP."""

from __future__ import annotations

from qmq.server.http import states
from qmq.types import Role
from tests.unit.broker.world import Group


def shown(group: Group) -> dict[str, tuple[str, list[str]]]:
    found = {}
    for broker in (group.a, group.b):
        for machine in states(broker.node, now_ms=broker.host.monotonic_ms() + 2_000):
            assert all(move["secondsAgo"] in (None, 2.0) for move in machine["transitions"])
            found[f"{broker.name}: {machine['about']}"] = (
                machine["state"],
                [move["event"] for move in machine["transitions"]],
            )
    return found


def test_states_of_master_and_slave():
    assert shown(Group.made().start()) == {
        "a: log": ("WHOLE", ["RECOVERED_WHOLE"]),
        "a: its slave": ("IN_SYNC", ["FOLLOWS", "MATCHED"]),
        "b: log": ("WHOLE", ["RECOVERED_WHOLE"]),
        "b: slave": ("FOLLOWING", ["CONNECTED", "FLUSHED", "FOLLOW"]),
    }


def test_absent_only_slave_is_shown():
    group = Group.made()
    group.a.assign(Role.MASTER)
    assert shown(group)["a: its slave"] == ("ABSENT", [])
