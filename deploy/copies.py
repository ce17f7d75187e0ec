"""Shell. Contents of both copies of a broker group: their ends while they run, every frame once they are stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qmq.codec import decode_envelope, split_batch
from qmq.deploy.cluster import Cluster
from qmq.deploy.control import broker_state
from qmq.deploy.plan import HOST, BrokerPlan
from qmq.log import RealDisk
from qmq.log.fold import State, apply
from qmq.log.frame import Frame, FrameKind, decode_frames
from qmq.log.segments import log_name, segment_bases
from qmq.proto import qmq_pb2
from qmq.types import Endpoint

PATIENCE_S = 10.0
"""Wait for a slow broker."""


@dataclass
class Copy:
    """One copy of a log, read with the product's parser, and its folded state."""

    start: int
    frames: list[Frame] = field(default_factory=list)
    messages: list[tuple[str, int, str]] = field(default_factory=list)
    """(subject, sequence, message id), in log order."""
    state: State = field(default_factory=State)

    @property
    def end(self) -> int:
        return self.frames[-1].end if self.frames else self.start

    @property
    def chain(self) -> int:
        return self.frames[-1].chain if self.frames else 0


def state(cluster: Cluster, plan: BrokerPlan) -> qmq_pb2.BrokerState | None:
    """Return a broker's state, or None while it is down or stopped."""
    return broker_state(str(Endpoint(HOST, plan.control_port)), cluster.token, timeout_s=PATIENCE_S)


def ends(cluster: Cluster, group: str) -> list[tuple[int, int] | None]:
    """Return log end and chain of master and slave; None for one that does not answer."""
    states = [state(cluster, cluster.broker(group, role)) for role in ("master", "slave")]
    return [(broker_state.log_end, broker_state.chain) if broker_state else None for broker_state in states]


def are_equal(cluster: Cluster, group: str) -> bool:
    """Return whether both run and end at the same frame."""
    master, slave = ends(cluster, group)
    return master is not None and master == slave


def read_copy(data: Path) -> Copy:
    """Read a stopped broker's whole copy; fail at any byte that is neither frame nor tail."""
    disk = RealDisk(data)
    bases = segment_bases(disk)
    copy = Copy(start=bases[0])
    for base in bases:
        assert base == copy.end, f"segment {base} does not begin where the one before ends, at {copy.end}"
        _read_segment(memoryview(disk.read(log_name(base), 0, disk.size(log_name(base)))), base, copy, data)
    disk.close()
    return copy


def _read_segment(raw: memoryview, base: int, copy: Copy, data: Path) -> None:
    frames = decode_frames(raw, base, copy.chain if copy.frames or base == 0 else None)
    while any(raw[copy.end - base : copy.end - base + 8]):
        frame, body = next(frames)
        apply(copy.state, frame, body)
        copy.frames.append(frame)
        if frame.kind == FrameKind.MESSAGES:
            for at, message in enumerate(split_batch(body, frame.count)):
                id = decode_envelope(bytes(message)).id
                copy.messages.append((frame.subject, frame.first_sequence + at, id))
    assert not any(raw[copy.end - base :]), f"bytes that are no frame at {copy.end} of {data}"
