"""Core. Identity of a copy: one small file, replaced as a whole and fsynced before use.

    broker.json    {"crc": CRC-32 of the rest as sorted JSON, "incarnation": made with the data directory, "group": …,
                    "term": …, "boot": …, "complete": whether this copy once had all frames of its master,
                    "assignment": the last one from the metaserver, or null,
                    "promised": lowest term of a mastership it takes part in; 0: no promise,
                    "owner": hostname:serve_port of the broker that the assignment was for,
                    "fills": number of fillings after which this copy became complete,
                    "instance": of the process that the assignment was for: the place of its directory}

A broker fsyncs a newer epoch here before it acts in it, and refuses every message of an older one from then on. The
last assignment lets it start while the metaserver is down. The acknowledged point is in a file of its own
(`qmq.replication.points`).

Keeps I16.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from qmq.crc import decode_checked, encode_checked, of_known_fields
from qmq.errors import CorruptFrame, require
from qmq.log.disk import Disk
from qmq.replication.points import PointFile
from qmq.types import Epoch

NAME = "broker.json"


@dataclass(frozen=True, slots=True)
class Identity:
    incarnation: str
    group: str = ""
    term: int = 0
    boot: int = 0
    complete: bool = False
    assignment: dict[str, Any] | None = None
    owner: str = ""
    promised: int = 0
    fills: int = 0
    instance: str = ""

    @property
    def epoch(self) -> Epoch:
        """Newest epoch known."""
        return Epoch(self.term, self.boot)

    @property
    def known_term(self) -> int:
        """Newest term known. The last assignment is newer than the epoch until its master's first frame."""
        return max(self.term, self.assignment["term"] if self.assignment else 0)

    @property
    def fill_id(self) -> str:
        """Id of the filling that this copy is in, or that comes next; see `qmq.replication.assignment`."""
        return f"{self.incarnation}/{self.fills}"


class IdentityFile:
    """The identity and its file. Made by main; the only writer."""

    def __init__(self, disk: Disk, *, new_incarnation: str, instance: str = "") -> None:
        """Raises CorruptFrame if the file is damaged: move this data directory aside and let the broker be seeded.

        Args:
            instance: id of this directory at its place (`qmq.log.disk`); a copy of it has another one.
        """
        self._disk = disk
        self.instance = instance
        self.points = PointFile(disk)
        self.value = Identity(new_incarnation)
        if data := disk.read(NAME, 0, disk.size(NAME)):
            self.value = _decode(data)
        else:
            self._put()

    def learn(self, epoch: Epoch) -> None:
        """Make a newer epoch durable; the same one costs nothing."""
        if epoch != self.value.epoch:
            require(epoch > self.value.epoch, "I2: epochs only grow")
            self._change(term=epoch.term, boot=epoch.boot)

    def next_boot(self, term: int, *, above: int = 0) -> Epoch:
        """Begin a mastership in `term`, durably, with a boot that was never used before and is over `above`."""
        boot = max(self.value.boot if term == self.value.term else 0, above) + 1
        self.learn(Epoch(term, boot))
        return Epoch(term, boot)

    def promise(self, term: int) -> None:
        """Promise, durably, to follow and be no master of an older term."""
        if term > self.value.promised:
            self._change(promised=term)

    def completed(self, complete: bool) -> None:
        if complete != self.value.complete:
            self._change(complete=complete, fills=self.value.fills + complete)

    def assigned(self, group: str, assignment: dict[str, Any], owner: str) -> None:
        part = {"group": group, "assignment": assignment, "owner": owner, "instance": self.instance}
        if any(getattr(self.value, name) != value for name, value in part.items()):
            self._change(**part)

    def _change(self, **fields: Any) -> None:
        self.value = replace(self.value, **fields)
        self._put()

    def _put(self) -> None:
        self._disk.put(NAME, encode_checked(asdict(self.value), indent=1))


def _decode(data: bytes) -> Identity:
    try:
        return of_known_fields(Identity, decode_checked(data))
    except (ValueError, TypeError) as error:
        raise CorruptFrame(0, f"{NAME} is damaged: {error}") from None
