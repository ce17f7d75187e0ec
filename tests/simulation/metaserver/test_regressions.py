"""Faults that walks found, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.metaserver.database import Template
from tests.simulation.metaserver.operator import Operator
from tests.simulation.metaserver.oracle import DONE, REFUSED, UNKNOWN
from tests.simulation.metaserver.world import Errand, World, add_groups, place, populate


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    template = Template(tmp_path_factory.mktemp("schema"))
    add_groups(template)
    world = World(template)
    world.start()
    populate(world)
    yield world
    world.close()
    template.close()


def until_it_writes(world: World, errand: Errand) -> None:
    while job := next((job for job in world.jobs if job.whose is errand and not job.writes), None):
        world.carry_out(job)


def carry_out_all(world: World, errand: Errand) -> None:
    """Carry out all jobs of its metaserver until it is answered; those of the other one wait."""
    while world.busy(errand):
        world.carry_out(next(job for job in world.jobs if job.whose.server is errand.server))


def extend(world: World) -> Errand:
    """Extend all subjects of g1 to g2, up to the write. s1 and s2 have both groups by then, s3 and s4 only g1."""
    words = {"relatedSubject": "*", "relatedBrokerGroup": "g1", "newBrokerGroup": "g2"}
    extending = world.operate(world.servers[0], "ExtendSubjectRoute", words)
    until_it_writes(world, extending)
    assert extending.commits == 0
    return extending


def test_extending_all_subjects_survives_a_concurrent_removal(world: World) -> None:
    """Weakness 6: routes that had the group already were not compared, and lost it."""
    extending = extend(world)
    removing = {"subject": "*", "brokerGroup": "g2", "force": "true"}
    removed = world.operate(world.servers[1], "RemoveSubjectBrokerGroup", removing)
    carry_out_all(world, removed)
    world.finish()
    assert (removed.status, extending.status) == (DONE, DONE)
    assert world.oracle.decided.serving("g2") == {"s1", "s2", "s3", "s4"}


def test_extending_all_subjects_includes_a_new_one(world: World) -> None:
    """Weakness 6: `*` means every subject at the moment of the write."""
    extending = extend(world)
    known, subject = world.oracle.decided.serving("g1"), 10
    while world.oracle.decided.serving("g1") == known:
        carry_out_all(world, world.ask_route(world.servers[1], f"s{subject}"))
        subject += 1
    world.finish()
    assert extending.status == DONE
    assert world.oracle.decided.serving("g1") <= world.oracle.decided.serving("g2")


def test_refused_change_is_not_stored_later(world: World) -> None:
    """Weakness 34: the tool gave up and the server went on. Its thread may begin after every caller has gone."""
    marking = world.operate(world.servers[0], "MarkReadonlyBrokerGroup", {"brokerGroup": "g1", "subject": "s1"})
    world.strike(marking, None)
    world.wait(10)
    assert marking.status == REFUSED
    world.release()
    world.finish()
    assert not world.oracle.decided.marks


def test_two_operators_set_the_same_sync_mode(world: World) -> None:
    """The oracle took the second row of the audit trail for one without a change."""
    words = {"brokerGroup": "g1", "syncMode": "manual"}
    both = [world.operate(server, "SetCopies", words) for server in world.servers]
    for setting in both:
        until_it_writes(world, setting)
    world.finish()
    assert [setting.status for setting in both] == [DONE, DONE]


def test_late_read_of_earlier_state_is_ignored(world: World) -> None:
    """Weakness 6: an action reads the database after it was ordered, also when the database stood still."""
    first, second = world.servers
    assert first.process
    asked = first.process.all._database
    world.wait(2 * asked._timeout_ms / 1000, stuck=True)
    assert asked._probe is not None and not asked._probe.done(), "it asks whether the database is back"
    question = [job for job in world.jobs if job.whose.server is first and not job.writes][-1]
    deliver = world.carry_out_unheard(question)
    removing = {"subject": "s1", "brokerGroup": "g2", "force": "true"}
    carry_out_all(world, world.operate(second, "RemoveSubjectBrokerGroup", removing))
    assert world.oracle.decided.routes["s1"] == {"g1"}
    words = {"relatedSubject": "s1", "relatedBrokerGroup": "g1", "newBrokerGroup": "g2"}
    extending = world.operate(first, "ExtendSubjectRoute", words)
    world.wait(asked._timeout_ms / 1000, stuck=True)  # or a waiting caller would take the answer
    deliver()
    carry_out_all(world, extending)
    assert world.oracle.decided.routes["s1"] == {"g1", "g2"}


def test_group_removed_during_swap_has_unknown_outcome(world: World) -> None:
    """Weakness 30: an unexpected error has a typed answer."""
    swapping = world.operate(world.servers[0], "SwapRoles", {"brokerGroup": "g1"})
    while not swapping.commits:
        world.carry_out(next(job for job in world.jobs if job.whose is swapping))
    for name in "ab":
        world.stop_box(world.brokers.boxes[name], closes=True)
    world.wait(0.5)
    for name in "ab":  # the new slave first
        words = {"hostname": name, "servePort": "20881", "force": "true"}
        removing = world.operate(world.servers[1], "RemoveBroker", words)
        world.wait(0.2)
        assert removing.status == DONE
    world.wait(1)
    assert swapping.status == UNKNOWN


def test_broker_with_data_of_another_group_is_down(world: World) -> None:
    """It registered each second and kept its place, so Doctor found no fault."""
    for name in "ab":
        world.stop_box(world.brokers.boxes[name], closes=True)
    world.wait(1)
    for name in "ba":
        words = {"hostname": name, "servePort": "20881", "force": "true"}
        world.operate(world.servers[0], "RemoveBroker", words)
        world.finish()
    world.operate(world.servers[0], "AddBroker", place(world.brokers.boxes["a"], "g3", 0))
    world.finish()
    world.start_box(world.brokers.boxes["a"], world.servers[0])
    world.wait(2)
    assert any("its log has the reason" in remedy for remedy in Operator(world, world.servers[0], "g3").doctor())
