"""Shell. Worlds of the metaserver's tests, each closed with its test."""

from __future__ import annotations

import pytest

from qmq.metaserver.storage.engine import open_database
from qmq.metaserver.storage.repository import Repository
from tests.unit.metaserver.actions_world import World
from tests.unit.metaserver.console_world import ConsoleWorld
from tests.unit.metaserver.http_world import HttpWorld


@pytest.fixture
def repository(migrated_url):
    """Tables of an empty database of each kind."""
    engine = open_database(migrated_url)
    yield Repository(engine)
    engine.dispose()


@pytest.fixture
async def world(tmp_path):
    """Actions of one metaserver."""
    world = World(tmp_path / "metaserver.db")
    await world.open()
    yield world
    world.close()


@pytest.fixture
async def cluster(world):
    """Actions of one metaserver, with group g1 of two running copies."""
    await world.running_copies()
    return world


@pytest.fixture
async def console(tmp_path):
    """Console of one metaserver, with a viewer logged in."""
    console = ConsoleWorld(tmp_path / "metaserver.db")
    await console.open()
    await console.log_in()
    yield console
    console.close()


@pytest.fixture
def http():
    """HTTP addresses over actions that only record their calls."""
    return HttpWorld()
