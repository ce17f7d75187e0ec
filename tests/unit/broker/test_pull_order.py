"""Core. Answers to the pulls of one subscription leave in the order of their pull sequences."""

from __future__ import annotations

import pytest

from tests.unit.broker.world import Client, Group


def held_back_reads() -> tuple[Group, Client, list[int]]:
    """Three pulls of one message each, whose bytes are being read from disk."""
    group = Group.made(tail_bytes=0).start()
    client = group.client()
    for number in range(3):
        client.store(f"m{number}")
    client.store("other", subject="other")
    client.join()
    pulls = [client.pull(most=1, timeout_ms=1_000) for _ in range(3)]
    group.a.host.holds_reads = True
    group.settle()
    group.a.host.holds_reads = False
    assert len(group.a.host.reads) == 3, "all three are read from disk"
    return group, client, pulls


@pytest.mark.parametrize("turns", [0, 1, 2], ids=["in order", "last first", "middle first"])
def test_overtaking_reads_do_not_reorder_answers(turns):
    group, client, pulls = held_back_reads()
    before = len(client.link.order)
    group.a.host.reads.rotate(turns)
    group.settle()
    assert client.link.order[before:] == pulls
    assert [client.pulled(pull)[0][2] for pull in pulls] == ["m0", "m1", "m2"]


def test_answer_from_memory_waits_for_earlier_ones():
    group, client, pulls = held_back_reads()
    group.a.host.holds_reads = True
    later = client.pull(most=1, timeout_ms=1_000)
    client.store("m3")
    assert not client.answered(later), "its messages come after those that are still being read"
    group.a.host.holds_reads = False
    group.settle()
    assert client.link.order[-4:] == [*pulls, later]


def test_answer_waits_for_its_frames_on_both_copies():
    group = Group.made().start()
    client = group.client()
    client.produce("m0")
    client.join()
    pull = client.pull()
    (subscription,) = group.a.master.subscriptions
    group.a.host.settle()
    assert not client.answered(pull) and subscription.in_flight == 1 and client.link.owed_bytes > 0
    group.settle()
    assert client.pulled(pull)[0][2] == "m0" and subscription.in_flight == client.link.owed_bytes == 0


def test_safe_answer_releases_no_unsafe_one():
    group = Group.made().start()
    client = group.client()
    client.produce("m0", "m1")
    client.join()
    first = client.pull(most=1)
    group.a.host.settle()
    while group.to_slave():
        group.b.host.settle()
    second = client.pull(most=1)
    group.a.host.settle()
    while group.to_master():
        pass
    assert client.answered(first) and not client.answered(second)
    group.settle()
    assert [client.pulled(pull)[0][2] for pull in (first, second)] == ["m0", "m1"]
