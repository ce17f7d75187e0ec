"""Shell. The reported version is that of the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

from qmq.version import VERSION


def test_version_equals_the_package():
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["version"] == VERSION
