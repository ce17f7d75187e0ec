"""Shell. A broker in memory, producers for it, and shops with real databases."""

from __future__ import annotations

import pytest

import qmq.blocking
from qmq.testing import BlockingBroker
from tests.support.databases import KINDS
from tests.unit.outbox.worlds import INTERFACES, WORLDS


@pytest.fixture
def broker():
    with BlockingBroker() as broker:
        yield broker


@pytest.fixture
def producer(broker):
    with qmq.blocking.Producer(metaserver=broker.metaserver, token="any", app="shop", timeout_s=20.0) as producer:
        yield producer


@pytest.fixture(scope="session")
def shop_urls():
    """One database of each server for all shops in turn: creating one takes half a second."""
    return {}


@pytest.fixture(params=KINDS)
def shop_url(request, shop_urls, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    if request.param not in shop_urls:
        shop_urls[request.param] = request.getfixturevalue(request.param).create_database()
    return shop_urls[request.param]


@pytest.fixture(params=INTERFACES)
def world(request, shop_url):
    world = WORLDS[request.param](shop_url)
    yield world
    world.close()


@pytest.fixture
def session_world(tmp_path):
    """A shop with SQLAlchemy on SQLite, for tests independent of the database."""
    world = WORLDS["session"](f"sqlite:///{tmp_path / 'shop.db'}")
    yield world
    world.close()
