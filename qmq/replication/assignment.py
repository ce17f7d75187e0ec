"""Core. A broker's part in its group, as the metaserver's row says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from qmq.types import Role


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
    slave: Address | None = None
    readonly_subjects: tuple[str, ...] = ()
    offline: tuple[tuple[str, str, str], ...] = ()
    """(subject, consumer group, consumer) that operators switched off; `*` stands for all."""

    @property
    def peer(self) -> Address | None:
        """The other broker of the group."""
        return self.slave if self.role == Role.MASTER else self.master

    def meets_as(self, other: Assignment) -> bool:
        """Return whether the copies meet at the same place. The other ports of a peer are told once it has registered;
        a link that stands is not given up for these: the group would be readonly until it is there again."""
        ours, theirs = self.peer, other.peer
        return (ours and ours.sync_place) == (theirs and theirs.sync_place)

    def to_json(self) -> dict[str, Any]:
        lists = {"readonly_subjects": list(self.readonly_subjects), "offline": [list(rule) for rule in self.offline]}
        return asdict(self) | {"role": int(self.role)} | lists

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Assignment:
        master, slave = fields["master"], fields["slave"]
        return cls(
            fields["group"], fields["term"], Role(fields["role"]), Address(**master) if master else None,
            Address(**slave) if slave else None, tuple(fields["readonly_subjects"]),
            tuple((subject, group, consumer) for subject, group, consumer in fields.get("offline", ())),
        )  # fmt: skip
