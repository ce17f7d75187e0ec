"""Shell. The pytest plugin: fixtures that give each test a broker in memory of its own. It is loaded by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qmq.testing.broker import BlockingBroker, Broker


@pytest.fixture
def qmq_broker() -> Iterator[Broker]:
    """A broker in memory for a test of coroutines; see docs/testing.md."""
    from qmq.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def qmq_blocking_broker() -> Iterator[BlockingBroker]:
    """A broker in memory for a test of plain functions; see docs/testing.md."""
    from qmq.testing.broker import BlockingBroker

    with BlockingBroker() as broker:
        yield broker
