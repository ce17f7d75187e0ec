"""Core. Groups and places of an audit of the whole installation."""

from __future__ import annotations

import pytest

from qmq.audit import places
from qmq.audit.copies import CannotRead


def row(group, role, port):
    return {"group": group, "role": role, "ip": "10.0.0.1", "controlPort": port}


def groups(monkeypatch, *rows):
    monkeypatch.setattr(places, "_list_brokers", lambda metaserver, token: list(rows))
    found = places.find_places("http://m", "t")
    return {name: {copy: place["broker"] for copy, place in places.items()} for name, places in found.items()}


def test_delay_groups_are_audited_like_broker_groups(monkeypatch):
    rows = [row("g1", "MASTER", 1), row("g1", "SLAVE", 2), row("d1", "DELAY_SLAVE", 4), row("d1", "DELAY_MASTER", 3)]
    assert groups(monkeypatch, *rows) == {
        "d1": {"master": "10.0.0.1:3", "slave": "10.0.0.1:4"},
        "g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2"},
    }


def test_each_slave_of_a_group_is_a_copy(monkeypatch):
    rows = [row("g1", role, port) | {"name": f"b{port}"} for role, port in (("SLAVE", 3), ("MASTER", 1), ("SLAVE", 2))]
    assert groups(monkeypatch, *rows) == {"g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2", "slave2": "10.0.0.1:3"}}


def test_group_with_one_copy_is_found(monkeypatch):
    """It cannot be proven, and does not affect other groups."""
    rows = [row("d1", "DELAY_MASTER", 3), row("g1", "MASTER", 1), row("g1", "SLAVE", 2)]
    assert groups(monkeypatch, *rows) == {
        "d1": {"master": "10.0.0.1:3"},
        "g1": {"master": "10.0.0.1:1", "slave": "10.0.0.1:2"},
    }


def test_an_installation_without_groups_cannot_be_audited(monkeypatch):
    with pytest.raises(CannotRead, match="has no broker group"):
        groups(monkeypatch)


def test_group_status_comes_from_the_metaserver(monkeypatch):
    rows = [
        {"groupName": "g1", "writable": True, "minCopies": 3, "why": []},
        {"groupName": "g2", "writable": False, "why": ["it has no slave"], "kind": "NORMAL"},
        {"groupName": "d1", "writable": True, "kind": "DELAY"},
    ]
    monkeypatch.setattr(places, "_list_groups", lambda metaserver, token: rows)
    assert places.find_group_status("http://m", "t") == {
        "g1": (3, (), False),
        "g2": (2, ("it has no slave",), False),
        "d1": (2, (), True),
    }
