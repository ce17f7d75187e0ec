"""Core. Changes of what a broker group is used for, of which consumers are switched off, and of what is limited."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.model import ALL_SUBJECTS, DELAY, Directory, Offline, ReadonlyMark, Routes
from qmq.metaserver.routes.dead_letters import why_not, wider_routes
from qmq.metaserver.storage.changes import (
    Change,
    DecidedOn,
    SetGroupState,
    SetLimits,
    SetMark,
    SetOffline,
    UnsetMark,
    UnsetOffline,
)
from qmq.operator_limits import OperatorLimits
from qmq.rights import CONSUME, PRODUCE
from qmq.subjects import real_subject

DROP, DEAD_LETTER = "drop", "deadLetter"
"""What becomes of messages that expire."""
REFUSE, DROP_OLDEST = "refuse", "dropOldest"
"""What happens when as many messages wait as may."""


def mark_readonly(directory: Directory, routes: Routes, subject: str, group: str, *, readonly: bool) -> Plan:
    """Keep producers of a subject, or all, away from a group; or let them use it again."""
    if group not in directory.groups:
        return refused(_no_group(group))
    mark = ReadonlyMark(subject, group)
    is_set = mark in directory.marks
    is_known = subject == ALL_SUBJECTS or subject in routes or subject in directory.subjects
    if not is_known and not is_set:  # the mark of a subject that was removed is still to be got rid of
        return refused(f"no subject {subject} is known; ListSubjectRoutes names them")
    change = SetMark(mark) if readonly else UnsetMark(mark)
    marked = directory.readonly_subjects(group)
    after = sorted({*marked, subject} if readonly else {*marked} - {subject})
    takes_any = directory.groups[group].kind == DELAY
    subjects = frozenset({subject}) if takes_any else served(routes, group, subject)
    return Plan(
        (change,) if is_set != readonly else (),
        subjects=subjects,
        groups=frozenset({group}),
        before={"readonlySubjects": marked},
        after={"readonlySubjects": after},
        data={"result": "success", "subject": subject, "brokerGroup": group, "readonlySubjects": after},
    )


def stranded(directory: Directory, routes: Routes, group: str, subjects: Iterable[str]) -> list[str]:
    """Subjects whose producers have nowhere to go while they keep away from `group`."""

    def is_open(name: str, subject: str) -> bool:
        other = directory.groups.get(name)
        return other is not None and name != group and not other.draining and not directory.is_marked(name, subject)

    delay_groups = directory.groups_of(DELAY)
    if group in delay_groups:
        return sorted(subject for subject in subjects if not any(is_open(name, subject) for name in delay_groups))
    return sorted(
        subject
        for subject in subjects
        if subject in routes and not any(is_open(name, subject) for name in routes[subject].groups)
    )


def set_draining(directory: Directory, routes: Routes, group: str, *, draining: bool) -> Plan:
    """Give a group no new subjects and no producers; or take that back."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    refusals = []
    alike = directory.groups_of(known.kind)
    others = [name for name, other in alike.items() if name != group and other.master and not other.draining]
    if draining and not others:
        what = "delayed messages" if known.kind == DELAY else "messages"
        refusals.append(f"no other group would be left to take {what}: {group} is the only one that is not drained")
    change = SetGroupState(group, draining=draining)
    changes = (DecidedOn(directory.version), change) if draining else (change,)  # else two could drain the last two
    return Plan(
        changes if known.draining != draining else (),
        refusals=tuple(refusals),
        subjects=served(routes, group, ALL_SUBJECTS),
        groups=frozenset({group}),
        before={"draining": known.draining},
        after={"draining": draining},
        data={"brokerGroup": group, "draining": draining},
    )


def set_tag(directory: Directory, group: str, tag: str) -> Plan:
    """Set a group's tag. Routes that exist stay; the tag counts when a subject gets its route."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    if known.kind == DELAY:
        return refused(
            f"{group} is a group of delay servers: each takes delayed messages of any subject, whose tag no matter"
        )
    return Plan(
        (SetGroupState(group, tag=tag),) if known.tag != tag else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"tag": known.tag},
        after={"tag": tag},
        data={"brokerGroup": group, "tag": tag},
    )


def set_failover(directory: Directory, group: str, failover: str) -> Plan:
    """Say whether a group fails over by itself; `failover` is `on`, `off` or `default`."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    return Plan(
        (SetGroupState(group, failover=failover),) if known.failover != failover else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"failover": known.failover},
        after={"failover": failover},
        data={"brokerGroup": group, "failover": failover},
    )


