"""Core. Rules of promotion: whether a slave may become the master because the master is gone, and which one.

A promotion must not lose acknowledged messages nor take back answers. It cannot create two active masters, whichever
slave is promoted: the old master cannot acknowledge without the slaves that promised, and they reject the old epoch. So
a wrong guess about the old master costs availability only; `tests/model` promotes at any moment. The conditions are two
tables, checked from the top:

    the row        has a master and a slave, is as new as every broker's report, and no ReplaceBroker is half done
    in sync        by the master's last report: as many slaves as an acknowledgement needs
    each slave     is up, with the row's disk and term; was in sync, by the row if all copies acknowledge, and by its
                   own report since its process began; was not rolled back, is not damaged
    enough         of n copies, m of which acknowledge, n - m + 1 slaves fulfil that: one of them has everything
    complete       the longest copy ends behind every known acknowledged point

Keeps I13, I16, I25. docs/decisions/0041-failover.md and 0043 give the reason for each rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from qmq.errors import OperatorError
from qmq.metaserver.model import Broker, BrokerKey, Group, Points, ReplicaState, part
from qmq.metaserver.roles import rules
from qmq.metaserver.roles.rules import RoleChange
from qmq.metaserver.storage.changes import Change, RememberPoint, SetRoles
from qmq.replication.identity import Point
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role


class Refusal(StrEnum):
    """Reason why no slave is promoted: label of the metric, and begin of operators' message."""

    NO_SLAVE = "no_slave"
    HALF_SWAPPED = "half_swapped"
    OLD_ROW = "old_row"
    SLAVE_DOWN = "slave_down"
    OTHER_DISK = "other_disk"
    OTHER_TERM = "other_term"
    NEVER_IN_SYNC = "never_in_sync"
    NOT_IN_SYNC_AT_THE_END = "not_in_sync_at_the_end"
    NOT_IN_SYNC_SINCE_START = "not_in_sync_since_start"
    ROLLED_BACK = "rolled_back"
    DAMAGED = "damaged"
    BEHIND = "behind"
    HEARS_ITS_MASTER = "hears_its_master"
    NOT_STORED = "not_stored"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a group without its master."""

    group: Group
    reported_term: int
    """Newest term that a broker of the group reported."""
    used_term: int
    """Newest term that was ever reported or assigned."""
    master_state: ReplicaState | None
    """Master's last report; None: unknown."""
    slave_states: Mapping[BrokerKey, ReplicaState]
    """Current answers of slaves; silent ones are missing."""
    points: Points
    unwilling: Mapping[BrokerKey, str] = field(default_factory=dict)
    """Slaves that refused to promise, with their reason: connected to the master, or incomplete."""
    master_gone: bool = False
    """The operator declares that the master never returns. Acks that it answered alone may then be taken back, and
    slaves may have restarted: only the operator can exclude that their disks were restored to an older state.
    """

    @property
    def new_term(self) -> int:
        """Term that slaves promise and the row gets: above every assigned one, and no lower than a promised one.

        A promised term without a promotion is promised again, because pull sequences have only 16 bits for the term.
        """
        promised = (state.promised_term for state in self.slave_states.values())
        return max(self.group.term + 1, self.used_term + 1, *promised)

    @property
    def promises_needed(self) -> int:
        """Number of slaves that share at least one copy with every set of copies that may have acknowledged."""
        return len(self.group.brokers) - self.group.min_copies + 1

    @property
    def eligible(self) -> list[Broker]:
        """Slaves that fulfil every condition."""
        return [slave for slave in self.group.slaves if slave_refusal(self, slave) is None]

    @property
    def best(self) -> Broker:
        """Slave with the longest log; among several, one with a correct clock.

        Fails without an eligible slave.
        """
        states = self.slave_states
        return max(self.eligible, key=lambda slave: (states[slave.key].reach, not states[slave.key].clock_off_s))

    @property
    def best_state(self) -> ReplicaState:
        return self.slave_states[self.best.key]

    @property
    def newest_point(self) -> Point | None:
        """Newest acknowledged point, without losses that an operator accepted."""
        points = self.points.by_incarnation.values()
        accepted = self.points.loss_accepted_term
        return max((point for point in points if point.epoch.term >= accepted), default=None)


@dataclass(frozen=True, slots=True)
class SlaveFacts:
    """Facts about one slave."""

    all: Facts
    slave: Broker

    @property
    def answer(self) -> ReplicaState | None:
        return self.all.slave_states.get(self.slave.key)

    @property
    def report(self) -> ReplicaState:
        assert self.answer is not None, "asked behind SLAVE_DOWN only"
        return self.answer


