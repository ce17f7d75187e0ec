"""Core. Doctor's checks: one finding for each cause."""

from __future__ import annotations

from qmq.metaserver.actions import causes
from qmq.metaserver.actions.causes import CheckKind, one_per_cause


def broker(name, group, role, ip, *, ok=True, answers=True, found="up", reasons=(), incarnation="disk", min_copies=2):
    facts = {
        "group": group,
        "role": role,
        "hostname": name,
        "ip": ip,
        "servePort": 1,
        "syncPort": 2,
        "answers": answers,
        "reasons": list(reasons),
        "incarnation": incarnation,
        "minCopies": min_copies,
    }
    return {"kind": CheckKind.BROKER, "name": f"broker {name}", "ok": ok, "found": found, "remedy": "", "facts": facts}


def group(name, *, ok=True):
    facts = {} if ok else {"group": name, "takesNothing": True}
    return {"kind": CheckKind.GROUP, "name": f"group {name}", "ok": ok, "found": "", "remedy": "", "facts": facts}


def away(name, group, role, ip, **more):
    return broker(name, group, role, ip, ok=False, answers=False, found="did not answer", **more)


def wrong(checks):
    return {check["name"]: check for check in one_per_cause(checks) if not check["ok"]}


def test_absent_slave_is_the_only_finding():
    master = broker("a", "g1", "MASTER", "10.0.0.1", ok=False, reasons=["slave_down"])
    found = wrong(
        [
            master,
            away("b", "g1", "SLAVE", "10.0.0.2"),
            broker("c", "g2", "SLAVE", "10.0.0.2"),
            group("g1", ok=False),
            group("g2"),
        ]
    )
    assert list(found) == ["broker b"]
    remedy = found["broker b"]["remedy"]
    assert "start it on 10.0.0.2" in remedy
    assert "qmq ReplaceBroker --brokerGroup=g1 --role=1 --hostname=NEW --ip=IP --servePort=1 --syncPort=2" in remedy


def test_absent_master_is_shown_with_the_failover():
    found = wrong(
        [away("a", "g1", "MASTER", "10.0.0.1"), broker("b", "g1", "SLAVE", "10.0.0.2"), group("g1", ok=False)]
    )
    assert list(found) == ["broker a"]
    assert "qmq Failover --brokerGroup=g1 --masterGone=true" in found["broker a"]["remedy"]


def test_slave_without_master_may_be_the_last_copy():
    found = wrong([away("a", "g1", "MASTER", "10.0.0.1"), away("b", "g1", "SLAVE", "10.0.0.2"), group("g1", ok=False)])
    assert "qmq RecoverGroup --brokerGroup=g1" in found["broker b"]["remedy"]
    assert "ReplaceBroker" in found["broker a"]["remedy"] and "ReplaceBroker" not in found["broker b"]["remedy"]


def test_lost_machine_is_one_finding():
    checks = [
        away("a", "g1", "MASTER", "10.0.0.1"),
        broker("b", "g1", "SLAVE", "10.0.0.2"),
        away("d", "d1", "DELAY_SLAVE", "10.0.0.1"),
        broker("e", "d1", "DELAY_MASTER", "10.0.0.3"),
        group("g1", ok=False),
        group("d1", ok=False),
    ]
    found = wrong(checks)
    assert list(found) == ["machine 10.0.0.1"]
    machine = found["machine 10.0.0.1"]
    assert "a:1 (MASTER of g1), d:1 (DELAY_SLAVE of d1)" in machine["found"] and "--role=6" in machine["remedy"]
    assert "of" not in machine


def test_independent_findings_stay():
    disk = broker("a", "g1", "MASTER", "10.0.0.1", ok=False, reasons=["disk"])
    found = wrong(
        [
            disk,
            away("b", "g1", "SLAVE", "10.0.0.2"),
            broker("c", "g2", "MASTER", "10.0.0.2"),
            group("g1", ok=False),
            group("g2", ok=False),
        ]
    )
    assert set(found) == {"broker a", "broker b", "group g2"}


def test_rolled_back_slave_is_the_only_finding():
    master = broker("a", "g1", "MASTER", "10.0.0.1", ok=False, reasons=["slave_down"])
    slave = broker("b", "g1", "SLAVE", "10.0.0.2", ok=False, found="is no whole copy", reasons=["rolled_back"])
    assert list(wrong([master, slave, group("g1", ok=False)])) == ["broker b"]


def test_unregistered_broker_is_started_or_replaced():
    alone = wrong([away("a", "g1", "MASTER", "10.0.0.1"), group("g1", ok=False)])
    assert "RecoverGroup --brokerGroup=g1 --gone=a:1" in alone["broker a"]["remedy"]
    found = wrong([away("a", "g1", "MASTER", "10.0.0.1", incarnation=""), group("g1", ok=False)])
    assert list(found) == ["broker a"] and "its log" in found["broker a"]["remedy"]
    assert "RecoverGroup --brokerGroup=g1 --gone=a:1" in found["broker a"]["remedy"]
    slave = away("b", "g1", "SLAVE", "10.0.0.2", incarnation="")
    remedy = wrong([broker("a", "g1", "MASTER", "10.0.0.1"), slave])["broker b"]["remedy"]
    assert "its log" in remedy and "ReplaceBroker --brokerGroup=g1 --role=1 --hostname=NEW" in remedy


# Three copies.


def of_three(*gone, min_copies=2):
    """Findings about a (the master), b and c, each on a machine of its own."""
    parts = {"a": "MASTER", "b": "SLAVE", "c": "SLAVE"}
    checks = [
        (away if name in gone else broker)(name, "g1", role, f"10.0.0.{at}", min_copies=min_copies)
        for at, (name, role) in enumerate(parts.items())
    ]
    return {name: check["remedy"] for name, check in wrong([*checks, group("g1", ok=False)]).items()}


def test_remedies_for_three_copies():
    found = of_three("a")
    assert "Failover --brokerGroup=g1 --masterGone=true" in found["broker a"]
    (remedy,) = of_three("c").values()
    assert "RemoveBroker --hostname=c --servePort=1, then qmq AddBroker --brokerGroup=g1 --role=1" in remedy
    (remedy,) = of_three("c", min_copies=3).values()
    assert remedy.index("AddBroker") < remedy.index("RemoveBroker"), "otherwise too few copies remain"


def test_full_group_lowers_min_copies_first(monkeypatch):
    """AddBroker refuses more copies than the maximum, and RemoveBroker fewer than acknowledge."""
    monkeypatch.setattr(causes, "COPIES_MAX", 3)
    (remedy,) = of_three("c", min_copies=3).values()
    assert "SetCopies --brokerGroup=g1 --minCopies=2, then qmq RemoveBroker --hostname=c" in remedy
    assert "SetCopies" not in of_three("c")["broker c"]


def test_without_master_recovery_is_the_remedy():
    """With a and c away, b alone cannot promise: a Failover would only be refused."""
    found = of_three("a", "c")
    assert all("RecoverGroup --brokerGroup=g1" in remedy and "Failover" not in remedy for remedy in found.values())
    assert "Failover --brokerGroup=g1" in of_three("a", "c", min_copies=3)["broker a"], "each copy has everything"
    assert all("RecoverGroup --brokerGroup=g1" in remedy for remedy in of_three("a", "b", "c").values())