def acknowledge_loss(directory: Directory, group: str) -> Plan:
    """Say no more that an operator accepted a loss; the audit trail keeps it."""
    known = directory.groups.get(group)
    if known is None:
        return refused(_no_group(group))
    return Plan(
        (DecidedOn(directory.version), SetGroupState(group, lost_term=0)) if known.lost_term else (),
        groups=frozenset({group}),
        whole_groups=True,
        before={"lostTerm": known.lost_term},
        after={"lostTerm": 0},
        data={"brokerGroup": group, "lostTerm": known.lost_term},
    )


def switch_consumers(directory: Directory, routes: Routes, rule: Offline, *, offline: bool) -> Plan:
    """Switch consumers off or on.

    Switching all consumers of a subject and group on ends the rules for single ones too, as QMQ does it.
    """
    route = routes.get(real_subject(rule.subject))
    ended = [] if offline else sorted(other for other in directory.offline if _covers(rule, other))
    changes: list[Change] = [UnsetOffline(other) for other in ended]
    if offline and rule not in directory.offline:
        changes.append(SetOffline(rule))
    after = sorted(directory.offline - set(ended) | ({rule} if offline else set()))
    still = [] if offline else [other for other in after if _includes(other, rule)]
    return Plan(
        tuple(changes),
        refusals=tuple(f"they stay off by the rule {_rule(other)}; end that one" for other in still),
        subjects=frozenset({rule.subject}) - {ALL_SUBJECTS},
        groups=frozenset(route.groups if route else ()),
        everything=rule.subject == ALL_SUBJECTS,
        before=[offline_json(other) for other in sorted(directory.offline) if other.subject == rule.subject],
        after=[offline_json(other) for other in after if other.subject == rule.subject],
        data={**offline_json(rule), "state": "offline" if offline else "online", "rules": len(changes)},
    )


def offline_json(rule: Offline) -> dict[str, str]:
    return {"subject": rule.subject, "consumerGroup": rule.group, "clientId": rule.consumer}


def limit(directory: Directory, routes: Routes, after: OperatorLimits) -> Plan:
    """Put limits in the place of those of the same subject and consumer group."""
    before, others = limits_of(directory, after.key), [one for one in directory.limits if one.key != after.key]
    to = after.dead_letters_to if after.dead_letters_to != before.dead_letters_to else ""
    if to and (reasons := why_not([*others, after], routes, after)):
        return refused(*reasons)
    route = routes.get(real_subject(after.subject))
    # Else two could make a circle, or one undo what the other set beside it.
    changes: tuple[Change, ...] = (DecidedOn(directory.version), SetLimits(after), *wider_routes([after], routes))
    return Plan(
        changes if after != before else (),
        subjects=frozenset({after.subject, to} if to else {after.subject}),
        groups=frozenset(route.groups if route else ()),
        needs=((CONSUME, after.subject), (PRODUCE, to)) if to else (),
        before=limits_json(before),
        after=limits_json(after),
        data=limits_json(after),
    )


def limits_of(directory: Directory, key: tuple[str, str]) -> OperatorLimits:
    return next((one for one in directory.limits if one.key == key), OperatorLimits(*key))


def limits_json(limits: OperatorLimits) -> dict[str, Any]:
    return {
        "subject": limits.subject,
        "group": limits.group,
        "expiresAfterS": limits.expires_after_s,
        "expired": DEAD_LETTER if limits.expired_die else DROP,
        "messagesMax": limits.messages_max,
        "whenFull": DROP_OLDEST if limits.drops_oldest else REFUSE,
        "perSecond": limits.per_second,
        "bytesMax": limits.bytes_max,
        "deadLettersTo": limits.dead_letters_to,
    }


def served(routes: Routes, group: str, subject: str) -> frozenset[str]:
    """Subjects that a group serves: one of them, or all."""
    if subject != ALL_SUBJECTS:
        return frozenset({subject})
    return frozenset(route.subject for route in routes.values() if group in route.groups)


def _covers(wide: Offline, narrow: Offline) -> bool:
    """Whether a rule is about the same subject and group as another, and at least the same consumers."""
    return wide[:2] == narrow[:2] and wide.consumer in (ALL_SUBJECTS, narrow.consumer)


def _includes(wide: Offline, narrow: Offline) -> bool:
    """Whether all that one rule switches off is switched off by the other, too."""
    return all(part in (ALL_SUBJECTS, other) for part, other in zip(wide, narrow, strict=True))


def _rule(rule: Offline) -> str:
    return f"subject={rule.subject} consumerGroup={rule.group} clientId={rule.consumer}"


def _no_group(group: str) -> str:
    return f"there is no broker group {group}; ListBrokerGroups names them"
