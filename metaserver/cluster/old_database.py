"""Core. Detection of an old or replaced database: rows older than the brokers, and groups without a row.

**Old rows.** Brokers store each term before they act in it, and ignore rows of older terms. One report of a newer term
proves that the row was restored from an older copy. The repair:

    all brokers report one newest term, one of them as the master   the row gets these roles
    anything else                                                   an operator decides: AdoptRoles

The new term is above every reported or assigned one: the old row may list other copies, or require another number of
them, and a master and a failover must count by the same rule.

**Lost groups.** A row of a group is never deleted: RemoveBroker of the last broker leaves one that keeps the term. A
group in memory or in the snapshot without a row proves that the database was emptied or replaced. It is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from qmq.errors import OperatorError
from qmq.metaserver.model import Broker, BrokerKey, Directory, Group, ReplicaState
from qmq.metaserver.roles.rules import RoleChange
from qmq.plain import first_of
from qmq.types import Role

StateOf = Callable[[Broker], ReplicaState | None]
"""Returns the last report of a broker that is up; None: it is down, or reported another data directory."""


@dataclass(frozen=True, slots=True)
class OldRow:
    """Row that is older than brokers' reports."""

    group: Group
    reported: int
    """Newest reported term."""
    change: RoleChange | None
    """Change that raises the row to the roles all brokers agree on; None: they disagree."""
    found: str
    remedy: str


def judge(group: Group, reported: int, state_of: StateOf, *, floor: int = 0) -> OldRow | None:
    """Compare a row with the newest reported term; None: the row is not older.

    Args:
        floor: newest term that was reported, assigned or promised, whether or not a broker received it.
    """
    if reported <= group.term:
        return None
    states = {broker: state_of(broker) for broker in group.brokers}
    found = (
        f"its row in the database is of term {group.term}, brokers report term {reported}: an old copy of the database"
    )
    master = _newest_master(states, reported)
    if master is not None and all(state is not None and state.term == reported for state in states.values()):
        change = _with_master(group, master, above=max(reported, floor))
        return OldRow(group, reported, change, found, "the metaserver raises the row by itself")
    reports = ", ".join(_report(broker, state) for broker, state in states.items())
    return OldRow(group, reported, None, f"{found} ({reports})", _remedy(group, master, states))


def adopt(group: Group, key: BrokerKey, reported: int, state_of: StateOf, *, floor: int = 0) -> RoleChange:
    """Return the change that promotes the broker that an operator names, in a term above every reported one and
    `floor`.

    Raises:
        OperatorError: the row is not older than the brokers; the broker is not of the group, or down.
    """
    if judge(group, reported, state_of) is None:
        raise OperatorError(
            f"the row of {group.name} is as new as its brokers (term {group.term}); SwapRoles changes roles"
        )
    named = next((broker for broker in group.brokers if broker.key == key), None)
    if named is None:
        raise OperatorError(f"{key} is no broker of {group.name}; ListBrokers names them")
    if state_of(named) is None:
        raise OperatorError(f"{key} is down; start it first, so that it reports its log")
    return _with_master(group, named, above=max(reported, floor))


def objection(named: Broker, reported: int, state_of: StateOf) -> str:
    """Return the loss that adopting this broker may cause, as text; empty: it is the master of the newest term."""
    state = state_of(named)
    if state is not None and (state.role, state.term) == (Role.MASTER, reported):
        return ""
    return (
        f"{_report(named, state)}, and the newest term is {reported}: another copy may hold messages that this one "
        "lacks. Name the master of the newest term, or repeat with --force=true if no other copy can be started"
    )


def _newest_master(states: dict[Broker, ReplicaState | None], reported: int) -> Broker | None:
    """Return the broker that reports to be the master of the newest term; None: none, or several."""
    masters = [broker for broker, state in states.items() if state is not None and state.is_master_in(reported)]
    return masters[0] if len(masters) == 1 else None


def _with_master(group: Group, named: Broker, *, above: int) -> RoleChange:
    others = tuple(broker for broker in group.brokers if broker.key != named.key)
    return RoleChange(
        group.name,
        group.term,
        group,
        replace(named, role=Role.MASTER, complete=False),
        tuple(replace(other, role=Role.SLAVE, complete=False) for other in others),
        half_swapped=group.half_swapped and not others,
        above=above,
        min_copies=group.min_copies,
    )


