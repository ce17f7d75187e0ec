"""Core. Signs of life: claims, heartbeats, silence, restarts; all times are given."""

from __future__ import annotations

import pytest

from metaserver.liveness import Liveness, PlaceTaken
from metaserver.model import Broker, BrokerKey, Group, ReplicaState
from qmq.types import Role

KEY = BrokerKey("a", 1)
REIGNING = ReplicaState(role=0, term=7, writable=True)
START = 10_000


def group(incarnation="x", term=7):
    return Group("g1", term, Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation=incarnation), None, 0)


def liveness(started_ms=0):
    return Liveness(timeout_ms=1000, started_ms=started_ms)


def beating(state=REIGNING, at=START):
    signs = liveness()
    signs.beat(KEY, signs.join(KEY, "x", now_ms=at), state, now_ms=at)
    return signs


@pytest.mark.parametrize(
    "later, up", [(0, True), (1000, True), (1001, False)], ids=["at once", "at the timeout", "past it"]
)
def test_silence_means_down_past_the_timeout(later, up):
    signs = beating()
    assert signs.is_up(KEY, now_ms=START + later) is up
    assert signs.is_writable(group(), now_ms=START + later) is up
    assert (signs.state(KEY, now_ms=START + later) is not None) is up


def test_end_of_the_stream_means_down_at_once_and_frees_the_place():
    signs = liveness()
    session = signs.join(KEY, "x", now_ms=START)
    signs.beat(KEY, session, REIGNING, now_ms=START)
    signs.leave(KEY, session)
    assert not signs.is_up(KEY, now_ms=START) and not signs.is_writable(group(), now_ms=START)
    signs.claim(KEY, "y", now_ms=START)


def test_place_of_a_live_broker_is_refused_to_another_disk():
    signs = beating()
    with pytest.raises(PlaceTaken):
        signs.claim(KEY, "y", now_ms=START + 1000)
    with pytest.raises(PlaceTaken):
        signs.join(KEY, "y", now_ms=START + 1000)
    signs.claim(KEY, "y", now_ms=START + 1001)


def test_registration_alone_holds_the_place():
    signs = liveness()
    signs.claim(KEY, "x", now_ms=START)
    with pytest.raises(PlaceTaken):
        signs.claim(KEY, "y", now_ms=START + 500)


def test_end_of_a_replaced_stream_changes_nothing():
    signs = liveness()
    old = signs.join(KEY, "x", now_ms=START)
    new = signs.join(KEY, "x", now_ms=START)
    assert not signs.beat(KEY, old, REIGNING, now_ms=START)
    assert signs.beat(KEY, new, REIGNING, now_ms=START)
    signs.leave(KEY, old)
    assert signs.is_writable(group(), now_ms=START)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(ReplicaState(role=0, term=6, writable=True), id="older term"),
        pytest.param(ReplicaState(role=0, term=8, writable=True), id="newer term"),
        pytest.param(ReplicaState(role=1, term=7, writable=True), id="slave"),
        pytest.param(ReplicaState(role=0, term=7, writable=False), id="readonly"),
    ],
)
def test_only_the_reigning_master_makes_a_group_writable(state):
    assert not beating(state).is_writable(group(), now_ms=START)


def test_after_our_start_a_known_master_is_presumed_until_it_had_time_to_come_back():
    signs = liveness(started_ms=START)
    assert signs.is_writable(group(), now_ms=START + 999)
    assert signs.may_be_up(group().master, now_ms=START + 999)
    assert not signs.is_writable(group(), now_ms=START + 1000)
    assert not signs.may_be_up(group().master, now_ms=START + 1000)


def test_what_never_registered_is_not_presumed():
    signs = liveness(started_ms=START)
    assert not signs.is_writable(group(incarnation=""), now_ms=START)
    assert not signs.may_be_up(group(incarnation="").master, now_ms=START)


def test_what_came_and_went_is_not_presumed():
    signs = liveness(started_ms=START)
    signs.leave(KEY, signs.join(KEY, "x", now_ms=START))
    assert not signs.is_writable(group(), now_ms=START + 1)
    assert not signs.may_be_up(group().master, now_ms=START + 1)


def test_next_change_is_when_the_first_silence_would_count():
    signs = liveness(started_ms=START)
    assert signs.next_change_ms(now_ms=START) == START + 1000
    signs.join(KEY, "x", now_ms=START + 500)
    assert signs.next_change_ms(now_ms=START + 1000) == START + 1501
    assert signs.next_change_ms(now_ms=START + 5000) == START + 6000
