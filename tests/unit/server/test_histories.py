"""Core. A process says in which states it is, and how it came into them."""

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


def test_master_and_slave_show_what_they_are_towards_each_other():
    assert shown(Group.made().start()) == {
        "a: log": ("WHOLE", ["RECOVERED_WHOLE"]),
        "a: its slave": ("IN_SYNC", ["FOLLOWS", "MATCHED"]),
        "b: log": ("WHOLE", ["RECOVERED_WHOLE"]),
        "b: slave": ("FOLLOWING", ["CONNECTED", "FLUSHED", "FOLLOW"]),
    }


def test_the_only_slave_of_a_group_is_shown_though_it_was_never_there():
    group = Group.made()
    group.a.assign(Role.MASTER)
    assert shown(group)["a: its slave"] == ("ABSENT", [])
