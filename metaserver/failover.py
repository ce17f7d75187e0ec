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
from dataclasses import dataclass, replace
from enum import StrEnum

from qmq.metaserver import roles
from qmq.metaserver.model import Broker, BrokerKey, Group, Points, ReplicaState
from qmq.metaserver.roles import RoleChange
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
    hear_master: frozenset[BrokerKey] = frozenset()
    """Slaves that have a connection to the master, and did not promise therefore."""

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
        """The slave that has most. Only behind the conditions of each slave."""
        return max(self.eligible, key=lambda slave: self.slaves_said[slave.key].reach)

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
        "it has no slave; AddBroker adds one",
    ),
    (Refusal.HALF_SWAPPED, lambda f: f.group.half_swapped, "it is half swapped; ReplaceBroker finishes that"),
    (Refusal.OLD_ROW, lambda f: f.reported_term > f.group.term, "its row is older than what its brokers report"),
    (
        Refusal.NOT_IN_SYNC_AT_THE_END,
        lambda f: not _were_in_sync_at_the_end(f),
        "too few slaves were in sync when its master reported last",
    ),
)
"""Of the group as a whole; `BEHIND` is the last one, once it is known who has most."""

SLAVE_CONDITIONS: tuple[tuple[Refusal, Callable[[SlaveFacts], bool], str], ...] = (
    (Refusal.HEARS_ITS_MASTER, lambda s: s.slave.key in s.all.hear_master, "still hears the master"),
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
        lambda s: not s.said.in_sync,
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
    known = SlaveFacts(facts, slave)
    return next(((why, text) for why, is_so, text in SLAVE_CONDITIONS if is_so(known)), None)


def choose(facts: Facts) -> RoleChange:
    """Make the slave that has most the master. Only without a refusal.

    The old master becomes a slave. What it wrote and too few confirmed is cut when the two meet: it is not complete.
    """
    assert refusal(facts) is None
    change = roles.swap_roles(facts.group, term=facts.group.term, to=facts.best.key)
    slaves = tuple(replace(slave, complete=False) for slave in change.slaves)
    return replace(change, slaves=slaves, above=facts.new_term - 1)


def chosen_with(copy: ReplicaState) -> Point:
    """What a copy has when it is chosen. It counts as acknowledged: an older master may still do so, late."""
    return Point(Epoch(copy.last_term, copy.last_boot), copy.flushed_end, copy.chain)


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
    return bool(known.slave.incarnation) and known.said.incarnation == known.slave.incarnation


def _were_in_sync_at_the_end(facts: Facts) -> bool:
    """A master without enough slaves in sync answers acks alone, and marks them; a new master would take these back."""
    said = facts.master_said
    if said is None or not said.is_master_in(facts.group.term) or Reason.SLAVE_DOWN in said.readonly_reasons:
        return False
    return sum(slave.incarnation in said.in_step for slave in facts.group.slaves) >= facts.group.min_copies - 1


def _is_behind(facts: Facts) -> bool:
    point = facts.newest_point
    return point is not None and facts.best_said.flushed_end < point.end
