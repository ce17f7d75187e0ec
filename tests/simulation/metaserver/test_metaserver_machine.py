"""Two operators, two metaservers that fail, one database that fails: interleaved at random, 4,000 steps.

`pytest tests/state_machine --hypothesis-profile=long` makes more of them, each time others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from qmq.metaserver.actions import causes
from qmq.metaserver.roles import rules
from tests.simulation.metaserver.database import Template
from tests.simulation.metaserver.machine import Machine, walk
from tests.simulation.metaserver.oracle import Violation
from tests.simulation.metaserver.planted import BUGS
from tests.simulation.metaserver.world import add_groups
from tests.support.planting import Bug, planted

STEPS = 2_400
STEPS_PER_RUN = 50
WALKS = 48
FAULTS = ["", "database", "", "fillings", "", "losses", "", "emptied"]
"""Half of the walks are without those."""
FOUND_WITHIN = 300

MUST_OCCUR = [
    "AddBroker DONE",
    "AddBroker REFUSED",
    "ReplaceBroker DONE",
    "ReplaceBroker REFUSED",
    "SwapRoles DONE",
    "SwapRoles REFUSED",
    "SwapRoles UNKNOWN",
    "RemoveBroker DONE",
    "MarkReadonlyBrokerGroup DONE",
    "RemoveSubjectBrokerGroup DONE",
    "ExtendSubjectRoute DONE",
    "DrainGroup DONE",
    "OnOffline DONE",
    "Failover DONE",
    "Failover REFUSED",
    "SetCopies DONE",
    "SwapRoles WAIT",
    "ReplaceBroker WAIT",
    "AdoptDatabase DONE",
    "SyncReplica DONE",
    "AcknowledgeLoss DONE",
]


@pytest.fixture(autouse=True)
def of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are six brokers, and two groups of them."""
    for module in (rules, causes):
        monkeypatch.setattr(module, "COPIES_MAX", 3)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    template = Template(tmp_path_factory.mktemp("schema"))
    add_groups(template)
    yield template
    template.close()


def counting(template: Template) -> type[Machine]:
    """Return a kind of machine that counts what happens."""

    class Run(Machine):
        steps, examples, counts = 0, 0, Counter[str]()

    Run.template = template
    return Run


def test_what_operators_are_told_is_true_and_no_change_is_half_done(template: Template) -> None:
    """Weakness 6: QMQ's actions read, compute and write without looking again, and do `*` subject by subject.

    Plain dice come farther in as many steps; Hypothesis tells the shortest story.
    """
    done = counting(template)
    for seed in range(WALKS):
        walk(done, seed, STEPS_PER_RUN, FAULTS[seed % len(FAULTS)])
    assert [name for name in MUST_OCCUR if not done.counts[name]] == []
    few = settings(stateful_step_count=STEPS_PER_RUN, max_examples=settings().max_examples // 10)
    run_state_machine_as_test(done, settings=few)  # type: ignore[arg-type]
    assert done.steps >= STEPS


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug, template: Template) -> None:
    kind = type("Run", (Machine,), {"template": template})
    with planted(bug), pytest.raises(Violation) as found:
        for seed in range(bug.first, bug.first + FOUND_WITHIN):
            walk(kind, seed, STEPS_PER_RUN, **bug.kinds)
    print(f"{bug.name}: walk {seed}: {found.value}")
