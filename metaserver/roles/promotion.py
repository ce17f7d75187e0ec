"""Core. Whether the metaserver may make a slave of a group its master by itself, because the master is gone; and which.

It may when that cannot lose what was acknowledged and takes nothing back that was answered. That there are never two
masters does not rest on this choice but on epochs: the old master acknowledges nothing without the copies that promise,
and who promised refuses the old epoch. So whether the old master is really gone is a question of comfort, and
`tests/model` lets the choice come at any moment. The conditions are two tables, looked at from the top:

    the row        has a master and a slave, is as new as all that brokers reported, and no ReplaceBroker is half done
    in sync        by the master's last report: as many slaves as an acknowledgement needs
    each slave     is up, with the disk and in the term of the row; was in sync, by the row if all copies acknowledge,
                   and by its own word since its process began; was not rolled back, is not damaged
    enough         of n copies, m of which acknowledge, n - m + 1 slaves fulfil that: one of them has everything
    complete       the one that has most ends behind each acknowledged point that is remembered

Keeps I13, I16, I25. What makes each rule necessary is in docs/decisions/0041-failover.md and 0043.
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
from qmq.replication.points import Point
from qmq.replication.readonly import Reason
from qmq.types import Epoch, Role


class Refusal(StrEnum):
    """Why there is no failover: the label of the metric, and the first words of what operators read."""

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
    """What is known of a group whose master is gone."""

    group: Group
    reported_term: int
    """The newest term that any broker of the group reported."""
    given_term: int
    """The newest one that was ever reported or given out."""
    master_said: ReplicaState | None
    """The master's last report; None: none is known."""
    slaves_said: Mapping[BrokerKey, ReplicaState]
    """What slaves answer now; who does not is left out."""
    points: Points
    unwilling: Mapping[BrokerKey, str] = field(default_factory=dict)
    """Slaves that did not promise, with their own words: they hear the master, or are not whole."""
    master_gone: bool = False
    """An operator says that the master never returns. So acks that it answered alone may be taken back, and a slave may
    have restarted since: only a person can know that its disk was not put back meanwhile."""

    @property
    def new_term(self) -> int:
        """What slaves promise, and the row gets: above all that was given out, and none has promised a newer one.

        A promise that led to no choice is asked for again: pull sequences have 16 bits for the term.
        """
        promised = (said.promised_term for said in self.slaves_said.values())
        return max(self.group.term + 1, self.given_term + 1, *promised)

    @property
    def promises_needed(self) -> int:
        """So many slaves that none of the sets that may have acknowledged is without one of them."""
        return len(self.group.brokers) - self.group.min_copies + 1

    @property
    def eligible(self) -> list[Broker]:
        """The slaves that nothing is said against."""
        return [slave for slave in self.group.slaves if slave_refusal(self, slave) is None]

    @property
    def best(self) -> Broker:
        """The slave that has most, of several one whose clock is right. Only behind the conditions of each slave."""
        said = self.slaves_said
        return max(self.eligible, key=lambda slave: (said[slave.key].reach, not said[slave.key].clock_off_s))

    @property
    def best_said(self) -> ReplicaState:
        return self.slaves_said[self.best.key]

    @property
    def newest_point(self) -> Point | None:
        """The newest acknowledged point that counts: older ones are lost if an operator accepted that."""
        known = self.points.by_incarnation.values()
        return max((p for p in known if p.epoch.term >= self.points.loss_accepted_term), default=None)


@dataclass(frozen=True, slots=True)
class SlaveFacts:
    """What is known of one slave."""

    all: Facts
    slave: Broker

    @property
    def answer(self) -> ReplicaState | None:
        return self.all.slaves_said.get(self.slave.key)

    @property
    def said(self) -> ReplicaState:
        assert self.answer is not None, "asked behind SLAVE_DOWN only"
        return self.answer


CONDITIONS: tuple[tuple[Refusal, Callable[[Facts], bool], str], ...] = (
    (
        Refusal.NO_SLAVE,
        lambda f: f.group.master is None or not f.group.slaves,
        "it has no master, or no slave",
    ),
    (Refusal.HALF_SWAPPED, lambda f: f.group.half_swapped, "it is half swapped"),
    (Refusal.OLD_ROW, lambda f: f.reported_term > f.group.term, "its row is older than what its brokers report"),
    (
        Refusal.NOT_IN_SYNC_AT_THE_END,
        lambda f: not f.master_gone and not _were_in_sync_at_the_end(f),
        "too few slaves were in sync when its master reported last",
    ),
)
"""Of the group as a whole; `BEHIND` is the last one, once it is known who has most."""

