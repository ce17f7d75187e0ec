"""Core. Subjects of dead letters are served by every group that stores them."""

from __future__ import annotations

from qmq.metaserver.model import Route
from qmq.metaserver.routes.placement import wider_routes
from qmq.metaserver.storage.changes import SetRoute
from qmq.operator_limits import OperatorLimits

ROUTES = {name: Route(name, groups, 3) for name, groups in {"a": ("g1", "g2"), "b": ("g3",), "t": ("g2",)}.items()}


def to(subject: str, group: str, other: str) -> OperatorLimits:
    return OperatorLimits(subject, group, dead_letters_to=other)


def test_route_gets_all_source_groups_at_once():
    limits = [to("a", "x", "t"), to("b", "x", "t"), to("a", "y", "t"), OperatorLimits("a", "z", per_second=3)]
    assert wider_routes(limits, ROUTES) == [SetRoute("t", ("g1", "g2", "g3"), 3)]


def test_sufficient_or_missing_route_is_unchanged():
    wide = ROUTES | {"t": Route("t", ("g1", "g2", "g4"), 3), "removed": Route("removed", (), 5)}
    limits = [to("a", "x", "t"), to("gone", "x", "t"), to("a", "x", "nowhere"), to("a", "y", "removed")]
    assert wider_routes(limits, wide) == []
