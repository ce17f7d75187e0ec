"""Core. One finding for each cause: what only follows from another of Doctor's checks is left out.

all brokers at one address, two or more, do not answer      one finding, about the machine
one broker does not answer                                  one finding, about the broker
a slave answers, and is no whole copy                       one finding, about that slave
its master is readonly for want of a slave                  follows from either
a group takes no messages, and a broker of it has a finding follows from that
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qmq.types import MASTERS, Role

FROM_A_SLAVE = frozenset({"slave_down", "slave_lag", "unfilled"})
"""Reasons to be readonly that a master has because its slave does not answer, or is no whole copy."""

Check = dict[str, Any]


def one_per_cause(checks: Sequence[Check]) -> list[Check]:
    """Merge checks as `Doctor` makes them; those of brokers say among their facts whether the broker `answers`."""
    brokers = [check for check in checks if "answers" in check["facts"]]
    away = [check for check in brokers if not check["facts"]["answers"]]
    lacking = {check["facts"]["group"] for check in brokers if check in away or _is_troubled_slave(check["facts"])}
    wrong = {check["facts"]["group"] for check in brokers if not check["ok"]}
    causes = _causes(away, brokers)
    kept = []
    for check in checks:
        if check in away:
            kept += [cause for cause in causes if cause["of"][0] is check]
        elif check["ok"] or not _follows(check, lacking, wrong):
            kept.append(check)
    for cause in causes:
        del cause["of"]
    return kept


def _is_troubled_slave(facts: Mapping[str, Any]) -> bool:
    return facts["role"] in ("SLAVE", "DELAY_SLAVE") and bool(facts.get("reasons"))


def _follows(check: Check, lacking: Collection[str], wrong: Collection[str]) -> bool:
    facts = check["facts"]
    if reasons := frozenset(facts.get("reasons", ())):
        return reasons <= FROM_A_SLAVE and facts["group"] in lacking and not _is_troubled_slave(facts)
    return bool(facts.get("takesNothing")) and facts["group"] in wrong


def _causes(away: Sequence[Check], brokers: Sequence[Check]) -> list[Check]:
    causes, machines = [], dict[str, list[Check]]()
    for check in away:
        machines.setdefault(check["facts"]["ip"], []).append(check)
    for address, gone in machines.items():
        at_it = [check for check in brokers if check["facts"]["ip"] == address]
        if len(gone) > 1 and len(gone) == len(at_it):
            causes.append(_machine(address, gone, brokers))
        else:
            causes += [{**check, "remedy": _remedy(check["facts"], brokers), "of": [check]} for check in gone]
    return causes


def _machine(address: str, gone: Sequence[Check], brokers: Sequence[Check]) -> Check:
    named = ", ".join(_name(check["facts"]) for check in gone)
    commands = "; ".join(_command(check["facts"], brokers) for check in gone)
    return {
        "name": f"machine {address}",
        "ok": False,
        "found": f"none of its brokers answers: {named}",
        "remedy": f"start the machine or its brokers, or open its ports; if it is gone for good: {commands}",
        "facts": {"ip": address, "brokers": [check["facts"] for check in gone]},
        "of": gone,
    }


def _remedy(facts: Mapping[str, Any], brokers: Sequence[Check]) -> str:
    if not facts["incarnation"]:
        return f"start it on {facts['ip']}; its log says what keeps it"
    return (
        f"start it on {facts['ip']}, or open its control port to the metaservers; if it is gone for good: "
        f"{_command(facts, brokers)}"
    )


def _command(facts: Mapping[str, Any], brokers: Sequence[Check]) -> str:
    """What puts another broker in its place: a slave in the master's, a new one in a slave's."""
    role, group = Role[facts["role"]], facts["group"]
    others = [one["facts"] for one in brokers if one["facts"]["group"] == group and one["facts"] is not facts]
    recover = f"tools.sh RecoverGroup --brokerGroup={group}"
    if role in MASTERS:
        if not others:
            return "restore its data directory: it was the only copy"
        if any(one["answers"] for one in others):
            return f"tools.sh Failover --brokerGroup={group} --masterGone=true"
        return recover if len(others) > 1 else f"stop the slave, {_call('ReplaceBroker', role, others[0])} --swap"
    new = {**facts, "hostname": "NEW", "ip": "IP"}
    if len(others) < 2:
        is_last = any(not one["answers"] for one in others)
        return recover if is_last else _call("ReplaceBroker", role, new)
    if any(Role[one["role"]] in MASTERS and not one["answers"] for one in others):
        return recover
    remove = f"tools.sh RemoveBroker --hostname={facts['hostname']} --servePort={facts['servePort']}"
    calls = [remove, _call("AddBroker", role, new)]
    return ", then ".join(calls if len(others) >= facts["minCopies"] else reversed(calls))


def _call(command: str, role: Role, facts: Mapping[str, Any]) -> str:
    return (
        f"tools.sh {command} --brokerGroup={facts['group']} --role={int(role)} --hostname={facts['hostname']} "
        f"--ip={facts['ip']} --servePort={facts['servePort']} --syncPort={facts['syncPort']}"
    )


def _name(facts: Mapping[str, Any]) -> str:
    return f"{facts['hostname']}:{facts['servePort']} ({facts['role']} of {facts['group']})"
