"""Core. State of a process in its group, as a table, and its changes by operators: swap and failover.

HELD remains when the role ends and begins again, because a slave must not confirm to a master that was declared gone.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from qmq.errors import OperatorError
from qmq.replication.readonly import Reason
from qmq.states import Machine, TransitionTable

if TYPE_CHECKING:
    from qmq.replication.node import Node


class NodeState(Enum):
    IDLE = auto()  # no role: no assignment yet, or the log waits for its repair
    MASTER = auto()
    DRAINING = auto()  # a master that accepts nothing new, so that its slave can get everything
    PROMISED = auto()  # a drained master that promised to be no master before the row has a newer term
    YIELDING = auto()  # frames that this copy wrote alone are about to be cut; no role until then
    SLAVE = auto()
    HELD = auto()  # a slave that follows no master: a failover may promote it, or another one
    DIVERGED = auto()  # a slave with another log than its master's


class NodeEvent(Enum):
    MASTER_BEGAN = auto()
    SLAVE_BEGAN = auto()
    LEFT = auto()  # the role ended
    SWAP_PREPARED = auto()
    SWAP_PROMISED = auto()
    SWAP_ENDED = auto()  # cancelled, or not carried out in time
    YIELDED = auto()  # frames written alone contradict frames that the other copy confirmed
    TAIL_CUT = auto()  # these frames are in quarantine
    HOLD_BEGAN = auto()
    HOLD_ENDED = auto()
    PARTED = auto()  # the handshake found another history
    AGREED = auto()  # a later handshake succeeded


_S, _E = NodeState, NodeEvent

NODE = TransitionTable(
    NodeState.IDLE,
    {
        (_S.IDLE, _E.MASTER_BEGAN): _S.MASTER,
        (_S.IDLE, _E.SLAVE_BEGAN): _S.SLAVE,
        (_S.IDLE, _E.LEFT): _S.IDLE,
        (_S.MASTER, _E.SWAP_PREPARED): _S.DRAINING,
        (_S.MASTER, _E.SWAP_PROMISED): _S.PROMISED,
        (_S.MASTER, _E.YIELDED): _S.YIELDING,
        (_S.MASTER, _E.LEFT): _S.IDLE,
        (_S.DRAINING, _E.SWAP_PREPARED): _S.DRAINING,
        (_S.DRAINING, _E.SWAP_PROMISED): _S.PROMISED,
        (_S.DRAINING, _E.SWAP_ENDED): _S.MASTER,
        (_S.DRAINING, _E.YIELDED): _S.YIELDING,
        (_S.DRAINING, _E.LEFT): _S.IDLE,
        (_S.PROMISED, _E.SWAP_PREPARED): _S.DRAINING,
        (_S.PROMISED, _E.SWAP_PROMISED): _S.PROMISED,
        (_S.PROMISED, _E.SWAP_ENDED): _S.MASTER,
        (_S.PROMISED, _E.YIELDED): _S.YIELDING,
        (_S.PROMISED, _E.LEFT): _S.IDLE,
        (_S.YIELDING, _E.LEFT): _S.YIELDING,
        (_S.YIELDING, _E.TAIL_CUT): _S.IDLE,
        (_S.SLAVE, _E.HOLD_BEGAN): _S.HELD,
        (_S.SLAVE, _E.PARTED): _S.DIVERGED,
        (_S.SLAVE, _E.SLAVE_BEGAN): _S.SLAVE,
        (_S.SLAVE, _E.MASTER_BEGAN): _S.MASTER,
        (_S.SLAVE, _E.LEFT): _S.IDLE,
        (_S.HELD, _E.HOLD_BEGAN): _S.HELD,
        (_S.HELD, _E.HOLD_ENDED): _S.SLAVE,
        (_S.HELD, _E.SLAVE_BEGAN): _S.HELD,
        (_S.HELD, _E.LEFT): _S.HELD,
        (_S.DIVERGED, _E.AGREED): _S.SLAVE,
        (_S.DIVERGED, _E.SLAVE_BEGAN): _S.SLAVE,
        (_S.DIVERGED, _E.MASTER_BEGAN): _S.MASTER,
        (_S.DIVERGED, _E.LEFT): _S.DIVERGED,
    },
)


class NodeLife(Machine[NodeState]):
    """States of one process. Made by its `Node`, which enters them."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(NODE)


