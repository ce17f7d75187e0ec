"""Shell. Broker group "g1", delay group "d1", their metaserver, and a producer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import qmq
from tests.unit.client.world import (
    LocalBroker,
    LocalDelayServer,
    LocalMetaserver,
    cluster,
    consumer_of,
    delay_groups,
    producer_of,
)

Cluster = tuple[LocalMetaserver, list[LocalBroker]]


@pytest.fixture
async def cluster_of_g1() -> AsyncIterator[Cluster]:
    async with cluster("g1") as running:
        yield running


@pytest.fixture
def metaserver(cluster_of_g1: Cluster) -> LocalMetaserver:
    """Metaserver of a cluster with the broker group "g1"."""
    return cluster_of_g1[0]


@pytest.fixture
def broker(cluster_of_g1: Cluster) -> LocalBroker:
    return cluster_of_g1[1][0]


@pytest.fixture
async def server(metaserver: LocalMetaserver, broker: LocalBroker) -> AsyncIterator[LocalDelayServer]:
    """Delay group "d1" beside "g1"."""
    async with delay_groups(metaserver, broker, "d1") as [server]:
        yield server


@pytest.fixture
async def producer(metaserver: LocalMetaserver) -> AsyncIterator[qmq.Producer]:
    async with producer_of(metaserver) as producer:
        yield producer


@pytest.fixture
def consumer(metaserver: LocalMetaserver) -> qmq.Consumer:
    """Consumer "c1", not running."""
    return consumer_of(metaserver, consumer_id="c1")
