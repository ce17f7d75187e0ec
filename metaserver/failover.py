"""Core. Whether the metaserver may make the slave of a group its master by itself, because the master is gone.

It may when that cannot lose what was acknowledged and takes nothing back that was answered. That there are never two
masters does not rest on this choice but on epochs: the old master acknowledges nothing without its slave, and the slave
refuses the old epoch before it acts in the new one. So whether the old master is really gone is a question of comfort,
and `tests/model` lets the choice come at any moment. The conditions are a table, looked at from the top:

    the row        has a master and a slave, is as new as all that brokers reported, and no ReplaceBroker is half done
    the slave      is up, with the disk and in the term of the row
    in sync        by the row; by the master's last report; by its own word, since its process began
    complete       it was not rolled back, is not damaged, and ends behind each acknowledged point that is remembered

Keeps I13, I16, I25. What makes each rule necessary is in docs/decisions/0041-failover.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from qmq.metaserver import roles
from qmq.metaserver.model import Broker, Group, Points, ReplicaState
from qmq.metaserver.roles import RoleChange
from qmq.replication.points import Point
from qmq.replication.readonly import Reason
from qmq.types import Role


class Refusal(StrEnum):
    """Why there is no failover: the label of the metric, and the first words of what operators read."""

    NO_SLAVE = "no_slave"
    SEVERAL_SLAVES = "several_slaves"
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
    term_floor: int
    """The newest one that was ever reported or given out."""
    master_said: ReplicaState | None
    """The master's last report; None: none is known."""
    slave_said: ReplicaState | None
    """What the slave answers now; None: nothing."""
    points: Points

    @property
    def slave(self) -> Broker:
        assert self.group.slave is not None, "the first condition"
        return self.group.slave

    @property
    def said(self) -> ReplicaState:
        assert self.slave_said is not None, "asked behind SLAVE_DOWN only"
        return self.slave_said

    @property
    def newest_point(self) -> Point | None:
        """The newest acknowledged point that counts: older ones are lost if an operator accepted that."""
        known = self.points.by_incarnation.values()
        return max((p for p in known if p.epoch.term >= self.points.loss_accepted_term), default=None)


Condition = tuple[Refusal, Callable[[Facts], bool], str]

CONDITIONS: tuple[Condition, ...] = (
    (Refusal.NO_SLAVE, lambda f: len(f.group.brokers) < 2, "it has no slave; AddBroker adds one"),
    (
        Refusal.SEVERAL_SLAVES,
        lambda f: len(f.group.slaves) > 1,
        "it has several slaves, and nobody has asked them for promises",
    ),
    (Refusal.HALF_SWAPPED, lambda f: f.group.half_swapped, "it is half swapped; ReplaceBroker finishes that"),
    (Refusal.OLD_ROW, lambda f: f.reported_term > f.group.term, "its row is older than what its brokers report"),
    (Refusal.SLAVE_DOWN, lambda f: f.slave_said is None, "its slave is down, too"),
    (Refusal.OTHER_DISK, lambda f: not _is_disk_of_row(f), "its slave came with another data directory"),
    (
        Refusal.OTHER_TERM,
        lambda f: (f.said.role, f.said.term) != (Role.SLAVE, f.group.term),
        "its slave has not followed the master of this term",
    ),
    (Refusal.NEVER_IN_SYNC, lambda f: not f.slave.complete, "its slave was never in sync"),
    (
        Refusal.NOT_IN_SYNC_AT_THE_END,
        lambda f: not _was_in_sync_at_the_end(f),
        "no slave was in sync when its master reported last",
    ),
    (
        Refusal.NOT_IN_SYNC_SINCE_START,
        lambda f: not f.said.in_sync,
        "its slave has not been in sync since its process began",
    ),
    (
        Refusal.ROLLED_BACK,
        lambda f: Reason.ROLLED_BACK in f.said.readonly_reasons,
        "its slave was rolled back and lacks what was acknowledged",
    ),
    (
        Refusal.DAMAGED,
        lambda f: bool({Reason.CORRUPT, Reason.DIVERGED} & set(f.said.readonly_reasons)),
        "its slave's copy is damaged, or differs from the master's",
    ),
    (Refusal.BEHIND, lambda f: _is_behind(f), "its slave ends before what is remembered as acknowledged"),
)  # fmt: skip

HEARS_ITS_MASTER = "its slave still hears the master"
NOT_STORED = "the change of roles could not be stored"


def refusal(facts: Facts) -> tuple[Refusal, str] | None:
    """Return the first condition that is in the way, with a sentence for operators; None: nothing is."""
    return next(((why, text) for why, is_so, text in CONDITIONS if is_so(facts)), None)


def choose(facts: Facts) -> RoleChange:
    """Make the slave the master. Only without a refusal.

    The old master becomes the slave. What it wrote and nobody confirmed is cut when the two meet: it is not complete.
    """
    assert refusal(facts) is None and facts.group.master is not None
    change = roles.swap_roles(facts.group, term=facts.group.term)
    assert change.slave is not None
    return replace(change, slaves=(replace(change.slave, complete=False),), above=facts.term_floor)


def _is_disk_of_row(facts: Facts) -> bool:
    return bool(facts.slave.incarnation) and facts.said.incarnation == facts.slave.incarnation


def _was_in_sync_at_the_end(facts: Facts) -> bool:
    """A master without a slave in sync answers acks alone, and marks them; a new master would take these back."""
    said = facts.master_said
    return (
        said is not None
        and said.is_master_in(facts.group.term)
        and facts.slave.incarnation in said.in_step
        and Reason.SLAVE_DOWN not in said.readonly_reasons
    )


def _is_behind(facts: Facts) -> bool:
    point = facts.newest_point
    return point is not None and facts.said.flushed_end < point.end
