"""Shell. Pytest plugin, loaded by itself: fixtures with an in-memory broker for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qmq.testing.broker import BlockingBroker, Broker


@pytest.fixture
def qmq_broker() -> Iterator[Broker]:
    """In-memory broker for a test of coroutines; see docs/testing.md."""
    from qmq.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def qmq_blocking_broker() -> Iterator[BlockingBroker]:
    """In-memory broker for a test of plain functions; see docs/testing.md."""
    from qmq.testing.broker import BlockingBroker

    with BlockingBroker() as broker:
        yield broker
