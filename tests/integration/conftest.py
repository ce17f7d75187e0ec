"""Shell. World of the tests of one metaserver on real sockets, and directories that real servers wrote."""

from __future__ import annotations

import asyncio

import pytest

from qmq.audit.places import find_changes
from qmq.metaserver.storage.engine import open_database
from tests.integration import cluster_world, real_logs
from tests.integration.metaserver_world import World
from tests.integration.watchdog_world import Application
from tests.support.waiting import until


def pytest_configure(config):
    config.addinivalue_line("markers", "metaserver(**settings): settings of the metaserver of `world`")


@pytest.fixture
async def world(request, tmp_path):
    """One metaserver; its database outlives a restart within the test."""
    marker = request.node.get_closest_marker("metaserver")
    settings = {"heartbeat_timeout_ms": 2000} | (marker.kwargs if marker else {})
    world = await World(tmp_path / "metaserver.db", **settings).start()
    yield world
    await world.close()


@pytest.fixture
def engine(database_url):
    """Engine of a database with the tables of a metaserver, of each kind."""
    engine = open_database(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def application(database_url):
    """Database of an application with an outbox, of each kind."""
    made = Application(database_url)
    yield made
    made.close()


@pytest.fixture
def subject(request):
    """Subject of one test on a shared cluster."""
    return f"s{sum(request.node.name.encode())}"


@pytest.fixture(scope="session")
def lived(tmp_path_factory):
    """A stopped cluster with the groups g1 and d1; copy its directories before a change."""
    with cluster_world.running(tmp_path_factory.mktemp("real"), delay_groups=("d1",)) as cluster:
        asyncio.run(real_logs.live(cluster))
        places = real_logs.directories(cluster)
        until(lambda: real_logs.is_settled(places["d1"]["master"]), "each batch has an outcome")
        for group in places:
            cluster.wait_equal(group)
        trail = find_changes(cluster.metaserver, cluster.token)
    return real_logs.Lived(places, trail)
