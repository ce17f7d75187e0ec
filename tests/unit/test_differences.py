"""Core. Differences of a plan, as shown to operators."""

from __future__ import annotations

import pytest

from qmq.commands.action import differences

A = {"hostname": "a", "ip": "10.0.0.1", "servePort": 1, "syncPort": 2, "controlPort": 3}
B = {"hostname": "b", "ip": "10.0.0.2", "servePort": 1, "syncPort": 2, "controlPort": 3}


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        pytest.param({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}, [("a.b", 1, 3)], id="a field within"),
        pytest.param({"a": 1}, {"b": 2}, [("a", 1, None), ("b", None, 2)], id="one goes, one comes"),
        pytest.param({"a": None}, {"a": {"b": 2, "c": None}}, [("a.b", None, 2)], id="a place that appears"),
        pytest.param(None, {"a": 1}, [("a", None, 1)], id="there was nothing"),
        pytest.param(1, 2, [("value", 1, 2)], id="no fields"),
        pytest.param({"a": {"b": 1}}, {"a": 2}, [("a", {"b": 1}, 2)], id="of another kind"),
        pytest.param([{"b": 1}], [{"b": 2}], [("value", [{"b": 1}], [{"b": 2}])], id="lists"),
        pytest.param({"a": [1]}, {"a": [1]}, [], id="the same"),
        pytest.param({"a": {}}, {"a": None}, [], id="nothing is nothing"),
        pytest.param(
            {"term": 2, "master": A, "slaves": {"b:1": B | {"role": "SLAVE"}}},
            {"term": 3, "master": B, "slaves": {"a:1": A | {"role": "SLAVE"}}},
            [
                ("term", 2, 3),
                ("master", "a:1 (10.0.0.1, sync 2)", "b:1 (10.0.0.2, sync 2)"),
                ("slaves.b:1", "b:1 (SLAVE, 10.0.0.2, sync 2)", None),
                ("slaves.a:1", None, "a:1 (SLAVE, 10.0.0.1, sync 2)"),
            ],
            id="roles are exchanged",
        ),
        pytest.param(
            {"master": A}, {"master": A | {"syncPort": 9}}, [("master.syncPort", 2, 9)], id="a broker gets another port"
        ),
        pytest.param({"x": A}, {"x": {"b": 1}}, [("x", A, {"b": 1})], id="a broker, and something else"),
    ],
)
def test_differences_are_shown_by_field(before, after, shown):
    assert differences(before, after) == shown
