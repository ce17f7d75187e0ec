"""Shell. Declared settings are read, and shipped files are sufficient."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from qmq.broker.settings import BrokerSettings
from qmq.gateway.settings import GatewaySettings
from qmq.metaserver.settings import MetaserverSettings
from qmq.settings import load
from qmq.watchdog.settings import WatchdogSettings

ROOT = Path(__file__).parents[2]
KINDS = {
    "broker": BrokerSettings,
    "gateway": GatewaySettings,
    "metaserver": MetaserverSettings,
    "watchdog": WatchdogSettings,
}
SHARED = {"broker": ("qmq/replication", "qmq/server"), "gateway": ("qmq/gateway",)}
"""Packages that these processes run beside their own."""


def names_read(package: str) -> set[str]:
    """Return all attribute names that a package reads."""
    folders = [ROOT / folder for folder in (package, *SHARED.get(package, ()))]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in (*paths, ROOT / "qmq/process_main.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("package", KINDS)
def test_every_setting_is_read(package):
    """Weakness 39: QMQ documents settings that its code never reads."""
    declared = {field.name for field in dataclasses.fields(KINDS[package])}
    assert declared - names_read(package) == set()


@pytest.mark.parametrize("package", KINDS)
def test_only_settings_without_default_are_required(package, tmp_path):
    """Weakness 39: QMQ ships files without required settings, so its watchdog and its backup do not start."""
    fields = dataclasses.fields(KINDS[package])
    needed = [field for field in fields if field.default is dataclasses.MISSING]
    (tmp_path / "x.toml").write_text("\n".join(f'{field.name} = "{field.name}"' for field in needed))
    settings = load(KINDS[package], prefix="QMQ_X", path=tmp_path / "x.toml", environ={})
    defaults = {field.name: field.default for field in fields if field not in needed}
    assert {name: getattr(settings, name) for name in defaults} == defaults


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda path: path.name)
def test_documents_list_settings_and_defaults(path):
    """Weakness 39: QMQ's defaults differ from its documents."""
    known = {field.name: field.default for kind in KINDS.values() for field in dataclasses.fields(kind)}
    for name, value in re.findall(r"`([a-z0-9]+_[a-z0-9_]+)` \(default[: ]+`?([^`)\s]+)`?\)", path.read_text()):
        assert name in known and str(known[name]) == value, f"{path.name}: {name} is said to be {value} by default"
