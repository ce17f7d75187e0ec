"""Core. Roles include each other as documented; scopes limit only subjects and groups."""

from __future__ import annotations

import pytest

from qmq.errors import AccessError, ErrorCode, InvalidName, MissingRight, from_code
from qmq.rights import CONSUME, PRODUCE, Caller, Scope, TokenRole, check_patterns, includes

MAY = {
    "viewer": {"viewer"},
    "operator": {"viewer", "operator"},
    "admin": {"viewer", "operator", "admin"},
    "client": {"client"},
    "broker": {"broker"},
    "cluster": {"viewer", "operator", "admin", "client", "broker", "cluster"},
}


@pytest.mark.parametrize("role", TokenRole)
def test_role_includes_its_listed_rights(role):
    assert {needed.value for needed in TokenRole if includes(role, needed)} == MAY[role.value]


def test_call_without_a_role_is_always_refused():
    for role in TokenRole:
        with pytest.raises(MissingRight):
            Caller("somebody", role).require_role()


@pytest.mark.parametrize(
    "subjects, right, subject, allowed",
    [
        pytest.param((), PRODUCE, "any", True, id="no limit"),
        pytest.param(("order",), PRODUCE, "order", True, id="exact name"),
        pytest.param(("order",), CONSUME, "order", True, id="both rights"),
        pytest.param(("order",), PRODUCE, "order.paid", False, id="exact name is no prefix"),
        pytest.param(("order",), PRODUCE, "Order", False, id="case matters"),
        pytest.param(("order.*",), PRODUCE, "order.paid", True, id="prefix"),
        pytest.param(("order.*",), PRODUCE, "order", False, id="prefix with its dot"),
        pytest.param(("*",), CONSUME, "any", True, id="star alone"),
        pytest.param(("produce:order",), PRODUCE, "order", True, id="produce only, produced"),
        pytest.param(("produce:order",), CONSUME, "order", False, id="produce only, consumed"),
        pytest.param(("consume:o*",), CONSUME, "order", True, id="consume only, consumed"),
        pytest.param(("consume:o*",), PRODUCE, "order", False, id="consume only, produced"),
        pytest.param(("produce:a", "consume:b"), CONSUME, "a", False, id="one of each"),
        pytest.param(("consume:order",), CONSUME, "%RETRY%order%g", True, id="a retry subject is its consumers'"),
        pytest.param(("consume:order",), PRODUCE, "%RETRY%order%g", False, id="consumers write to no retry subject"),
        pytest.param(("consume:order",), PRODUCE, "%DEAD_RETRY%order%g", False, id="consumers write no dead letters"),
        pytest.param(("redrive:order",), PRODUCE, "%RETRY%order%g", True, id="redrive writes to retry subjects"),
        pytest.param(("redrive:o*",), PRODUCE, "%RETRY%order%g", True, id="redrive with a prefix"),
        pytest.param(("redrive:%RETRY%order%g",), PRODUCE, "%RETRY%order%g", True, id="redrive for one group"),
        pytest.param(("redrive:%RETRY%order%g",), PRODUCE, "%RETRY%order%h", False, id="redrive for another group"),
        pytest.param(("redrive:order",), PRODUCE, "order", False, id="redrive only, produced"),
        pytest.param(("redrive:order",), CONSUME, "order", False, id="redrive only, consumed"),
        pytest.param(("order",), PRODUCE, "%RETRY%order%g", True, id="a plain pattern stands for redrive too"),
        pytest.param(("produce:*",), PRODUCE, "%RETRY%order%g", False, id="a star gives no more rights than are named"),
        pytest.param(("produce:*",), PRODUCE, "%RETRY%a%b%g", False, id="a retry subject with a percent in a name"),
        pytest.param((), PRODUCE, "%RETRY%order%g", True, id="no limit, redriven"),
        pytest.param((), PRODUCE, "%DEAD_RETRY%order%g", False, id="brokers alone write dead letters"),
        pytest.param(("*",), PRODUCE, "%DEAD_RETRY%a%b%g", False, id="dead letters with a percent in a name"),
        pytest.param(("order",), CONSUME, "%DEAD_RETRY%order%g", True, id="dead letters are their consumers'"),
        pytest.param(("produce:order",), PRODUCE, "%RETRY%order%g", False, id="producers have no retry subjects"),
        pytest.param(("x:order",), PRODUCE, "x:order", True, id="a colon in a name"),
    ],
)
def test_scope_limits_subjects(subjects, right, subject, allowed):
    assert Scope(subjects).may(right, subject) is allowed


def test_missing_right_is_named():
    caller = Caller("shop", TokenRole.CLIENT, Scope(("produce:order",), ("g1",)))
    with pytest.raises(MissingRight, match="token 'shop' may not consume from 'order'"):
        caller.require_subject(CONSUME, "order")
    with pytest.raises(MissingRight, match="token 'shop' may not use broker group 'g2'"):
        caller.require_group("g2")
    with pytest.raises(MissingRight, match="token 'shop' has the role client; this needs operator or broker"):
        caller.require_role(TokenRole.OPERATOR, TokenRole.BROKER)
    caller.require_group("g1")
    caller.require_subject(PRODUCE, "order")


def test_missing_right_crosses_the_wire():
    error = from_code(MissingRight("no").code, "no")
    assert type(error) is MissingRight and isinstance(error, AccessError)
    assert type(from_code(ErrorCode.UNAUTHORIZED, "no")) is AccessError


@pytest.mark.parametrize("pattern", ["", "a*b", "**", "a/b", "x" * 101, "produce:", "consume:a*b", " a"])
def test_illegal_patterns_are_refused(pattern):
    with pytest.raises(InvalidName):
        check_patterns("subject", [pattern], rights=True)


def test_legal_patterns_are_accepted():
    patterns = ("*", "a", "a.*", "produce:a", "consume:*", "other:a")
    assert check_patterns("subject", patterns, rights=True) == patterns
