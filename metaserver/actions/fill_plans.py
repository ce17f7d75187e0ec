"""Core. How the slaves of a group are filled, as plans: the group's mode, and what is said of one slave's filling.

SyncReplica and CancelSync speak of the filling that the slave names (`qmq.replication.assignment`): what they say holds
over restarts and changes of roles, and not for the next filling of that copy.
"""

from __future__ import annotations

from qmq.errors import OperatorError
from qmq.metaserver.actions.plan import Plan, refused
from qmq.metaserver.actions.shapes import broker_json
from qmq.metaserver.model import Broker, Group, ReplicaState
from qmq.metaserver.storage.changes import OrderFill
from qmq.replication.assignment import FillOrder
from qmq.replication.readonly import Reason


def slave_at(group: Group, host: str) -> Broker:
    """Return the slave with this hostname, or hostname:port. Raises OperatorError."""
    named = [slave for slave in group.slaves if host in (slave.hostname, str(slave.key))]
    if len(named) == 1:
        return named[0]
    slaves = ", ".join(str(slave.key) for slave in named or group.slaves) or "none"
    if named:
        raise OperatorError(f"several slaves of {group.name} are at {host}: name one of {slaves}")
    raise OperatorError(f"{host} is no slave of {group.name}; its slaves are {slaves}")


def sync_replica(slave: Broker, said: ReplicaState, *, counts: bool) -> Plan:
    """SyncReplica: let the slave be filled."""
    if not _is_being_filled(said, counts=counts):
        return refused(f"{slave.key} does not have to be filled: it is whole, and catches up by itself")
    return _ordered(slave, FillOrder(said.fill_id, is_allowed=True))


def cancel_sync(slave: Broker, said: ReplicaState, *, counts: bool) -> Plan:
    """CancelSync: stop the filling of the slave. One whose copy counts is not being filled any more."""
    if counts:
        return refused(f"{slave.key} is in sync: what it confirms counts, and there is no filling to stop")
    if not _is_being_filled(said, counts=counts):
        return refused(f"{slave.key} is not being filled: it is whole, and catches up by itself")
    return _ordered(slave, FillOrder(said.fill_id, is_allowed=False))


def _is_being_filled(said: ReplicaState, *, counts: bool) -> bool:
    """Or would be, if it did not wait."""
    return not counts and bool(said.fill_id) and (said.incomplete or Reason.UNFILLED in said.readonly_reasons)


def _ordered(slave: Broker, order: FillOrder) -> Plan:
    is_so = (slave.fill_id, slave.fill_allowed) == (order.fill_id, order.is_allowed)
    data = {**broker_json(slave), "filling": "allowed" if order.is_allowed else "stopped"}
    return Plan(
        () if is_so else (OrderFill(slave.key, order),),
        groups=frozenset({slave.group}),
        before={str(slave.key): _word(slave, order.fill_id)},
        after={str(slave.key): data["filling"]},
        data=data,
    )


def _word(slave: Broker, fill_id: str) -> str:
    if slave.fill_id != fill_id:
        return "as the group's mode says"
    return "allowed" if slave.fill_allowed else "stopped"