CONDITIONS: tuple[tuple[Refusal, Callable[[Facts], bool], str], ...] = (
    (
        Refusal.NO_SLAVE,
        lambda f: f.group.master is None or not f.group.slaves,
        "it has no master, or no slave",
    ),
    (Refusal.HALF_SWAPPED, lambda f: f.group.half_swapped, "it is half swapped"),
    (Refusal.OLD_ROW, lambda f: f.reported_term > f.group.term, "its row is older than its brokers' reports"),
    (
        Refusal.NOT_IN_SYNC_AT_THE_END,
        lambda f: not f.master_gone and not _were_in_sync_at_the_end(f),
        "too few slaves were in sync when its master reported last",
    ),
)
"""Reasons against a promotion in this group: the refusal, its test, its text. `BEHIND` is tested last, as it needs the
best slave.
"""

SLAVE_CONDITIONS: tuple[tuple[Refusal, Callable[[SlaveFacts], bool], str], ...] = (
    (Refusal.SLAVE_DOWN, lambda s: s.answer is None, "is down, too"),
    (Refusal.OTHER_DISK, lambda s: not _is_disk_of_row(s), "came with another data directory"),
    (
        Refusal.OTHER_TERM,
        lambda s: (s.report.role, s.report.term) != (Role.SLAVE, s.all.group.term),
        "has not followed the master of this term",
    ),
    (
        Refusal.NEVER_IN_SYNC,
        lambda s: not s.slave.complete and len(s.all.group.brokers) == s.all.group.min_copies,
        "was never in sync",
    ),
    (
        Refusal.NOT_IN_SYNC_SINCE_START,
        lambda s: not s.report.in_sync and not _was_in_sync_before(s),
        "has not been in sync since its process began",
    ),
    (
        Refusal.ROLLED_BACK,
        lambda s: Reason.ROLLED_BACK in s.report.readonly_reasons,
        "was rolled back and lacks acknowledged messages",
    ),
    (
        Refusal.DAMAGED,
        lambda s: bool({Reason.CORRUPT, Reason.DIVERGED} & set(s.report.readonly_reasons)),
        "has a copy that is damaged, or differs from the master's",
    ),
)
BEHIND = "no slave has every acknowledged message"
NOT_STORED = "the change of roles could not be stored"

_START = "start the master, {master}; if it never returns: "
_GONE = _START + "qmq Failover --brokerGroup={group} --masterGone=true"
_RECOVER = _START + "qmq RecoverGroup --brokerGroup={group} --gone={master}"
REMEDIES: Mapping[Refusal, str] = {
    **dict.fromkeys(Refusal, _RECOVER),
    Refusal.NO_SLAVE: "AddBroker adds a slave; messages of the master's disk return with that disk only",
    Refusal.HALF_SWAPPED: "finish the swap with ReplaceBroker --role={slave_role}",
    Refusal.OLD_ROW: "Doctor shows the AdoptRoles command that decides",
    Refusal.SLAVE_DOWN: (
        "start slaves, or the master, {master}; if some never return: qmq RecoverGroup --brokerGroup={group} --gone=…"
    ),
    Refusal.NOT_IN_SYNC_AT_THE_END: _GONE,
    Refusal.NOT_IN_SYNC_SINCE_START: _GONE,
    Refusal.HEARS_ITS_MASTER: "the master runs: check the network between it and the metaservers",
    Refusal.NOT_STORED: "start the database",
}
"""Remedy of each refusal; `remedy_of` fills in the names."""
LAST_RESORT = (
    "qmq RecoverGroup --brokerGroup={group} --gone={master} --dry-run names the copy with most messages; stop it, "
    "and make it the master: qmq ReplaceBroker --brokerGroup={group} --role={master_role} --acceptLoss=true"
)
"""Text in place of waiting for the master, if it never returns."""


class NoFailover(OperatorError):
    """A condition is not fulfilled. Nothing was changed; the text holds the remedy."""

    def __init__(self, why: Refusal, found: str, facts: Facts) -> None:
        self.why = why
        self.found = found
        remedy = remedy_of(why, facts.group, master_gone=facts.master_gone)
        super().__init__(f"no failover of {facts.group.name}: {found}. {remedy}")


def remedy_of(why: Refusal, group: Group, *, master_gone: bool = False) -> str:
    """Return the remedy of a refusal; `master_gone` is as in `Facts`."""
    text = LAST_RESORT if master_gone and REMEDIES[why] in (_GONE, _RECOVER) else REMEDIES[why]
    if master_gone and why == Refusal.HEARS_ITS_MASTER:
        text = f"If the master answers its slave: {text}. If a copy is incomplete: {LAST_RESORT}"
    return text.format(
        group=group.name,
        master=group.master.key if group.master else "",
        master_role=int(part(Role.MASTER, group.kind)),
        slave_role=int(part(Role.SLAVE, group.kind)),
    )


