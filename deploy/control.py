"""Shell. Reports of a local cluster's processes, and their logs once they are stopped.

A running process is asked: actions at the metaserver, state of a broker. A stopped copy is read, every frame of it.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from qmq.codec import decode_envelope, split_batch
from qmq.control_plane import CHANNEL_OPTIONS, DIRECT
from qmq.deploy.plan import HOST, BrokerPlan
from qmq.errors import NotServed, OperatorError
from qmq.log import RealDisk
from qmq.log.fold import State, apply
from qmq.log.frame import Frame, FrameKind, decode_frames
from qmq.log.segments import log_name, segment_bases
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from qmq.types import Endpoint

if TYPE_CHECKING:
    from qmq.deploy.cluster import Cluster

ACTION_S = 60.0
"""Maximum time of an action; actions such as SwapRoles have shorter bounds of their own."""


def answers(url: str) -> bool:
    """Return whether a GET of `url` succeeds."""
    try:
        with DIRECT.open(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def metrics(url: str, token: str, timeout_s: float = 60.0) -> dict[str, float]:
    """Scrape a process; return "name{labels}" -> value. Raises OSError."""
    request = urllib.request.Request(f"{url}/metrics", headers={"X-Api-Token": token})
    with DIRECT.open(request, timeout=timeout_s) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def manage(url: str, token: str, action: str, **parameters: object) -> Any:
    """Post an operator's action; return the data of its answer.

    Raises:
        OperatorError: the action was refused, for the reason in the text.
        NotServed: the metaserver does not answer.
    """
    form = urllib.parse.urlencode({"action": action, **parameters}).encode()
    request = urllib.request.Request(f"{url}/management", data=form, headers={"X-Api-Token": token})
    try:
        with DIRECT.open(request, timeout=ACTION_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise OperatorError(f"{action}: {error.code} {error.read().decode('utf-8', 'replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NotServed(f"{action}: no answer from the metaserver at {url}: {error}") from None
    try:
        result = json.loads(text)
    except ValueError:
        raise OperatorError(f"{action}: {text}") from None
    if isinstance(result, dict) and (result.get("status", 0) != 0 or "error" in result):
        raise OperatorError(f"{action}: {result.get('message') or result.get('error')}")
    return result.get("data", result) if isinstance(result, dict) else result


def broker_state(control_address: str, token: str, *, timeout_s: float = 1.0) -> qmq_pb2.BrokerState | None:
    """Return a broker's state, or None while it does not answer."""
    with grpc.insecure_channel(control_address, options=CHANNEL_OPTIONS) as channel:
        try:
            stub = qmq_pb2_grpc.BrokerStub(channel)
            state: qmq_pb2.BrokerState = stub.ReplicaStatus(
                qmq_pb2.Nothing(), timeout=timeout_s, metadata=[("x-api-token", token)]
            )
        except grpc.RpcError:
            return None
    return state


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
