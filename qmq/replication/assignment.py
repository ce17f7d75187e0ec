"""Core. A broker's part in its group, as the metaserver's row says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qmq.operator_limits import OperatorLimits
from qmq.types import Role


class SyncMode(StrEnum):
    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class FillOrder:
    """What an operator said of one filling: SyncReplica allows it, CancelSync stops it."""

    fill_id: str
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class FillOrders:
    """What the metaserver's row says about the slaves of a group. Made of each assignment."""

    mode: SyncMode = SyncMode.AUTOMATIC
    orders: tuple[FillOrder, ...] = ()

    @classmethod
    def of(cls, mode: str, orders: Iterable[tuple[str, bool]]) -> FillOrders:
        """A mode of a later version fills nothing by itself."""
        is_automatic = mode in ("", SyncMode.AUTOMATIC)
        return cls(
            SyncMode.AUTOMATIC if is_automatic else SyncMode.MANUAL,
            tuple(FillOrder(fill_id, is_allowed) for fill_id, is_allowed in orders),
        )

    def may_begin(self, fill_id: str) -> bool:
        """Whether this filling may begin, or go on over a new connection."""
        said = self._said(fill_id)
        return self.mode is SyncMode.AUTOMATIC if said is None else said.is_allowed

    def is_cancelled(self, fill_id: str) -> bool:
        """Whether this filling has to stop. That the mode is another one now stops none that is under way."""
        said = self._said(fill_id)
        return said is not None and not said.is_allowed

    def _said(self, fill_id: str) -> FillOrder | None:
        return next((order for order in self.orders if order.fill_id == fill_id), None)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the other processes reach a broker."""

    ip: str
    serve_port: int
    sync_port: int
    control_port: int

    @property
    def sync_place(self) -> tuple[str, int]:
        """Where the slave connects."""
        return self.ip, self.sync_port


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who is what in `group` as of `term`; the newest one is remembered for a start without the metaserver."""

    group: str
    term: int
    role: Role
    master: Address | None = None
    slaves: tuple[Address, ...] = ()
    readonly_subjects: tuple[str, ...] = ()
    offline: tuple[tuple[str, str, str], ...] = ()
    """(subject, consumer group, consumer) that operators switched off; `*` stands for all."""
    min_copies: int = 2
    """So many copies, the master's among them, have a frame on disk when it is acknowledged."""
    limits: tuple[OperatorLimits, ...] = ()
    sync_mode: str = SyncMode.AUTOMATIC
    fills: tuple[tuple[str, bool], ...] = ()
    """(id of a filling, whether an operator allows it)."""
    awaited: tuple[str, ...] = ()
    """`hostname:serve_port` of slaves that were in sync at the last report: a master that has restarted waits for them.
    Not remembered: only the metaserver's answer counts."""

    @property
    def fill_orders(self) -> FillOrders:
        return FillOrders.of(self.sync_mode, self.fills)

    @property
    def peers(self) -> tuple[Address, ...]:
        """The brokers that this one replicates with: a master's slaves, a slave's master."""
        if self.role == Role.MASTER:
            return self.slaves
        return () if self.master is None else (self.master,)

    @property
    def may_be_behind(self) -> bool:
        """Whether messages are acknowledged without this copy, if others have them: it proves nothing that it lacks
        them."""
        return self.role == Role.SLAVE and 1 + len(self.slaves) > self.min_copies

    def meets_as(self, other: Assignment) -> bool:
        """Return whether the copies meet at the same places. The other ports of a peer are told once it has registered;
        a link that stands is not given up for these: the group would be readonly until it is there again."""
        return {peer.sync_place for peer in self.peers} == {peer.sync_place for peer in other.peers}

    def to_json(self) -> dict[str, Any]:
        lists = {
            "slaves": [asdict(slave) for slave in self.slaves],
            "readonly_subjects": list(self.readonly_subjects),
            "offline": [list(rule) for rule in self.offline],
            "limits": [one._asdict() for one in self.limits],
            "fills": [list(order) for order in self.fills],
        }
        fields = asdict(self) | {"role": int(self.role)} | lists
        del fields["awaited"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Assignment:
        """Read what `to_json` of this version, or of one that knew one "slave", wrote."""
        master, slave = fields["master"], fields.get("slave")
        slaves = fields["slaves"] if "slaves" in fields else [slave] if slave else []
        return cls(
            fields["group"],
            fields["term"],
            Role(fields["role"]),
            Address(**master) if master else None,
            tuple(Address(**address) for address in slaves),
            tuple(fields["readonly_subjects"]),
            tuple((subject, group, consumer) for subject, group, consumer in fields.get("offline", ())),
            fields.get("min_copies", 2),
            tuple(OperatorLimits(**one) for one in fields.get("limits", ())),
            fields.get("sync_mode", SyncMode.AUTOMATIC),
            tuple((fill_id, is_allowed) for fill_id, is_allowed in fields.get("fills", ())),
        )
