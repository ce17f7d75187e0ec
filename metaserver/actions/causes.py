"""Core. Causes of Doctor's findings. A check that only follows from another one is left out:

all brokers at one address, two or more, do not answer      one finding, about the machine
one broker does not answer                                  one finding, about the broker
a slave answers, and is no whole copy                       one finding, about that slave
its master is readonly for want of a slave                  follows from either
a group is readonly, and a broker of it has a finding follows from that
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any

from qmq.metaserver.model import COPIES_MAX
from qmq.types import MASTERS, Role

FROM_A_SLAVE = frozenset({"slave_down", "slave_lag", "unfilled"})
"""Readonly reasons of a master while its slave does not answer, or is no whole copy."""

Check = dict[str, Any]
"""Result of a check: kind, name, ok, found, remedy, facts."""
Groups = Mapping[str, Sequence[Check]]
"""Checks of the brokers, by broker group."""


class CheckKind(StrEnum):
    """Object of a check: a small fixed set, so it can label a metric."""

    DATABASE = "database"
    MACHINE = "machine"
    BROKER = "broker"
    GROUP = "group"
    LOSS = "loss"
    TOKENS = "tokens"
    PASSWORDS = "passwords"
    ROUTES = "routes"
    METASERVERS = "metaservers"


def one_per_cause(checks: Sequence[Check]) -> list[Check]:
    """Merge Doctor's checks by cause; the facts of brokers include whether the broker `answers`."""
    brokers = [check for check in checks if "answers" in check["facts"]]
    away = [check for check in brokers if not check["facts"]["answers"]]
    lacking = {check["facts"]["group"] for check in away}
    lacking |= {check["facts"]["group"] for check in brokers if _is_troubled_slave(check["facts"])}
    wrong = {check["facts"]["group"] for check in brokers if not check["ok"]}
    causes = {id(cause["of"][0]): cause for cause in _causes(away, brokers)}
    gone, kept = set(map(id, away)), []
    for check in checks:
        if id(check) in gone:
            kept += [causes[id(check)]] if id(check) in causes else []
        elif check["ok"] or not _follows(check, lacking, wrong):
            kept.append(check)
    for cause in causes.values():
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
    causes, machines, groups = [], _by("ip", away), _by("group", brokers)
    at_each = {address: len(at_it) for address, at_it in _by("ip", brokers).items()}
    for address, gone in machines.items():
        if len(gone) > 1 and len(gone) == at_each[address]:
            causes.append(_machine(address, gone, groups))
        else:
            causes += [{**check, "remedy": _remedy(check["facts"], groups), "of": [check]} for check in gone]
    return causes


def _by(fact: str, brokers: Sequence[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in brokers:
        found.setdefault(check["facts"][fact], []).append(check)
    return found


def _machine(address: str, gone: Sequence[Check], groups: Groups) -> Check:
    named = ", ".join(_name(check["facts"]) for check in gone)
    commands = "; ".join(_command(check["facts"], groups) for check in gone)
    return {
        "kind": CheckKind.MACHINE,
        "name": f"{CheckKind.MACHINE} {address}",
        "ok": False,
        "found": f"none of its brokers answers: {named}",
        "remedy": f"start the machine or its brokers, or open its ports; if it is gone for good: {commands}",
        "facts": {"ip": address, "brokers": [check["facts"] for check in gone]},
        "of": gone,
    }


def _remedy(facts: Mapping[str, Any], groups: Groups) -> str:
    gone = f"if it is gone for good: {_command(facts, groups)}"
    if not facts["incarnation"]:
        return f"start it on {facts['ip']}; its log has the reason; {gone}"
    return f"start it on {facts['ip']}, or open its control port to the metaservers; {gone}"


def _command(facts: Mapping[str, Any], groups: Groups) -> str:
    """Return the command that replaces a broker: a slave takes the master's place, a new broker a slave's."""
    role, group = Role[facts["role"]], facts["group"]
    others = [check["facts"] for check in groups[group] if check["facts"] is not facts]
    recover = f"qmq RecoverGroup --brokerGroup={group}"
    if role in MASTERS and not facts["incarnation"]:  # it never had a message
        return f"{recover} --gone={facts['hostname']}:{facts['servePort']}"
    if role in MASTERS:
        if not others:
            lost = f"{recover} --gone={facts['hostname']}:{facts['servePort']}"
            return f"restore its data directory: it was the only copy; if that is lost, too: {lost}"
        answering, least = sum(other["answers"] for other in others), len(others) + 2 - facts["minCopies"]
        if answering >= max(least, 1):  # so many have to promise, as one of them has each acknowledged message
            return f"qmq Failover --brokerGroup={group} --masterGone=true"
        return recover if len(others) > 1 else f"stop the slave, {call_of('ReplaceBroker', role, others[0])} --swap"
    new = {**facts, "hostname": "NEW", "ip": "IP"}
    if len(others) < 2:
        is_last = any(not other["answers"] for other in others)
        return recover if is_last else call_of("ReplaceBroker", role, new)
    if any(Role[other["role"]] in MASTERS and not other["answers"] for other in others):
        return recover
    remove = f"qmq RemoveBroker --hostname={facts['hostname']} --servePort={facts['servePort']}"
    calls = [remove, call_of("AddBroker", role, new)]
    if len(others) < facts["minCopies"] and len(others) + 1 < COPIES_MAX:
        calls.reverse()
    elif len(others) < facts["minCopies"]:  # there is no room for another one
        calls.insert(0, f"qmq SetCopies --brokerGroup={group} --minCopies={len(others)}")
    return ", then ".join(calls)


def call_of(command: str, role: Role, facts: Mapping[str, Any]) -> str:
    """Return a command that gives a broker a role, as text."""
    return (
        f"qmq {command} --brokerGroup={facts['group']} --role={int(role)} --hostname={facts['hostname']} "
        f"--ip={facts['ip']} --servePort={facts['servePort']} --syncPort={facts['syncPort']}"
    )


def _name(facts: Mapping[str, Any]) -> str:
    return f"{facts['hostname']}:{facts['servePort']} ({facts['role']} of {facts['group']})"
