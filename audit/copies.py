"""Shell. Copies of a message log, read from a broker's data directory or from a running broker.

    path     <data>/log/<base offset, 20 digits>.log, or the directory `log` itself
    broker   "host:control_port", over gRPC `DescribeLog` and `ReadLog`; no disk is shared with the Spark cluster

Both are a `Storage` for `audit.walk`, and report the range of their log as a `Description`.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

from qmq.audit.walk import NOTHING, Derived, Storage, is_empty, tail_of
from qmq.control_plane import CHANNEL_OPTIONS
from qmq.crc import decode_checked
from qmq.descriptors import raise_limit
from qmq.errors import QmqError
from qmq.log import manifest
from qmq.log.index import ClosedIndex
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from qmq.replication.identity import COPY, POINTS, Point
from qmq.types import Endpoint

SEGMENT_SUFFIX, INDEX_SUFFIX, SNAPSHOT_SUFFIX = ".log", ".idx", ".snap"
IDENTITY, MANIFEST = "broker.json", Path(manifest.NAME).name
GONE = "this segment is listed, and its file is gone"
OFFSET_MAX = (1 << 63) - 1
CALL_TIMEOUT_S = 60.0
BROKER_WINDOW_BYTES = 8 << 20
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_DAMAGE = (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL)
"""Status codes for unreadable frames on the broker's disk; other codes mean an absent broker."""


class CannotRead(QmqError):
    """There is no readable log at the given place. Nothing is proven; correct the place, then run the audit again."""


class Away(CannotRead):
    """A broker does not answer now. Try again later."""


class Description(NamedTuple):
    """Contents of a copy at one moment.

    `chain` is the chain before `start`, or None if unknown. `high_watermark`: by this copy's statement, fsynced on
    both. `torn_bytes` follow `end` and are no frame. `damaged` is (begin, end, reason): of a running broker, damage met
    since its start; of a directory, missing segments.
    """

    start: int
    end: int
    high_watermark: int
    chain: int | None
    segments: tuple[int, ...]
    torn_bytes: int = 0
    damaged: tuple[tuple[int, int, str], ...] = ()


class Owner(NamedTuple):
    """Broker of a copy; fields are empty or None if unknown."""

    group: str = ""
    incarnation: str = ""
    """Made with the data directory, different for every broker."""
    role: int | None = None
    """From the metaserver's assignment (`qmq.replication.assignment`); None for a directory."""
    in_step: frozenset[str] = frozenset()
    """Of a master: incarnations of the slaves that have everything acknowledged."""


class Copy(Storage, Protocol):
    """One copy of a log. Opened and closed by each task. Every method raises CannotRead when the copy is away."""

    def owner(self) -> Owner:
        """Return the owner of the copy; raise CannotRead, Away."""

    def hold(self) -> None:
        """Keep a running broker from deleting segments until `close`; raise CannotRead."""

    def describe(self) -> Description:
        """Return the present contents; raise CannotRead."""

    def bases_now(self) -> Sequence[int]:
        """Return the present segments; raise CannotRead."""

    def read_until(self, limit: int) -> None:
        """Replace the limit given to `open_copy`: read frames that begin below `limit`."""

    def close(self) -> None: ...


def open_copy(options: Mapping[str, str], limit: int = OFFSET_MAX) -> Copy:
    """Open the copy in the options `path`, or `broker` and `token`, to read frames that begin below `limit`.

    Raises:
        CannotRead: there is no copy.
    """
    path, broker = options.get("path"), options.get("broker")
    if bool(path) == bool(broker):
        raise CannotRead("give either option 'path' (a data directory) or 'broker' (host:control_port)")
    if path:
        return PathCopy(Path(path))
    try:
        endpoint = Endpoint.parse(str(broker))
    except ValueError as error:
        raise CannotRead(f"option 'broker': {error}") from None
    return BrokerCopy(str(endpoint), options.get("token", ""), limit)


def place_options(place: str, token: str) -> dict[str, str]:
    """Return options of the data source for a user's input: a directory or `host:port`."""
    if not Path(place).exists():
        with suppress(ValueError):
            return {"broker": str(Endpoint.parse(place)), "token": token}
    return {"path": place}


