"""Shell. Commands see no installation of the machine that runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_metaserver(monkeypatch):
    for name in ("QMQ_METASERVER", "QMQ_TOKEN", "QMQ_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
