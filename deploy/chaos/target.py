"""Shell. Target of faults: a running cluster, the random numbers, and the faults so far."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.deploy.chaos.records import Record
from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import BrokerPlan
from qmq.errors import OperatorError


@dataclass
class Target:
    """Made for one run; used by one thread."""

    cluster: Cluster
    rng: random.Random
    records: list[Record] = field(default_factory=list)
    """Faults and windows so far."""
    refused: list[str] = field(default_factory=list)
    """Operators' commands that were refused, with the reason. Some refusals are intended."""

    def pause(self, least_s: float, most_s: float) -> None:
        time.sleep(self.rng.uniform(least_s, most_s))

    def copies(self, group: str) -> tuple[BrokerPlan, BrokerPlan]:
        """Return the present master and slave of a group."""
        return self.cluster.broker(group, "master"), self.cluster.broker(group, "slave")

    def any_copy(self, group: str) -> BrokerPlan:
        return self.rng.choice(self.copies(group))

    def command(self, action: str, **parameters: object) -> bool:
        """Run an operator's command; return whether it was accepted."""
        try:
            self.cluster.manage(action, **parameters)
        except OperatorError as error:
            self.refused.append(str(error))
            return False
        return True


def nothing_is_missing() -> str:
    return ""


class Strike(NamedTuple):
    """Kind of fault. `hit` strikes a broker group and returns once the fault is removed."""

    hit: Callable[[Target, str], None]
    missing: Callable[[], str] = nothing_is_missing
    """Returns the missing program or right for this fault; empty: none."""
