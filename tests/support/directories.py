"""Shell. Databases of a metaserver for tests: groups with two brokers each, and short ways to ask and change."""

from __future__ import annotations

from dataclasses import replace

from qmq.metaserver.model import Broker
from qmq.metaserver.roles import rules
from qmq.metaserver.storage.changes import SetRoles
from qmq.metaserver.storage.repository import Repository
from qmq.types import Role


def brokers_of(group: str) -> tuple[Broker, Broker]:
    """Return the master and slave that `add_group` adds."""
    master = Broker(group, Role.MASTER, f"{group[:98]}-a", "10.0.0.1", 20881, 20882)
    return master, replace(master, role=Role.SLAVE, hostname=f"{group[:98]}-b", ip="10.0.0.2")


def add_group(repository: Repository, group: str) -> None:
    """Add a broker group; its term is 2 after two changes."""
    for broker in brokers_of(group):
        repository.change([SetRoles(rules.add_broker(repository.load(), broker))])
