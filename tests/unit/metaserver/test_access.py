"""Core. Tokens: made, shown once, checked in constant time, limited in time; new subjects are rationed."""

from __future__ import annotations

import hmac
import random
from dataclasses import replace

import pytest

from qmq.errors import AccessError, InvalidName, NotServed, OperatorError
from qmq.metaserver import access
from qmq.metaserver.access import RPC_ROLES, Access, first_admin, new_token
from qmq.proto import qmq_pb2 as pb
from qmq.rights import TokenRole

NOW = 1_700_000_000_000
CLUSTER = "the key of the installation"


def make(name="shop", role="client", known=(), seed=0, **options):
    return new_token(name, role, known=known, random_bytes=random.Random(seed).randbytes, now_ms=NOW, **options)


def knowing(*tokens):
    found = Access([CLUSTER, ""])
    found.replace(tokens)
    return found


def test_token_yields_caller_and_rights():
    row, text = make(subjects=["order.*"], groups=["g1"])
    caller = knowing(row).check(text, now_ms=NOW, peer="1.2.3.4")
    assert (caller.name, caller.role, caller.peer) == ("shop", TokenRole.CLIENT, "1.2.3.4")
    assert (caller.scope.subjects, caller.scope.groups) == (("order.*",), ("g1",))


def test_unknown_token_is_not_rejected_while_the_table_is_lost():
    """Clients end by a rejected token: an emptied database must not end all of them."""
    row, text = make()
    lost = Access([CLUSTER], lambda: "the database lacks groups")
    with pytest.raises(NotServed, match="lacks groups"):
        lost.check(text, now_ms=NOW)
    lost.replace([row])
    assert lost.check(text, now_ms=NOW).name == "shop"
    with pytest.raises(AccessError, match="missing"):
        lost.check("", now_ms=NOW)


def test_stored_hash_does_not_reveal_token():
    """Weakness 28: QMQ stores tokens readable in a file."""
    row, text = make()
    secret = text.rpartition("_")[2]
    assert secret not in repr(row) and len(secret) == 64 and len(row.salt) == 32
    assert make(seed=1)[0].hash != row.hash
    same_secret = access.hash_of(secret, row.salt), access.hash_of(secret, "00")
    assert same_secret[0] == row.hash != same_secret[1]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        None,
        b"",
        "x",
        CLUSTER[:-1],
        CLUSTER + " ",
        CLUSTER.upper(),
        b"\xff",
        "\udcff",
        "qmq__",
        "qmq_a_b",
        "qmq_" + "0" * 12 + "_" + "0" * 64,
        "é",
    ],
)
def test_other_tokens_are_refused(wrong):
    row, _ = make()
    with pytest.raises(AccessError):
        knowing(row).check(wrong, now_ms=NOW)


@pytest.mark.parametrize("change", range(12))
def test_altered_token_is_refused(change):
    row, text = make()
    at = random.Random(change).randrange(len(text))
    changed = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
    with pytest.raises(AccessError):
        knowing(row).check(changed, now_ms=NOW)


def test_both_cluster_tokens_have_all_rights():
    both = Access([CLUSTER, "the one before"])
    for text in (CLUSTER, CLUSTER.encode(), "the one before"):
        caller = both.check(text, now_ms=NOW)
        assert all(caller.may(role) for role in TokenRole) and caller.scope.all_subjects


def test_secrets_are_compared_in_constant_time(monkeypatch):
    """Weakness 28: QMQ compares by map look-up. Known and unknown ids take the same work here."""
    compared = []

    class Spy:
        @staticmethod
        def compare_digest(a, b):
            compared.append(len(a))
            return hmac.compare_digest(a, b)

    monkeypatch.setattr(access, "hmac", Spy)
    row, text = make()
    known = knowing(row)
    for wrong in (text[:-1] + "x", "qmq_unknown_" + "0" * 64, "anything"):
        compared.clear()
        with pytest.raises(AccessError):
            known.check(wrong, now_ms=NOW)
        assert len(compared) == 2 and compared[1] == 128


def test_token_expires_and_can_be_revoked():
    """Weakness 28: QMQ's tokens do not expire."""
    row, text = make(lifetime_ms=1000)
    assert knowing(row).check(text, now_ms=NOW + 999).name == "shop"
    with pytest.raises(AccessError, match="has expired"):
        knowing(row).check(text, now_ms=NOW + 1000)
    with pytest.raises(AccessError, match="was revoked"):
        knowing(replace(row, revoked_ms=NOW)).check(text, now_ms=NOW + 1)


def test_third_valid_token_of_a_name_is_refused():
    older, old_text = make(lifetime_ms=1000)
    newer, new_text = make(known=[older], seed=1)
    both = knowing(older, newer)
    assert both.check(old_text, now_ms=NOW).name == both.check(new_text, now_ms=NOW).name == "shop"
    with pytest.raises(OperatorError, match="two tokens named shop are valid"):
        make(known=[older, newer], seed=2)
    third, text = make(known=[replace(older, revoked_ms=NOW), newer], seed=2)
    assert knowing(older, newer, third).check(text, now_ms=NOW).name == "shop"


@pytest.mark.parametrize(
    "options, problem",
    [
        pytest.param({"role": "cluster"}, "role 'cluster' is none of", id="the key of the installation"),
        pytest.param({"role": "root"}, "role 'root' is none of viewer, operator, admin, client, broker", id="no role"),
        pytest.param({"name": ""}, "name is empty", id="no name"),
        pytest.param({"subjects": ["a*b"]}, "a \\* stands at the end only", id="pattern"),
        pytest.param({"groups": ["produce:g"]}, None, id="a right means nothing for groups"),
        pytest.param({"lifetime_ms": -1}, "cannot have expired", id="expired before it begins"),
    ],
)
def test_malformed_token_is_refused(options, problem):
    if problem is None:
        make(**options)
        return
    with pytest.raises((OperatorError, InvalidName), match=problem):
        make(**options)


def test_first_admin_token_is_made_once():
    found = first_admin([make()[0]], random_bytes=random.Random(0).randbytes, now_ms=NOW)
    assert found is not None and found[0].id == "first"
    assert knowing(found[0]).check(found[1], now_ms=NOW).role == TokenRole.ADMIN
    for known in (found[0], replace(found[0], revoked_ms=NOW), make(role="admin")[0]):
        assert first_admin([known], random_bytes=random.Random(0).randbytes, now_ms=NOW) is None


def test_every_service_method_has_its_role():
    """Weakness 27: QMQ's port accepts every caller."""
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Metaserver"].methods}
    assert methods == set(RPC_ROLES) and all(RPC_ROLES.values())