class RoleChange:
    """Swap and failover of one process, as requested by the metaserver. Made by the node; ends with it."""

    def __init__(self, node: Node[Any]) -> None:
        self._node = node
        self._until_ms = 0
        """Time when draining or holding ends by itself."""

    @property
    def is_waiting(self) -> bool:
        """Whether `tick` has a deadline to check."""
        return self._node.life.state in (NodeState.DRAINING, NodeState.HELD)

    @property
    def is_held(self) -> bool:
        """Whether this slave follows no master: a failover may promote it, or another one."""
        node = self._node
        has_promised = node.slave is not None and node.slave.term < node.identity.value.promised
        return node.life.state is NodeState.HELD or has_promised

    def tick(self, now_ms: int) -> None:
        """End a swap or a hold after its time."""
        if not self.is_waiting or now_ms <= self._until_ms:
            return
        if self._node.life.state is NodeState.DRAINING:
            self.cancel_swap()
        else:
            self.end_hold()
            self._node.host.role_changed()

    def prepare_swap(self, term: int, hold_ms: int, *, target: str = "") -> None:
        """Accept nothing new, so that the slave can get everything; the host waits for `is_drained_to`.

        Args:
            target: incarnation of the slave to promote; empty for the only slave.

        Raises:
            OperatorError: roles cannot be swapped now; the text gives the reason.
        """
        node = self._node
        master = node.master
        if master is None or not master.has_begun or master.epoch.term != term:
            raise OperatorError(f"this broker is not the master of {node.group} in term {term}")
        if master.gate.too_few_in_sync:
            raise OperatorError(f"the slave of {node.group} is missing: start it first")
        if target and target not in master.in_sync:
            raise OperatorError(f"the slave of {node.group} that is to be the master is not in sync")
        master.readonly.change(Reason.DRAINING, True)
        node.move(NodeEvent.SWAP_PREPARED)
        self._until_ms = node.host.monotonic_ms() + hold_ms

    def promise_swap(self, term: int, *, target: str = "") -> None:
        """Promise to be no master before the row has this term or a newer one, once the slave has everything.

        With two copies the promotion of the slave is enough: no third copy can confirm.

        Raises:
            OperatorError: the slave does not have everything any more.
        """
        node = self._node
        master = node.master
        if master is None or not master.is_drained_to(target):
            raise OperatorError(f"this broker is not the master of {node.group} any more, or accepted new messages")
        node.move(NodeEvent.SWAP_PROMISED)
        master.readonly.change(Reason.DRAINING, True)
        node.identity.promise(term)

    def cancel_swap(self) -> None:
        """Continue as master, unless a newer term was promised, in which another copy may be the master."""
        node = self._node
        may_resume = node.master is not None and node.master.epoch.term >= node.identity.value.promised
        event = NodeEvent.SWAP_ENDED if may_resume else NodeEvent.SWAP_PROMISED
        if node.life.state in (NodeState.DRAINING, NodeState.PROMISED):
            node.move(event)
        if node.master is not None and may_resume:
            node.master.resume()

    def prepare_failover(
        self,
        term: int,
        *,
        hold_ms: int,
        silent_ms: int,
        packet_age_ms: int | None,
        promised_term: int = 0,
        master_gone: bool = False,
    ) -> None:
        """Follow no master for `hold_ms`, because the master of `term` counts as gone. This copy's log is final then.

        Args:
            promised_term: store the promise to follow no master of an older term, and to be none. 0 for two copies,
                where no third copy can confirm anything to the old master.
            silent_ms: time within which a master that sent something does not count as gone.
            packet_age_ms: age of the master's last packet, or None without a link.
            master_gone: whether an operator asserts that the master never returns. Then a copy that has not been in
                sync since its process began may be promoted, too: only the operator can exclude that its disk was
                restored to an older state.

        Raises:
            OperatorError: this slave has a master, or may not become one. State is unchanged.
        """
        node = self._node
        slave = node.slave
        if slave is None or node.identity.value.term != term:
            raise OperatorError(f"this broker is not the slave of {node.group} in term {term}")
        if packet_age_ms is not None and packet_age_ms < silent_ms:
            raise OperatorError(f"the master of {node.group} sent a packet {packet_age_ms} ms ago")
        was_whole = master_gone and node.identity.value.complete and not node.log.is_tail_cut
        if not (slave.has_matched or was_whole) or node.readonly_reasons:
            raise OperatorError(f"this copy of {node.group} was not in sync since its process began, or is incomplete")
        node.identity.promise(promised_term)
        node.move(NodeEvent.HOLD_BEGAN)
        self._until_ms = node.host.monotonic_ms() + hold_ms
        slave.leave_master("the metaserver reports that the master is gone")
        node.host.role_changed()

    def end_hold(self) -> None:
        """Follow a master again. Does nothing without a hold."""
        if self._node.life.state is NodeState.HELD:
            self._node.move(NodeEvent.HOLD_ENDED)
