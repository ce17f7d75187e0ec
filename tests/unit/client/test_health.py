"""Shell. Health of clients: three states, each with its reason."""

from __future__ import annotations

import pytest

import qmq
import qmq.blocking
from qmq.client.health import CONNECTED, HealthState, degraded, not_connected, of_groups, worst
from tests.support.waiting import consuming, until_async
from tests.unit.client.world import TOKEN, cluster, consumer_of, handled_by

NOWHERE = {"metaserver": "http://127.0.0.1:1", "app": "test", "token": TOKEN}


def test_worst_state_keeps_every_reason():
    assert worst([]) == worst([CONNECTED, CONNECTED]) == CONNECTED
    both = worst([not_connected("a"), CONNECTED, degraded("b"), degraded("b")])
    assert both == (HealthState.NOT_CONNECTED, "a; b") and str(both) == "not connected: a; b"
    assert worst(degraded(str(number)) for number in range(12)).reason.endswith("9; and 2 more")


@pytest.mark.parametrize(
    ("missing", "connected", "routes", "health"),
    [
        ({}, 2, "", CONNECTED),
        ({"g2": "gone"}, 1, "", degraded("g2: gone")),
        ({}, 1, "no route", degraded("no route")),
        ({"g1": "gone"}, 0, "no route", not_connected("no route; g1: gone")),
    ],
)
def test_missing_group_degrades_and_all_disconnect(missing, connected, routes, health):
    assert of_groups(missing, connected=connected, routes=routes) == health


async def test_closed_clients_are_not_connected():
    producer, blocking = qmq.Producer(**NOWHERE), qmq.blocking.Producer(**NOWHERE)
    assert "not open" in producer.health.reason and "does not run" in qmq.Consumer(**NOWHERE).health.reason
    async with producer:
        assert producer.health == blocking.health == CONNECTED  # unused
    blocking.close()
    for health in (producer.health, blocking.health):
        assert health.state is HealthState.NOT_CONNECTED and "closed" in health.reason


async def test_producer_names_its_missing_groups():
    async with (
        cluster("g1", "g2") as (metaserver, [first, second]),
        qmq.Producer(metaserver=metaserver.url, app="t", token=TOKEN) as producer,
    ):
        assert (await producer.send(qmq.Message("a"))).is_stored
        await until_async(lambda: producer.health == CONNECTED)
        await first.stop()
        await until_async(lambda: producer.health.state is HealthState.DEGRADED)
        assert producer.health.reason.startswith("g1: ")
        await second.stop()
        await until_async(lambda: producer.health.state is HealthState.NOT_CONNECTED)


async def test_consumer_is_degraded_before_it_is_cut_off(monkeypatch):
    monkeypatch.setattr("qmq.client.subscription.TROUBLE_S", 1e9)
    async with cluster("g1", "g2") as (metaserver, [first, second]):
        consumer = consumer_of(metaserver)
        handled_by(consumer)
        async with consuming(consumer):
            await until_async(lambda: consumer.health == CONNECTED)
            await first.stop()
            await until_async(lambda: consumer.health.reason.startswith("a: g1: "))
            await second.stop()
            await until_async(lambda: "g2: " in consumer.health.reason)
            assert consumer.health.state is HealthState.DEGRADED
            monkeypatch.setattr("qmq.client.subscription.TROUBLE_S", 0.0)
            assert consumer.health.state is HealthState.NOT_CONNECTED
            consumer.offline()
            assert consumer.health == degraded("a: stopped by the application")
        assert consumer.health == not_connected("the consumer does not run")


async def test_consumer_of_a_silent_metaserver_names_it():
    consumer = qmq.Consumer(**NOWHERE)
    handled_by(consumer)
    async with consuming(consumer):
        await until_async(lambda: "http://127.0.0.1:1 sent no route" in consumer.health.reason)
        assert consumer.health.state is HealthState.NOT_CONNECTED