SLAVE_CONDITIONS: tuple[tuple[Refusal, Callable[[SlaveFacts], bool], str], ...] = (
    (Refusal.SLAVE_DOWN, lambda s: s.answer is None, "is down, too"),
    (Refusal.OTHER_DISK, lambda s: not _is_disk_of_row(s), "came with another data directory"),
    (
        Refusal.OTHER_TERM,
        lambda s: (s.said.role, s.said.term) != (Role.SLAVE, s.all.group.term),
        "has not followed the master of this term",
    ),
    (
        Refusal.NEVER_IN_SYNC,
        lambda s: not s.slave.complete and len(s.all.group.brokers) == s.all.group.min_copies,
        "was never in sync",
    ),
    (
        Refusal.NOT_IN_SYNC_SINCE_START,
        lambda s: not s.said.in_sync and not _was_in_sync_before(s),
        "has not been in sync since its process began",
    ),
    (
        Refusal.ROLLED_BACK,
        lambda s: Reason.ROLLED_BACK in s.said.readonly_reasons,
        "was rolled back and lacks what was acknowledged",
    ),
    (
        Refusal.DAMAGED,
        lambda s: bool({Reason.CORRUPT, Reason.DIVERGED} & set(s.said.readonly_reasons)),
        "has a copy that is damaged, or differs from the master's",
    ),
)
BEHIND = "no slave has all that is remembered as acknowledged"
NOT_STORED = "the change of roles could not be stored"

_START = "start the master, {master}; if it never returns: "
_GONE = _START + "qmq Failover --brokerGroup={group} --masterGone=true"
_RECOVER = _START + "qmq RecoverGroup --brokerGroup={group} --gone={master}"
WAY_ON: Mapping[Refusal, str] = {
    **dict.fromkeys(Refusal, _RECOVER),
    Refusal.NO_SLAVE: "AddBroker adds one; what the master's disk held comes back with that disk only",
    Refusal.HALF_SWAPPED: "finish that with ReplaceBroker --role={slave_role}",
    Refusal.OLD_ROW: "Doctor names the AdoptRoles that decides",
    Refusal.SLAVE_DOWN: (
        "start slaves, or the master, {master}; those that never return are named to qmq RecoverGroup "
        "--brokerGroup={group} --gone=…"
    ),
    Refusal.NOT_IN_SYNC_AT_THE_END: _GONE,
    Refusal.NOT_IN_SYNC_SINCE_START: _GONE,
    Refusal.HEARS_ITS_MASTER: "the master runs: look at the network between it and the metaservers",
    Refusal.NOT_STORED: "start the database",
}
"""What an operator does about each; `way_on` fills in the names."""
LAST_RESORT = (
    "qmq RecoverGroup --brokerGroup={group} --gone={master} --dry-run says which copy has most; stop that one, "
    "and make it the master: qmq ReplaceBroker --brokerGroup={group} --role={master_role} --acceptLoss=true"
)
"""In place of who waits for a master that never returns."""


class NoFailover(OperatorError):
    """A condition is in the way. Nothing was changed; the text says what to do instead."""

    def __init__(self, why: Refusal, found: str, facts: Facts) -> None:
        self.why, self.found = why, found
        remedy = way_on(why, facts.group, master_gone=facts.master_gone)
        super().__init__(f"no failover of {facts.group.name}: {found}. {remedy}")


def way_on(why: Refusal, group: Group, *, master_gone: bool = False) -> str:
    """Say what to do about a refusal; `master_gone` is as in `Facts`."""
    text = LAST_RESORT if master_gone and WAY_ON[why] in (_GONE, _RECOVER) else WAY_ON[why]
    if master_gone and why == Refusal.HEARS_ITS_MASTER:
        text = f"If the master was heard: {text}. If a copy is not whole: {LAST_RESORT}"
    return text.format(
        group=group.name,
        master=group.master.key if group.master else "",
        master_role=int(part(Role.MASTER, group.kind)),
        slave_role=int(part(Role.SLAVE, group.kind)),
    )


