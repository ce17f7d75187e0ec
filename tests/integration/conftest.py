"""Shell. World of the tests of one metaserver on real sockets."""

from __future__ import annotations

import pytest

from tests.integration.metaserver_world import World


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
