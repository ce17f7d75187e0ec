"""Shell. Consumers of one group on real brokers: cold backlogs, consumers that vanish, acks that stay. W1, W2, W8."""

from __future__ import annotations

import time

import pytest

from tests.integration.cluster_world import (
    Wire,
    begin,
    consume_all,
    end,
    pull,
    running,
    send_all,
    state,
    subscribe,
)

LEASE_MS = 4000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("cluster"), tail_bytes=16 * 1024, lease_ms=LEASE_MS) as cluster:
        yield cluster


def test_cold_backlog_comes_whole_and_in_order(cluster):
    """Most of it lies in closed segments, out of memory; a restart in between changes nothing (W6)."""
    count = 6000
    send_all(cluster, "cold", count, size=300)
    assert state(cluster, cluster.broker("g1", "master")).log_end > 6 * 256 * 1024
    expected = [(n, f"m-{n}") for n in range(count)]
    assert consume_all(cluster, "cold", "first", count) == expected
    master = cluster.broker("g1", "master")
    end(cluster, master.hostname)
    begin(cluster, master.hostname)
    cluster.wait_writable()
    assert consume_all(cluster, "cold", "second", count) == expected


def test_vanished_consumer_leaves_its_messages_to_the_others(cluster, tmp_path):
    """W1: in QMQ what a dead consumer held is dropped."""
    send_all(cluster, "left", 40)
    with Wire(cluster.broker("g1", "master").serve_port, token=cluster.token) as wire:
        seen = time.monotonic()  # before it asks: its lease ends no earlier than so long after this
        assert sum(piece.count for piece in pull(wire, subscribe(wire, "left", consumer="vanishes"))) == 40
    assert consume_all(cluster, "left", "g", 40, consumer_id="stays") == [(n, f"m-{n}") for n in range(40)]
    assert time.monotonic() > seen + LEASE_MS / 1000 - 0.5, "they came before the lease ended"


def test_consumer_that_comes_back_gets_what_it_had_not_acked(cluster):
    send_all(cluster, "back", 10)
    port = cluster.broker("g1", "master").serve_port
    for _ in range(3):
        with Wire(port, token=cluster.token) as wire:
            pieces = pull(wire, subscribe(wire, "back", consumer="c1"))
            assert [(piece.sequence, piece.count) for piece in pieces] == [(0, 10)]


def test_position_of_a_new_group_survives_a_restart_without_any_pull(cluster):
    """W8."""
    send_all(cluster, "fresh", 5, name="before")
    master = cluster.broker("g1", "master")
    with Wire(master.serve_port, token=cluster.token) as wire:
        subscribe(wire, "fresh", start="latest")
    end(cluster, master.hostname)
    begin(cluster, master.hostname)
    cluster.wait_writable()
    send_all(cluster, "fresh", 5, name="after")
    assert consume_all(cluster, "fresh", "g", 5) == [(n + 5, f"after-{n}") for n in range(5)]


def test_acks_survive_kill_9_of_both_brokers(cluster):
    """W2, W13."""
    send_all(cluster, "acked", 30)
    assert len(consume_all(cluster, "acked", "g", 30, consumer_id="c1")) == 30
    names = [broker.hostname for broker in cluster.plan.brokers]
    end(cluster, *names)
    begin(cluster, *names)
    cluster.wait_writable()
    send_all(cluster, "acked", 5, name="new")
    assert consume_all(cluster, "acked", "g", 5, consumer_id="c1") == [(30 + n, f"new-{n}") for n in range(5)]
