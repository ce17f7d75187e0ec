"""Shell. A commit counts when it is on disk, whichever thread writes it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from qmq.server.service import Service
from tests.unit.log.logs import Copy


class Ended(BaseException):
    """The process ended with this status; no handler may catch that."""


class World:
    """A service with a node that records its calls."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.flushed_ends, self.commits, self.sync_seconds, self.sync_us = copy, [], 0, 0.0, 0.0
        self.node = SimpleNamespace(log=copy.log, committed=self._committed)
        self.guarded, self._run_guarded = partial(Service.guarded, self), partial(Service._run_guarded, self)
        self.fail = partial(Service.fail, self)
        self._perform = partial(Service._perform, self)
        self._loop = SimpleNamespace(call_soon_threadsafe=lambda call, *args: call(*args))

    def _stir(self) -> None: ...

    def _committed(self, commit) -> None:
        self.copy.disk.crash()
        self.flushed_ends.append(self.copy.reopen().end)


@pytest.fixture(autouse=True)
def status_of_exit(monkeypatch):
    def exit(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr("qmq.server.service.os._exit", exit)


@pytest.fixture(params=[Service._commit_inline, Service._commit_on_thread])
def way(request):
    return request.param


def waiting() -> tuple[World, object]:
    copy = Copy.begun()
    copy.messages("a", "b")
    return World(copy), copy.log.take_commit()


def test_commit_survives_a_power_cut(way):
    world, commit = waiting()
    way(world, commit)
    assert world.flushed_ends == [commit.end] and commit.end > 0 and world.commits == 1


def test_failed_commit_ends_the_process(way):
    world, commit = waiting()
    world.copy.disk.fail_after(1)
    with pytest.raises(Ended, match="70"):
        way(world, commit)
    assert world.flushed_ends == []
