"""Shell. Questions about databases, of which each may be of no use in its own way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from qmq.errors import NotServed
from qmq.watchdog.db.questions import Questions
from qmq.watchdog.sources import Source
from qmq.watchdog.watcher import Watcher


@pytest.mark.parametrize("error", [UnicodeError("no name of a host"), RuntimeError("a package is missing")])
def test_whatever_a_driver_raises_is_the_trouble_of_its_database_alone(error, tmp_path, monkeypatch):
    source = Source(f"sqlite://here:1/{tmp_path}/shop.db")

    def ask(questions):
        raise error

    async def count():
        leading = SimpleNamespace(is_leader=True, sources=[source], problems={})
        watcher = Watcher(None, leading, None, SimpleNamespace(stats={source.url: 1}))
        await watcher._count(source)
        assert watcher._metrics.stats == {}
        with pytest.raises(NotServed, match=str(error)):
            await watcher._ask(source, ask)

    monkeypatch.setattr(Questions, "stats", ask)
    asyncio.run(count())
