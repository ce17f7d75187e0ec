"""Core. A group's row that is older than its brokers: the database was restored from an old copy.

Brokers write each term down before they act in it, and ignore rows of older terms. So a row that went back is proven by
one broker that reports a newer term; what it has to say again is what all brokers of the group agree on:

    all of them report the same newest term, one as the master, the others as slaves   it gets these roles
    anything else                                                                      an operator decides: AdoptRoles

Either way in a term above all that was reported or given out: the old row may have other copies, or another number that
acknowledge, and a master must not count by one rule while a failover counts by another.

The newest term that any broker of each group ever reported: terms are given out above it.

Whether a database may be served from: it has to have a row of each group whose brokers are registered. A row of a group
is never deleted: RemoveBroker of the last broker leaves one that keeps the term. So a group that a metaserver has in
memory or in its snapshot, and of which the database has no row, proves that this is not the database in which its
brokers were registered, or that it lost them: an empty one, or a copy from before the group was added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from qmq.errors import OperatorError
from qmq.metaserver.model import Broker, BrokerKey, Directory, Group, ReplicaState
from qmq.metaserver.roles.rules import RoleChange
from qmq.types import Role

StateOf = Callable[[Broker], ReplicaState | None]
"""What a broker that is up last reported; None: it is down, or its last report is of another data directory."""


@dataclass(frozen=True, slots=True)
class OldRow:
    """A row that is older than what brokers report."""

    group: Group
    reported: int
    """The newest term that any broker reported."""
    change: RoleChange | None
    """Raises the row above them, with the roles that they agree on; None: they do not."""
    found: str
    remedy: str


def judge(group: Group, reported: int, state_of: StateOf, *, given: int = 0) -> OldRow | None:
    """Hold a row against the newest term that any broker reported; None: the row is no older.

    Args:
        given: the newest one that is known to be given out or promised, whether or not a broker has it.
    """
    if reported <= group.term:
        return None
    said = {broker: state_of(broker) for broker in group.brokers}
    found = (
        f"its row in the database is of term {group.term}, brokers report term {reported}: an old copy of the database"
    )
    master = _newest_master(said, reported)
    if master is not None and all(state is not None and state.term == reported for state in said.values()):
        change = _with_master(group, master, above=max(reported, given))
        return OldRow(group, reported, change, found, "the metaserver raises the row by itself")
    told = ", ".join(_report(broker, state) for broker, state in said.items())
    return OldRow(group, reported, None, f"{found} ({told})", _remedy(group, master, said))


def adopt(group: Group, key: BrokerKey, reported: int, state_of: StateOf, *, given: int = 0) -> RoleChange:
    """Make the broker that an operator names the master, in a term above all that any broker reported, and `given`.

    Raises:
        OperatorError: the row is no older than the brokers; the broker is no part of the group, or down.
    """
    if judge(group, reported, state_of) is None:
        raise OperatorError(
            f"the row of {group.name} is as new as its brokers (term {group.term}); SwapRoles changes roles"
        )
    named = next((broker for broker in group.brokers if broker.key == key), None)
    if named is None:
        raise OperatorError(f"{key} is no broker of {group.name}; ListBrokers names them")
    if state_of(named) is None:
        raise OperatorError(f"{key} is down; start it first, so that it says what it has")
    return _with_master(group, named, above=max(reported, given))


def objection(named: Broker, reported: int, state_of: StateOf) -> str:
    """Say what may be lost if this broker is adopted: it is not the master of the newest term; empty: nothing."""
    state = state_of(named)
    if state is not None and (state.role, state.term) == (Role.MASTER, reported):
        return ""
    return (
        f"{_report(named, state)}, and the newest term is {reported}: another copy may hold messages that this one "
        "lacks. Name the master of the newest term, or repeat with --force=true if no other copy can be started"
    )


def _newest_master(said: dict[Broker, ReplicaState | None], reported: int) -> Broker | None:
    """The one broker that reports to be the master of the newest term."""
    masters = [broker for broker, state in said.items() if state is not None and state.is_master_in(reported)]
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
    if not state.term:
        return f"{broker.key} has no role yet"
    return f"{broker.key} reports {Role(state.role).name.lower()} of term {state.term}"


def _remedy(group: Group, master: Broker | None, said: dict[Broker, ReplicaState | None]) -> str:
    """Name the one command; without a master of the newest term it makes the broker the master that has most.

    Copies that stopped have no part before the row is right, and the row's master does not even report. All of them are
    enough, and of several n - m + 1, as in a failover; that no other master runs, an operator has to know.
    """
    up = {broker: state for broker, state in said.items() if state is not None}
    named = master or max(up, key=lambda broker: up[broker].reach, default=None)
    host, port = named.key if named else ("HOSTNAME", "PORT")
    command = f"qmq AdoptRoles --brokerGroup={group.name} --hostname={host} --servePort={port}"
    command += "" if master else " --force=true"
    down = [str(broker.key) for broker, state in said.items() if state is None]
    if master is None and up and (not down or len(said) > 2 and len(up) > len(said) - group.min_copies):
        return f"{named and named.key} has most of those that report. If no other master runs: {command}"
    if down:
        return f"start {', '.join(down)}: once all agree, the row is raised by itself; if that is impossible: {command}"
    return f"choose the master: {command}"


GROUPS_MAX = 10_000
"""Names of groups that do not exist here: a bound for what brokers with a wrong setting may report."""


class ReportedTerms:
    """Made by the registry. Reports of brokers that are refused count too: the database may have lost them."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._given: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    def note(self, group: str, term: int) -> None:
        """Take in a report; `group` empty: that broker never had a role."""
        if group and term > self._newest.get(group, 0) and (group in self._newest or len(self._newest) < GROUPS_MAX):
            self._newest[group] = term

    def note_rows(self, groups: Iterable[Group]) -> None:
        """Take in rows: their terms were given out, whether or not a broker has got them yet."""
        for group in groups:
            self._given[group.name] = max(group.term, self._given.get(group.name, 0))

    def note_promise(self, group: str, term: int) -> None:
        """Take in that a broker promised to be no part of older terms than this one, which no row may have yet."""
        if group in self._given:
            self._promised[group] = max(term, self._promised.get(group, 0))

    def newest(self, group: str) -> int:
        return self._newest.get(group, 0)

    def given(self, group: str) -> int:
        """The newest that a broker reported or a row had. A promised term above it may be asked for again."""
        return max(self._newest.get(group, 0), self._given.get(group, 0))

    def floor(self, group: str) -> int:
        """A new term is above this."""
        return max(self.given(group), self._promised.get(group, 0))

    def floors(self) -> dict[str, int]:
        return {group: self.floor(group) for group in self._given.keys() | self._newest.keys()}

    def above_rows(self, groups: Mapping[str, Group]) -> list[str]:
        """Names of the groups whose row is older than a report."""
        return [name for name, term in self._newest.items() if name in groups and groups[name].term < term]

    def unknown(self, groups: Iterable[str]) -> dict[str, int]:
        """Groups that brokers report, and that are not among `groups`, with the newest term."""
        known = set(groups)
        return {name: term for name, term in sorted(self._newest.items()) if name not in known}