def require(facts: Facts) -> None:
    """Raise NoFailover if a condition is not fulfilled."""
    if refused := refusal(facts):
        raise NoFailover(*refused, facts)


def refusal(facts: Facts) -> tuple[Refusal, str] | None:
    """Return the first unfulfilled condition, with a sentence for operators; None: all are fulfilled."""
    found = next(((why, text) for why, applies, text in CONDITIONS if applies(facts)), None)
    if found is None:
        found = _too_few(facts)
    if found is None and _is_behind(facts):
        found = Refusal.BEHIND, BEHIND
    return found


def slave_refusal(facts: Facts, slave: Broker) -> tuple[Refusal, str] | None:
    """Return a slave's first unfulfilled condition, with its text; None: all are fulfilled."""
    if words := facts.unwilling.get(slave.key):
        return Refusal.HEARS_ITS_MASTER, f"does not: {words}"
    slave_facts = SlaveFacts(facts, slave)
    return next(((why, text) for why, applies, text in SLAVE_CONDITIONS if applies(slave_facts)), None)


def choose(facts: Facts) -> RoleChange:
    """Return the change that promotes the best slave. Only without a refusal.

    The old master becomes a slave. Its frames without enough confirmations are cut when the two connect, so it counts
    as incomplete.
    """
    assert refusal(facts) is None
    change = rules.swap_roles(facts.group, term=facts.group.term, to=facts.best.key)
    slaves = tuple(replace(slave, complete=False) for slave in change.slaves)
    return replace(change, slaves=slaves, above=facts.new_term - 1)


def to_promise(group: Group, term: int) -> int:
    """Return the term that copies promise before a promotion; 0: none.

    A master with one slave gets confirmations from that slave only, so a hold of the slave is enough.
    """
    return term if len(group.slaves) > 1 else 0


def changes_of(change: RoleChange, group: Group, chosen: Broker, state: ReplicaState) -> tuple[Change, ...]:
    """Return the changes that promote a slave of `group`; `state`: of its copy.

    With several slaves, its log end counts as acknowledged from now on: an older master may acknowledge it late.
    """
    if len(group.slaves) < 2:
        return (SetRoles(change),)
    point = Point(Epoch(state.last_term, state.last_boot), state.flushed_end, state.chain)
    return SetRoles(change), RememberPoint(group.name, chosen.incarnation, point)


def _too_few(facts: Facts) -> tuple[Refusal, str] | None:
    """Return why too few slaves are eligible: the unfulfilled condition of the first one that is not."""
    needed, group = facts.promises_needed, facts.group
    if len(facts.eligible) >= needed:
        return None
    refused = [(slave, *found) for slave in group.slaves if (found := slave_refusal(facts, slave))]
    why = refused[0][1]
    reasons = ", ".join(f"{slave.key} {text}" for slave, _, text in refused)
    return why, f"{needed} of its {len(group.slaves)} slaves would have to promise, and {reasons}"


def _is_disk_of_row(slave_facts: SlaveFacts) -> bool:
    is_there = slave_facts.slave.instance in ("", slave_facts.report.instance)
    return (
        bool(slave_facts.slave.incarnation)
        and slave_facts.report.incarnation == slave_facts.slave.incarnation
        and is_there
    )


def _was_in_sync_before(slave_facts: SlaveFacts) -> bool:
    """Return whether a slave was in sync with a master that never returns before its own process began.

    If all copies acknowledge, the row holds that. Otherwise the log does: frames of the row's term follow the epoch
    frame, and a copy with them has everything before. Of later frames, one of the promising slaves has all.
    """
    group = slave_facts.all.group
    is_reported = len(group.brokers) == group.min_copies or slave_facts.report.last_term == group.term
    return slave_facts.all.master_gone and is_reported


def _were_in_sync_at_the_end(facts: Facts) -> bool:
    """Return whether enough slaves were in sync at the last report of the master. A master without them answers acks
    alone and marks them; a new master would take these back.
    """
    report = facts.master_state
    if report is None or not report.is_master_in(facts.group.term) or Reason.SLAVE_DOWN in report.readonly_reasons:
        return False
    return sum(slave.incarnation in report.in_step for slave in facts.group.slaves) >= facts.group.min_copies - 1


def _is_behind(facts: Facts) -> bool:
    point = facts.newest_point
    return point is not None and facts.best_state.flushed_end < point.end
