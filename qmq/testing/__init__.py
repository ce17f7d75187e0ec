"""In-memory broker for tests of applications: see `Broker`, and docs/testing.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmq.testing.broker import BlockingBroker, Broker

__all__ = ["BlockingBroker", "Broker"]


def __getattr__(name: str) -> object:
    """Import on first use: pytest loads the plugin in every run, also in those without messages."""
    if name not in __all__:
        raise AttributeError(f"qmq.testing has no name {name!r}")
    value = globals()[name] = getattr(import_module("qmq.testing.broker"), name)
    return value