def require(facts: Facts) -> None:
    """Raise NoFailover if a condition is in the way."""
    if refused := refusal(facts):
        raise NoFailover(*refused, facts)


def refusal(facts: Facts) -> tuple[Refusal, str] | None:
    """Return the first condition that is in the way, with a sentence for operators; None: nothing is."""
    found = next(((why, text) for why, is_so, text in CONDITIONS if is_so(facts)), None)
    if found is None:
        found = _too_few(facts)
    if found is None and _is_behind(facts):
        found = Refusal.BEHIND, BEHIND
    return found


def slave_refusal(facts: Facts, slave: Broker) -> tuple[Refusal, str] | None:
    """Return the first condition that is in a slave's way, with what to say of it; None: nothing is."""
    if words := facts.unwilling.get(slave.key):
        return Refusal.HEARS_ITS_MASTER, f"does not: {words}"
    known = SlaveFacts(facts, slave)
    return next(((why, text) for why, is_so, text in SLAVE_CONDITIONS if is_so(known)), None)


def choose(facts: Facts) -> RoleChange:
    """Make the slave that has most the master. Only without a refusal.

    The old master becomes a slave. What it wrote and too few confirmed is cut when the two meet: it is not complete.
    """
    assert refusal(facts) is None
    change = rules.swap_roles(facts.group, term=facts.group.term, to=facts.best.key)
    slaves = tuple(replace(slave, complete=False) for slave in change.slaves)
    return replace(change, slaves=slaves, above=facts.new_term - 1)


def to_promise(group: Group, term: int) -> int:
    """Return the term that copies promise before a choice.

    0: none. A master with one slave has its confirmations from nobody else, so holding that slave is enough.
    """
    return term if len(group.slaves) > 1 else 0


def changes_of(change: RoleChange, group: Group, chosen: Broker, said: ReplicaState) -> tuple[Change, ...]:
    """Return what is stored when a slave of `group` becomes its master; `said`: what the copy has that was looked at.

    Of several slaves, that counts as acknowledged from now on: an older master may still acknowledge it, late.
    """
    if len(group.slaves) < 2:
        return (SetRoles(change),)
    point = Point(Epoch(said.last_term, said.last_boot), said.flushed_end, said.chain)
    return SetRoles(change), RememberPoint(group.name, chosen.incarnation, point)


def _too_few(facts: Facts) -> tuple[Refusal, str] | None:
    """Say why too few slaves fulfil their conditions: what is in the way of the first that does not."""
    needed, group = facts.promises_needed, facts.group
    if len(facts.eligible) >= needed:
        return None
    refused = [(slave, *found) for slave in group.slaves if (found := slave_refusal(facts, slave))]
    why = refused[0][1]
    told = ", ".join(f"{slave.key} {text}" for slave, _, text in refused)
    return why, f"{needed} of its {len(group.slaves)} slaves would have to promise, and {told}"


def _is_disk_of_row(known: SlaveFacts) -> bool:
    is_there = known.slave.instance in ("", known.said.instance)
    return bool(known.slave.incarnation) and known.said.incarnation == known.slave.incarnation and is_there


def _was_in_sync_before(known: SlaveFacts) -> bool:
    """Whether the slave of a master that never returns was in sync with it before its own process began.

    If all copies acknowledge, the row says so. Else its log does: frames of the row's term follow the epoch frame, and
    who has that has all before it; of what came behind, one of those that promise has all.
    """
    group = known.all.group
    is_told = len(group.brokers) == group.min_copies or known.said.last_term == group.term
    return known.all.master_gone and is_told


def _were_in_sync_at_the_end(facts: Facts) -> bool:
    """A master without enough slaves in sync answers acks alone, and marks them; a new master would take these back."""
    said = facts.master_said
    if said is None or not said.is_master_in(facts.group.term) or Reason.SLAVE_DOWN in said.readonly_reasons:
        return False
    return sum(slave.incarnation in said.in_step for slave in facts.group.slaves) >= facts.group.min_copies - 1


def _is_behind(facts: Facts) -> bool:
    point = facts.newest_point
    return point is not None and facts.best_said.flushed_end < point.end