def is_same_place(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Return whether two options lead to one copy."""
    if "path" in first and "path" in second:
        return folder_of(Path(first["path"])).resolve() == folder_of(Path(second["path"])).resolve()
    return first.get("broker") == second.get("broker")


def folder_of(data: Path) -> Path:
    """Return the folder of segments in a data directory, or `data` if it is that folder."""
    return data / "log" if (data / "log").is_dir() else data


class PathCopy:
    """A data directory. Reads are `pread`s: a bad sector is an error of one range and does not kill the worker."""

    def __init__(self, data: Path) -> None:
        raise_limit()  # each segment stays open, so that a running broker's retention takes none away
        self._folder = folder_of(data)
        self._files: dict[int, int] = {}
        there, listed = self._list()
        self._gone = sorted(listed - there)
        """Bases of missing segments."""
        self.bases = sorted(there | listed)

    def _list(self) -> tuple[set[int], set[int]]:
        """Return the bases of the present segments, and of those in the broker's manifest."""
        listed = self._listed()
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(SEGMENT_SUFFIX)]
        except OSError as error:
            raise CannotRead(f"{self._folder}: {error.strerror}") from None
        there = {int(stem) for name in names if (stem := name.removesuffix(SEGMENT_SUFFIX)).isdigit()}
        if not there:
            raise CannotRead(f"{self._folder}: there is no segment of a message log")
        return there, listed & self._listed()  # a segment being added or deleted is in only one of the two

    def _listed(self) -> set[int]:
        try:
            return set(manifest.decode_manifest((self._folder / MANIFEST).read_bytes()))
        except (OSError, ValueError):
            return set()  # a log from before manifests, or without one

    def owner(self) -> Owner:
        """Read the broker's identity file beside the log; a copied log alone has none."""
        path = self._folder.parent / IDENTITY
        try:
            identity = json.loads(path.read_bytes())
            return Owner(str(identity["group"]), str(identity["incarnation"]))
        except FileNotFoundError:
            return Owner()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CannotRead(f"{path}: {error}") from None

    def files(self) -> Iterator[tuple[int, int, int]]:
        """Yield each segment with device and inode of its file; both stay the same under another path."""
        for base in self.bases:
            if base not in self._gone:
                status = os.fstat(self._file(base))
                yield base, status.st_dev, status.st_ino

    def hold(self) -> None:
        """Do nothing: there is no broker to ask. A broker running on this directory still deletes by its retention."""

    def describe(self) -> Description:
        acknowledged = self._acknowledged()  # before the end is read, as the end grows
        there = [base for base in self.bases if base not in self._gone]
        last, size = there[-1], 0
        try:
            size = os.fstat(self._file(last)).st_size
            end, frame = tail_of(self, last, last + size)
            torn = self._torn_bytes(end, last + size)
            if frame is None and len(there) > 1:
                _, frame = tail_of(self, there[-2], last)
        except OSError as error:
            raise CannotRead(f"{self._folder}: {error.strerror or error}") from None
        watermark = max(acknowledged, min(frame.high_watermark, frame.offset) if frame else 0)
        chain = 0 if self.bases[0] == 0 else None
        gone = tuple((base, base + 8, GONE) for base in self._gone)
        return Description(self.bases[0], end, watermark, chain, tuple(self.bases), torn, gone)

    def bases_now(self) -> Sequence[int]:
        return self.bases

    def _acknowledged(self) -> int:
        """Return the acknowledged point that the broker stored beside its log; 0 without one."""
        life, own = self._json_beside(COPY).get("life", 0), self._json_beside(POINTS)
        return Point.from_list(own["own"]).end if own.get("own") and own["life"] == life else 0

    def _json_beside(self, name: str) -> dict[str, Any]:
        try:
            return decode_checked((self._folder.parent / name).read_bytes())
        except (OSError, ValueError):
            return {}

    def index(self, base: int) -> ClosedIndex | None:
        try:
            return ClosedIndex((self._folder / f"{base:020d}{INDEX_SUFFIX}").read_bytes(), base)
        except (OSError, ValueError):
            return None

    def read_until(self, limit: int) -> None:
        """Do nothing: files are read only as far as asked."""

    def frame(self, offset: int, size: int) -> bytes:
        return self.window(offset, size)

    def derived(self, base: int) -> Derived:
        return Derived(self._content(base, INDEX_SUFFIX), self._content(base, SNAPSHOT_SUFFIX))

    def _content(self, base: int, suffix: str) -> bytes:
        try:
            return (self._folder / f"{base:020d}{suffix}").read_bytes()
        except FileNotFoundError:
            return b""

    def _torn_bytes(self, end: int, limit: int) -> int:
        """Count the bytes from `end` to the last nonzero one."""
        torn, at = 0, end
        while at < limit and (data := self.window(at, 16 << 20)):
            if not is_empty(data):
                torn = at + len(data.rstrip(b"\0")) - end
            at += len(data)
        return torn

    def _file(self, base: int) -> int:
        if base not in self._files:
            self._files[base] = os.open(self._folder / f"{base:020d}{SEGMENT_SUFFIX}", os.O_RDONLY)
        return self._files[base]

    def window(self, offset: int, size: int) -> bytes:
        at = bisect_right(self.bases, offset) - 1
        if at < 0:
            return b""
        base = self.bases[at]
        if base in self._gone:
            return b""
        if at + 1 < len(self.bases):
            size = min(size, self.bases[at + 1] - offset)
        return os.pread(self._file(base), size, offset - base)

    def resume(self, offset: int) -> int:
        at = bisect_right(self.bases, offset)
        return self.bases[at] if at < len(self.bases) else OFFSET_MAX

    def starts_on_frame(self, offset: int) -> bool:
        return offset in self.bases

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class BrokerCopy:
    """A running broker. Consecutive calls of `window` continue one `ReadLog` stream."""

    def __init__(self, address: str, token: str, limit: int = OFFSET_MAX) -> None:
        self._address = address
        self._limit = limit
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = qmq_pb2_grpc.BrokerStub(self._channel)
        self._metadata = (("x-api-token", token),)
        self._stream: Iterator[Any] | None = None
        self._next = -1
        self._waiting: Any = None
        self._held: Any = None

    def owner(self) -> Owner:
        try:
            status = self._stub.ReplicaStatus(qmq_pb2.Nothing(), metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise (Away if error.code() in _AWAY else CannotRead)(self._error_text(error)) from None
        return Owner(status.broker_group, status.incarnation, status.role, frozenset(status.in_step))

    def hold(self) -> None:
        self._held = self._stub.HoldLog(qmq_pb2.Nothing(), metadata=self._metadata)
        try:
            next(self._held)
        except grpc.RpcError as error:
            raise CannotRead(self._error_text(error)) from None

    def describe(self) -> Description:
        try:
            answer = self._stub.DescribeLog(qmq_pb2.Nothing(), metadata=self._metadata, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise CannotRead(self._error_text(error)) from None
        chain = answer.start_chain if answer.HasField("start_chain") else None
        damaged = tuple((damage.begin, damage.end, damage.reason) for damage in answer.damaged)
        return Description(
            answer.log_start, answer.log_end, answer.high_watermark, chain, tuple(answer.segments), damaged=damaged
        )

    def bases_now(self) -> Sequence[int]:
        return self.describe().segments

    def index(self, base: int) -> ClosedIndex | None:
        try:
            return ClosedIndex(self._derived(base, index_only=True).index, base)
        except ValueError:
            return None

    def read_until(self, limit: int) -> None:
        self._cancel()
        self._limit = limit

    def frame(self, offset: int, size: int) -> bytes:
        """Read only this frame: a cancelled stream would already have sent more."""
        request = qmq_pb2.ReadLogRequest(begin=offset, end=offset + size)
        try:
            return b"".join(chunk.data for chunk in self._stub.ReadLog(request, metadata=self._metadata))[:size]
        except grpc.RpcError as error:
            if error.code() in _DAMAGE:
                raise OSError(self._error_text(error)) from None
            raise CannotRead(self._error_text(error)) from None

    def derived(self, base: int) -> Derived:
        return self._derived(base)

    def _derived(self, base: int, *, index_only: bool = False) -> Derived:
        """Read files from the broker; earlier versions return none."""
        request = qmq_pb2.ReadDerivedRequest(base=base, index_only=index_only)
        try:
            parts = list(self._stub.ReadDerived(request, metadata=self._metadata))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return NOTHING
            raise CannotRead(self._error_text(error)) from None
        return Derived(b"".join(part.index for part in parts), b"".join(part.snapshot for part in parts))

    def window(self, offset: int, size: int) -> bytes:
        """Return whole frames from `offset` on, or nothing if the next frame is elsewhere. See `Storage.window`."""
        if self._stream is None or offset != self._next:
            self._open(offset)
        parts: list[bytes] = []
        have, wanted = 0, min(size, BROKER_WINDOW_BYTES)
        while have < wanted and (chunk := self._peek()) is not None and chunk.offset == offset + have:
            parts.append(chunk.data)
            have += len(chunk.data)
            self._waiting = None
        self._next = offset + have
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _open(self, offset: int) -> None:
        self._cancel()
        request = qmq_pb2.ReadLogRequest(begin=offset, end=self._limit)
        self._stream = self._stub.ReadLog(request, metadata=self._metadata)
        self._next = offset

    def _peek(self) -> Any:
        """Return the stream's next chunk without consuming it; None at the log's end."""
        if self._waiting is None and self._stream is not None:
            try:
                self._waiting = next(self._stream, None)
            except grpc.RpcError as error:
                self._stream = None
                text = self._error_text(error)
                if error.code() in _DAMAGE:
                    raise OSError(text) from None
                raise CannotRead(text) from None
        return self._waiting

    def _error_text(self, error: Any) -> str:
        return f"broker {self._address}: {error.code().name}: {error.details()}"

    def resume(self, offset: int) -> int:
        if self._stream is None or self._next != offset:
            self._open(offset)
        chunk = self._peek()
        return OFFSET_MAX if chunk is None else max(chunk.offset, offset + 8)

    def starts_on_frame(self, offset: int) -> bool:
        return True

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()  # type: ignore[attr-defined]
        self._stream = None
        self._waiting = None

    def close(self) -> None:
        self._cancel()
        if self._held is not None:
            self._held.cancel()
        self._channel.close()
