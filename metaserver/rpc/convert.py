"""Core. Values of the model <-> messages of the control plane."""

from __future__ import annotations

from qmq.errors import InvalidRequest
from qmq.metaserver.model import (
    ALL_SUBJECTS,
    DELAY,
    NORMAL,
    Broker,
    BrokerKey,
    Directory,
    Group,
    PartedTail,
    ReplicaState,
)
from qmq.metaserver.roles.rules import awaited, parse_broker
from qmq.proto import qmq_pb2 as pb
from qmq.replication.identity import Point
from qmq.subjects import check_name
from qmq.types import Epoch, Role

END_MAX = 2**63 - 1
"""Largest number of a log that databases store."""


def broker_from_identity(identity: pb.BrokerIdentity) -> Broker:
    """Check a broker's registration; its group may be empty, as the metaserver has it.

    Raises:
        OperatorError, InvalidName, InvalidRequest: a field is wrong; the text names it.
    """
    broker = parse_broker(
        identity.broker_group or "unnamed",
        "1",
        identity.hostname,
        identity.ip,
        str(identity.serve_port),
        str(identity.sync_port),
    )
    check_name("incarnation", identity.incarnation)
    if identity.instance:
        check_name("instance", identity.instance)
    for name, port in (("control_port", identity.control_port), ("metrics_port", identity.metrics_port)):
        if not 0 <= port < 65536:
            raise InvalidRequest(f"{name} {port} is no port")
    kind = identity.kind or NORMAL
    if kind not in (NORMAL, DELAY):
        raise InvalidRequest(f"kind {kind} of a group is unknown; {NORMAL} is of brokers, {DELAY} of delay servers")
    return Broker(
        group=identity.broker_group,
        role=Role.SLAVE,
        hostname=broker.hostname,
        ip=broker.ip,
        serve_port=broker.serve_port,
        sync_port=broker.sync_port,
        control_port=identity.control_port,
        metrics_port=identity.metrics_port,
        incarnation=identity.incarnation,
        instance=identity.instance,
        kind=kind,
    )


def state_from_message(message: pb.BrokerState) -> ReplicaState:
    return ReplicaState(
        role=message.role,
        term=message.term,
        boot=message.boot,
        log_start=message.log_start,
        log_end=message.log_end,
        flushed_end=message.flushed_end,
        matched_end=message.matched_end,
        high_watermark=message.high_watermark,
        chain=message.chain,
        readonly_reasons=tuple(message.readonly_reasons),
        writable=message.writable,
        durability=message.durability,
        incarnation=message.incarnation,
        in_step=tuple(message.in_step),
        point=_point(message.acknowledged) if message.HasField("acknowledged") else None,
        in_sync=message.in_sync,
        promised_term=message.promised_term,
        known_term=message.known_term,
        last_term=message.last_term,
        last_boot=message.last_boot,
        incomplete=message.incomplete,
        fill_id=message.fill_id,
        clock_off_s=message.clock_off_s,
        lost_master=message.lost_master,
        instance=message.instance,
        quarantine_bytes=message.quarantine_bytes,
        quarantine_full=message.quarantine_full,
        parted=_parted(message.parted) if message.HasField("parted") else None,
    )


def _parted(message: pb.PartedTail) -> PartedTail:
    return PartedTail(message.offset, tuple((lost.subject, lost.first, lost.last) for lost in message.messages))


def _point(message: pb.AcknowledgedPoint) -> Point:
    if message.term < 0 or message.boot < 0 or message.end > END_MAX:
        raise InvalidRequest(f"term {message.term}, boot {message.boot}, end {message.end} is no point of a log")
    return Point(Epoch(message.term, message.boot), message.end, message.chain)


def point_message(point: Point) -> pb.AcknowledgedPoint:
    return pb.AcknowledgedPoint(term=point.epoch.term, boot=point.epoch.boot, end=point.end, chain=point.chain)


def assignment_for(directory: Directory, key: BrokerKey) -> pb.Assignment | None:
    """Return a broker's assignment; None: it has no place in any group."""
    broker = directory.find(key)
    if broker is None:
        return None
    group = directory.groups[broker.group]
    return pb.Assignment(
        broker_group=group.name,
        term=group.term,
        role=int(broker.role),
        master=_address(group.master) if group.master else None,
        slaves=[_address(slave) for slave in group.slaves],
        min_copies=group.min_copies,
        readonly_subjects=_readonly_subjects(directory, group),
        offline=[pb.Offline(subject=o.subject, group=o.group, consumer=o.consumer) for o in sorted(directory.offline)],
        limits=[pb.OperatorLimits(**limit._asdict()) for limit in sorted(directory.limits)],
        sync_mode=group.sync_mode,
        fills=[pb.FillOrder(fill_id=b.fill_id, allowed=b.fill_allowed) for b in group.brokers if b.fill_id],
        awaited=[str(slave.key) for slave in awaited(group)] if broker.role == Role.MASTER else (),
    )


def _readonly_subjects(directory: Directory, group: Group) -> list[str]:
    """Return the subjects that a broker must reject.

    These are all for a draining group: a producer with an old route would fill it until its routes are removed, and no
    consumer would read that.
    """
    marked = directory.readonly_subjects(group.name)
    return [ALL_SUBJECTS, *marked] if group.draining and ALL_SUBJECTS not in marked else marked


def _address(broker: Broker) -> pb.BrokerAddress:
    return pb.BrokerAddress(
        ip=broker.ip,
        serve_port=broker.serve_port,
        sync_port=broker.sync_port,
        control_port=broker.control_port,
        metrics_port=broker.metrics_port,
    )
