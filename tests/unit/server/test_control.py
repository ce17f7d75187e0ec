"""Shell. Orders of the metaserver reach the core as everything else does: noticed by its timers, and fenced."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from qmq.errors import DiskFailed
from qmq.proto import qmq_pb2 as pb
from qmq.server import control
from qmq.server.control import CopyControl
from qmq.server.service import Service

ORDERS = [
    pytest.param("PrepareSwap", pb.PrepareSwapRequest(term=1, timeout_ms=1_000), id="swap"),
    pytest.param("CancelSwap", pb.Nothing(), id="no swap"),
    pytest.param("PrepareFailover", pb.PrepareFailoverRequest(term=1), id="failover"),
]


class World:
    """A service whose core does as `call` says."""

    def __init__(self, call):
        self.stirs, self.ended = 0, []
        self.node = SimpleNamespace(
            prepare_swap=call,
            cancel_swap=call,
            prepare_failover=call,
            master=SimpleNamespace(is_drained_to=lambda target: True),
        )
        self.fail = self.ended.append
        self._run_guarded = partial(Service._run_guarded, self)
        self.guarded = partial(Service.guarded, self)

    def _stir(self):
        self.stirs += 1

    def master_heard_ms_ago(self):
        return None

    def carry_out(self, monkeypatch, name, order):
        monkeypatch.setattr(control, "state_message", lambda service, settings: pb.BrokerState())

        async def run():
            served = CopyControl(self, SimpleNamespace(read_log_bytes_per_s=1_024, catch_up_bytes_per_s=1_024), None)
            await getattr(served, name)(order, None)

        asyncio.run(run())


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_an_order_wakes_a_broker_that_sleeps_until_something_is_due(monkeypatch, name, order):
    """Else its group said for up to a second longer that it takes messages, or that it takes none."""
    told = []
    world = World(lambda *args, **fields: told.append(args))
    world.carry_out(monkeypatch, name, order)
    assert told and world.stirs


@pytest.mark.parametrize(("name", "order"), ORDERS)
def test_a_disk_that_fails_at_an_order_ends_the_process(monkeypatch, name, order):
    """I15. A promise that was not written down must not be answered, nor anything after it."""

    def fails(*args, **fields):
        raise DiskFailed("no space left")

    world = World(fails)
    world.carry_out(monkeypatch, name, order)
    assert [str(error) for error in world.ended] == ["no space left"]
