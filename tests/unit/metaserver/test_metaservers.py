"""Core. Other metaservers' counters, the clock that stops with the process, delay of flapping brokers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.metaserver.cluster.liveness import FLAPPING, HOLD_MS, LOSSES_FREE, Damping
from qmq.metaserver.cluster.sightings import PAUSE_MS, AwakeClock, Peers
from qmq.metaserver.model import BrokerKey, MetaserverRow, ReplicaState

KEY = BrokerKey("a", 1)
READY = ReplicaState(role=0, term=7, writable=True)
LOST = replace(READY, writable=False, readonly_reasons=("slave_down",))


def row(beat, id="m2"):
    return MetaserverRow(id, "h:1", "h:2", beat, "1")


def read(peers, beats, every_ms=1000, start_ms=0):
    now = start_ms
    for number, beat in enumerate(beats):
        now = start_ms + number * every_ms
        peers.read([row(beat)] if beat is not None else [], mentioned=["m2"], now_ms=now)
    return now


@pytest.mark.parametrize(
    "beats, silent",
    [
        pytest.param([1, 2, 3, 4, 5, 6, 7], False, id="it counts"),
        pytest.param([1, 1, 1, 1, 1, 1], False, id="still, for the timeout"),
        pytest.param([1, 1, 1, 1, 1, 1, 1], True, id="still, for longer"),
        pytest.param([None] * 7, True, id="named by a row, and not there"),
        pytest.param([9, 9, 9, 9, 9, 9, 2], False, id="another number, whichever"),
    ],
)
def test_metaserver_with_still_counter_is_silent(beats, silent):
    peers = Peers(timeout_ms=5000)
    now = read(peers, beats)
    assert peers.is_silent("m2", now_ms=now) is silent


def test_database_outage_silences_no_metaserver():
    peers = Peers(timeout_ms=5000)
    read(peers, [1, 2])
    now = read(peers, [2, 2, 3], start_ms=60_000)
    assert not peers.is_silent("m2", now_ms=now)
    assert peers.is_silent("m2", now_ms=now + 5001), "nothing was heard since: reason enough to ask"


def test_row_with_still_counter_is_removed():
    peers = Peers(timeout_ms=1000)
    read(peers, [1] * 13)
    assert peers.forgotten() == []
    read(peers, [1], start_ms=13_000)
    assert peers.forgotten() == ["m2"]


def test_clock_stops_with_the_process():
    clock = AwakeClock()
    began = clock.at(1000)
    assert clock.at(1100) - began == 100
    assert clock.at(61_100) - began == 100 + PAUSE_MS
    assert clock.at(61_200) - began == 200 + PAUSE_MS


def flap(damping, times, term=7, lost=LOST):
    now = 0
    for number in range(times):
        now = number * 200
        damping.damped(KEY, replace(READY, term=term), now_ms=now)
        damping.damped(KEY, replace(lost, term=term), now_ms=now + 100)
    return now + 200


def test_flapping_broker_is_held_back():
    damping = Damping()
    now = flap(damping, LOSSES_FREE + 1)
    held = damping.damped(KEY, READY, now_ms=now)
    assert not held.writable and held.readonly_reasons == (FLAPPING,)
    assert not damping.damped(KEY, READY, now_ms=now + HOLD_MS - 1).writable
    assert damping.damped(KEY, READY, now_ms=now + HOLD_MS).writable


def test_readonly_is_published_at_once():
    damping = Damping()
    now = flap(damping, 10)
    assert damping.damped(KEY, LOST, now_ms=now) == LOST


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param(lambda damping: flap(damping, LOSSES_FREE), id="few"),
        pytest.param(lambda damping: flap(damping, 10, lost=replace(LOST, readonly_reasons=("operator",))), id="marks"),
        pytest.param(lambda damping: (flap(damping, 10, term=6), 2000)[1], id="an older term"),
    ],
)
def test_orders_and_rare_losses_cause_no_delay(orders):
    damping = Damping()
    now = orders(damping)
    assert damping.damped(KEY, READY, now_ms=now).writable


def test_removed_brokers_use_no_memory():
    damping = Damping()
    damping.damped(KEY, READY, now_ms=0)
    damping.forget([KEY])
    assert not damping._histories