NAMED_MAX = 3
COMMANDS = (
    "Restore puts a backup into it; AdoptDatabase --keep=memory fills it with what this metaserver has in memory; "
    "AdoptDatabase --keep=database forgets these groups"
)


def registered(directory: Directory) -> frozenset[str]:
    """Groups of which a broker is registered."""
    return frozenset(
        group.name for group in directory.groups.values() if any(broker.incarnation for broker in group.brokers)
    )


def find_lost(known: Collection[str], reported: Mapping[str, int], rows: Collection[str]) -> list[str]:
    """Name the groups that the database has lost.

    Args:
        known: groups that memory or the snapshot has, with registered brokers.
        reported: groups that brokers without a place report, with their term: they count against an empty database.
        rows: names of all groups that the database has a row of, removed ones too.
    """
    return sorted(set(known).difference(rows) | (set(reported) if not rows else set()))


def describe(lost: Collection[str]) -> str:
    """Say what is wrong, and which commands decide."""
    names = sorted(lost)
    listed = ", ".join(names[:NAMED_MAX]) + (f" and {len(names) - NAMED_MAX} more" if names[NAMED_MAX:] else "")
    return (
        f"the database is not used: it has no row of {listed}, whose brokers are registered, so it was emptied or "
        "replaced. What is in memory goes on; changes wait until Restore or AdoptDatabase decides"
    )