def _report(broker: Broker, state: ReplicaState | None) -> str:
    if state is None:
        return f"{broker.key} is down"
    report = f"reports {Role(state.role).name.lower()} of term {state.term}" if state.term else "has no role yet"
    stored = f" and has stored term {state.known_term}" if state.known_term > state.term > 0 else ""
    return f"{broker.key} {report}{stored}"


def _remedy(group: Group, master: Broker | None, states: dict[Broker, ReplicaState | None]) -> str:
    """Return the command that repairs the row. Without a master of the newest term it promotes the longest copy.

    Restarted copies have no role before the row is right, and the row's master may not report. Reports of all copies,
    or of n - m + 1 of several, are enough, as in a failover. The operator must make sure that no other master runs.
    """
    up = {broker: state for broker, state in states.items() if state is not None}
    named = master or max(up, key=lambda broker: up[broker].reach, default=None)
    host, port = named.key if named else ("HOSTNAME", "PORT")
    command = f"qmq AdoptRoles --brokerGroup={group.name} --hostname={host} --servePort={port}"
    command += "" if master else " --force=true"
    down = [str(broker.key) for broker, state in states.items() if state is None]
    if master is None and up and (not down or len(states) > 2 and len(up) > len(states) - group.min_copies):
        return f"{named and named.key} has the longest log of those that report. If no other master runs: {command}"
    if down:
        return f"start {', '.join(down)}: once all agree, the row is raised by itself; if that is impossible: {command}"
    return f"choose the master: {command}"


GROUPS_MAX = 10_000
"""Bound for names of unknown groups that misconfigured brokers may report."""


class ReportedTerms:
    """Newest terms by group, from reports, rows and promises; new terms are above them. Made by the registry.

    Reports of rejected brokers count too: the database may have lost them.
    """

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}
        self._assigned: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    def note(self, group: str, term: int) -> None:
        """Record a reported term; an empty `group`: that broker never had a role."""
        if (
            group
            and term > self._reported.get(group, 0)
            and (group in self._reported or len(self._reported) < GROUPS_MAX)
        ):
            self._reported[group] = term

    def note_rows(self, groups: Iterable[Group]) -> None:
        """Record the terms of rows: they were assigned, whether or not a broker received them."""
        for group in groups:
            self._assigned[group.name] = max(group.term, self._assigned.get(group.name, 0))

    def note_promise(self, group: str, term: int) -> None:
        """Record a promise to follow no master of an older term; a row of that term may not exist yet."""
        if group in self._assigned:
            self._promised[group] = max(term, self._promised.get(group, 0))

    def reported(self, group: str) -> int:
        return self._reported.get(group, 0)

    def used(self, group: str) -> int:
        """Return the newest reported or assigned term. A promised term above it may be promised again."""
        return max(self._reported.get(group, 0), self._assigned.get(group, 0))

    def floor(self, group: str) -> int:
        """Return the term that every new term exceeds."""
        return max(self.used(group), self._promised.get(group, 0))

    def floors(self) -> dict[str, int]:
        return {group: self.floor(group) for group in self._assigned.keys() | self._reported.keys()}

    def above_rows(self, groups: Mapping[str, Group]) -> list[str]:
        """Return the names of groups with a row older than a report."""
        return [name for name, term in self._reported.items() if name in groups and groups[name].term < term]

    def unknown(self, groups: Iterable[str]) -> dict[str, int]:
        """Return reported groups that are not among `groups`, with their newest term."""
        known = set(groups)
        return {name: term for name, term in sorted(self._reported.items()) if name not in known}


COMMANDS = (
    "Restore puts a backup into it; AdoptDatabase --keep=memory fills it from this metaserver's memory; "
    "AdoptDatabase --keep=database forgets these groups"
)


def registered(directory: Directory) -> frozenset[str]:
    """Return the names of groups with a registered broker."""
    return frozenset(
        group.name for group in directory.groups.values() if any(broker.incarnation for broker in group.brokers)
    )


def find_lost(known: Collection[str], reported: Mapping[str, int], rows: Collection[str]) -> list[str]:
    """Return the groups that the database has lost.

    Args:
        known: groups with registered brokers, in memory or in the snapshot.
        reported: groups that unknown brokers report, with their term; they count against an empty database.
        rows: names of all groups that the database has a row of, removed ones too.
    """
    return sorted(set(known).difference(rows) | (set(reported) if not rows else set()))


def describe(lost: Collection[str]) -> str:
    """Return the problem and the commands that decide, as text."""
    return (
        f"the database is not used: it was emptied or replaced, as it has no row of {first_of(sorted(lost))} and their "
        "brokers are registered. Memory still answers; changes wait until Restore or AdoptDatabase decides"
    )
