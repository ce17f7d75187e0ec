"""The lock file of servers: the same versions as the other one, with all requirements of a server."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)(?:\[[a-z,]+\])?(==\S+)", (ROOT / lock).read_text(), re.MULTILINE))


def test_server_lock_has_the_tested_versions():
    assert pins("requirements-server.lock") < pins("requirements.lock")


def test_server_lock_covers_all_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], "setuptools"]
    asked += [need for extra in ("server", "mariadb", "postgresql", "tools") for need in extras[extra]]
    names = {re.split(r"[\[>=; ]", need)[0] for need in asked}
    assert names <= {name for name, _ in pins("requirements-server.lock")}


def test_every_pin_has_a_hash():
    for text in (path.read_text() for path in sorted(ROOT.glob("requirements*.lock"))):
        pinned = [entry for entry in re.split(r"\n(?! )", text) if "==" in entry]
        assert pinned and all("--hash=sha256:" in entry for entry in pinned)
