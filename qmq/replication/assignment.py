"""Core. Assignment: a broker's role in its group, from the metaserver's row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from qmq.crc import of_known_fields
from qmq.operator_limits import OperatorLimits
from qmq.types import Role


class SyncMode(StrEnum):
    AUTOMATIC = "automatic"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class FillOrder:
    """An operator's order about one filling: SyncReplica allows it, CancelSync stops it."""

    fill_id: str
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class FillOrders:
    """Slaves of a group that may be filled: all, or those that an operator named. Made from each assignment.

    A slave's copy has to be *filled* if it is empty, was never whole, or ends before the master's oldest segment. A
    slave that continues where its log ends only catches up. A filling has an id, `incarnation/n`, where n counts the
    earlier fillings of that data directory. So an order about one filling has no effect on the next and need not be
    revoked.
    """

    mode: SyncMode = SyncMode.AUTOMATIC
    orders: tuple[FillOrder, ...] = ()

    @classmethod
    def of(cls, mode: str, orders: Iterable[tuple[str, bool]]) -> FillOrders:
        """Return the orders of an assignment. An unknown mode, of a later version, fills nothing by itself."""
        is_automatic = mode in ("", SyncMode.AUTOMATIC)
        return cls(
            SyncMode.AUTOMATIC if is_automatic else SyncMode.MANUAL,
            tuple(FillOrder(fill_id, is_allowed) for fill_id, is_allowed in orders),
        )

    def may_begin(self, fill_id: str) -> bool:
        """Whether this filling may begin, or continue over a new connection."""
        order = self._order_of(fill_id)
        return self.mode is SyncMode.AUTOMATIC if order is None else order.is_allowed

    def is_cancelled(self, fill_id: str) -> bool:
        """Whether this filling has to stop. A change of the mode stops no filling under way."""
        order = self._order_of(fill_id)
        return order is not None and not order.is_allowed

    def _order_of(self, fill_id: str) -> FillOrder | None:
        return next((order for order in self.orders if order.fill_id == fill_id), None)


@dataclass(frozen=True, slots=True)
class Address:
    """Addresses of a broker for other processes."""

    ip: str
    serve_port: int
    sync_port: int
    control_port: int

    @property
    def sync_place(self) -> tuple[str, int]:
        """Address to which the slave connects."""
        return self.ip, self.sync_port


@dataclass(frozen=True, slots=True)
class Assignment:
    """Roles in `group` as of `term`. The newest assignment is stored for a start without the metaserver."""

    group: str
    term: int
    role: Role
    master: Address | None = None
    slaves: tuple[Address, ...] = ()
    readonly_subjects: tuple[str, ...] = ()
    offline: tuple[tuple[str, str, str], ...] = ()
    """(subject, consumer group, consumer) that operators switched off; `*` stands for all."""
    min_copies: int = 2
    """Copies, the master's included, that have a frame on disk before it is acknowledged."""
    limits: tuple[OperatorLimits, ...] = ()
    sync_mode: str = SyncMode.AUTOMATIC
    fills: tuple[tuple[str, bool], ...] = ()
    """(id of a filling, whether an operator allows it)."""
    awaited: tuple[str, ...] = ()
    """`hostname:serve_port` of slaves that were in sync at the last report: a restarted master waits for them. Not
    stored: only the metaserver's answer counts.
    """

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
        """Whether messages may be acknowledged without this copy. Then a missing message is no sign of a lost one."""
        return self.role == Role.SLAVE and 1 + len(self.slaves) > self.min_copies

    def meets_as(self, other: Assignment) -> bool:
        """Return whether the sync addresses are equal. Other ports of a peer become known when it registers. The link
        stays open then: without it the group would be readonly.
        """
        return {peer.sync_place for peer in self.peers} == {peer.sync_place for peer in other.peers}

    def to_json(self) -> dict[str, Any]:
        lists = {
            "slaves": [asdict(slave) for slave in self.slaves],
            "readonly_subjects": list(self.readonly_subjects),
            "offline": [list(rule) for rule in self.offline],
            "limits": [limit._asdict() for limit in self.limits],
            "fills": [list(order) for order in self.fills],
        }
        fields = asdict(self) | {"role": int(self.role)} | lists
        del fields["awaited"]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Assignment:
        """Read the result of `to_json`, also of versions with one "slave"."""
        master, slave = fields["master"], fields.get("slave")
        slaves = fields["slaves"] if "slaves" in fields else [slave] if slave else []
        return cls(
            fields["group"],
            fields["term"],
            Role(fields["role"]),
            of_known_fields(Address, master) if master else None,
            tuple(of_known_fields(Address, address) for address in slaves),
            tuple(fields["readonly_subjects"]),
            tuple((subject, group, consumer) for subject, group, consumer in fields.get("offline", ())),
            fields.get("min_copies", 2),
            tuple(of_known_fields(OperatorLimits, limits) for limits in fields.get("limits", ())),
            fields.get("sync_mode", SyncMode.AUTOMATIC),
            tuple((fill_id, is_allowed) for fill_id, is_allowed in fields.get("fills", ())),
        )
