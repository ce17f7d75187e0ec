"""Shell. Pytest plugin, loaded by itself: fixtures with an in-memory broker for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qmq.testing.broker import BlockingBroker, Broker


@pytest.fixture
def qmq_broker() -> Iterator[Broker]:
    """In-memory broker for a test of coroutines, to which all clients of the process connect; see docs/testing.md."""
    from qmq.testing.broker import Broker

    with Broker() as broker, broker.redirected():
        yield broker


@pytest.fixture
def qmq_blocking_broker() -> Iterator[BlockingBroker]:
    """In-memory broker for a test of plain functions, to which all clients connect; see docs/testing.md."""
    from qmq.testing.broker import BlockingBroker

    with BlockingBroker() as broker, broker.redirected():
        yield broker
