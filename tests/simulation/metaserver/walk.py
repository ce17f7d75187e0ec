"""Random walks: two operators and two failing metaservers, interleaved on the same broker groups."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest import mock
from zlib import crc32

from qmq.metaserver.actions import causes
from qmq.metaserver.roles import rules
from tests.simulation.events import KEPT_EVENTS, Violation
from tests.simulation.metaserver.brokers import Box
from tests.simulation.metaserver.database import AWAY, FINE, LOST, Fate, Template, read_tables
from tests.simulation.metaserver.operator import Operator
from tests.simulation.metaserver.oracle import Key, differing
from tests.simulation.metaserver.world import Errand, World, add_groups, place, populate
from tests.simulation.outcome import Outcome, failure_of
from tests.simulation.steering import UNSTEERED, Steering

FATES = [FINE] * 10 + [
    LOST,
    LOST,
    AWAY,
    Fate("uncommitted"),
    Fate("hiccup", 2),
    Fate("hiccup", 4),
    *(Fate("broken", at) for at in range(1, 8)),
]

# Values of steps. A list: one of these; a tuple: each of these.
WHO = ["master", "slave", "master", "slave", "spare", *"abcdef"]
BOXES = [*"aabbcdef"]
GROUPS = ["g1", "g1", "g1", "g2", "g3"]
SUBJECTS = ["s1", "s2", "*", "*"]
NUMBERS = [0, 1]
FLAGS = ["false", "false", "true"]
CHOICES = list(range(100))
OFTEN = 0.25
"""Probability that a fault follows a step, in walks with faults."""

ACTIONS = [
    (["AddBroker", "ReplaceBroker"], WHO, GROUPS, NUMBERS, FLAGS, FLAGS),
    ("RemoveBroker", WHO, GROUPS, FLAGS),
    (["SwapRoles", "DrainGroup", "UndrainGroup"], GROUPS),
    ("SetCopies", GROUPS, [2, 3]),
    ("Failover", GROUPS, FLAGS),
    (["MarkReadonlyBrokerGroup", "UnMarkReadonlyBrokerGroup"], GROUPS, SUBJECTS),
    (["AddSubjectBrokerGroup", "RemoveSubjectBrokerGroup"], GROUPS, SUBJECTS, FLAGS),
    ("RemoveSubjectBrokerGroup", GROUPS, "*", "true"),
    ("ExtendSubjectRoute", GROUPS, GROUPS, SUBJECTS),
    ("RemoveSubject", SUBJECTS, FLAGS),
    ("OnOffline", SUBJECTS, ["online", "offline"]),
    (["ListBrokers", "ListBrokerGroups", "ReplicaStatus"],),
]


def pick(values: Any, dice: Random) -> Any:
    if isinstance(values, tuple):
        return tuple(pick(value, dice) for value in values)
    return pick(dice.choice(values), dice) if isinstance(values, list) else values


F = TypeVar("F", bound=Callable[..., None])
STEPS: dict[str, tuple[int, dict[str, Any]]] = {}
"""Step -> (weight, values of its arguments)."""


def step(weight: int, **values: Any) -> Callable[[F], F]:
    def note(method: F) -> F:
        STEPS[method.__name__] = weight, values
        return method

    return note


FAULTS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {}
"""Kind -> its faults, as (method, weight, values of its arguments)."""


def fault(kind: str, weight: int, **values: Any) -> Callable[[F], F]:
    def note(method: F) -> F:
        FAULTS.setdefault(kind, []).append((method.__name__, weight, values))
        return method

    return note


Ideas = list[tuple[str, dict[str, str]]]


class Walk:
    """One walk. Each step and each fault is a method."""

    def __init__(self, template: Template) -> None:
        self.world = World(template)
        self.operators: list[Errand | None] = [None, None]

    def begin(self, populated: bool) -> None:
        self.world.start()
        if populated:
            populate(self.world)

    def do(self, name: str, words: dict[str, Any]) -> None:
        getattr(self, name)(**words)
        self.world.oracle.check_brokers()

    @step(2, who=NUMBERS, at=NUMBERS, action=ACTIONS)
    def operate(self, who: int, at: int, action: tuple[Any, ...]) -> None:
        server = self.world.servers[at]
        if self.world.busy(self.operators[who]) or server.process is None:
            self.proceed(0, FINE)
            return
        self.operators[who] = self.world.operate(server, action[0], self.words(*action), f"operator {who}")

    @step(
        5,
        group=GROUPS,
        about=["roles", "roles", "routes", "marks"],
        choices=(CHOICES, CHOICES),
        at=(NUMBERS, NUMBERS),
    )
    def both_operate(self, group: str, about: str, choices: tuple[int, int], at: tuple[int, int]) -> None:
        """Let both operators order something likely for the same group, at the same moment."""
        for who, (choice, number) in enumerate(zip(choices, at)):
            server = self.world.servers[number]
            if about == "routes" and who:
                group = {"g1": "g2", "g2": "g1"}.get(group, group)  # each removes another group
            likely = getattr(self, f"likely_{about}")(group, choice // 10)
            if likely and not self.world.busy(self.operators[who]) and server.process:
                what, words = likely[choice % len(likely)]
                self.operators[who] = self.world.operate(server, what, words, f"operator {who}")

    def likely_roles(self, group: str, choice: int) -> Ideas:
        """Return the orders that make sense for the roles of a group."""
        roles = self.world.oracle.decided.roles_of(group)
        master, *slaves = [self.world.brokers.boxes[key[0]] if key else None for key in (roles.master, *roles.slaves)]
        slaves.sort(key=lambda box: box.name)
        slave = slaves[choice % len(slaves)] if slaves else None
        spares = [box for box in self.world.brokers.boxes.values() if box.key not in self.world.oracle.decided.places]
        spare = spares[choice % len(spares)] if spares else self.world.brokers.boxes["f"]
        ideas = [
            ("AddBroker", place(spare, group, role)) for role, holder in enumerate([master, slave]) if holder is None
        ]
        if master and slave and (master.process or slave.process):
            ideas += [("SwapRoles", {"brokerGroup": group, "to": slave.name if choice % 2 else ""})] * 3
        if slave and (not master or not master.process):
            ideas += [("Failover", {"brokerGroup": group})] * 3
        if len(slaves) > 1:
            ideas += [("SetCopies", {"brokerGroup": group, "minCopies": str(choice % 2 + 2)})]
        if slave:
            ideas += [("AddBroker", place(spare, group, 1))]
        if slave and not slave.process:
            ideas += [("ReplaceBroker", place(spare, group, 1)), ("ReplaceBroker", place(slave, group, 0))]
            ideas += [("ReplaceBroker", place(slave, group, 0) | {"swap": "true"})]
            ideas += [("RemoveBroker", {"hostname": slave.name, "servePort": "20881", "force": "true"})]
        if master and not slave:
            ideas += [("ReplaceBroker", place(spare, group, 1))]
            ideas += [("RemoveBroker", {"hostname": master.name, "servePort": "20881", "force": "true"})]
        return ideas

    def likely_routes(self, group: str, choice: int) -> Ideas:
        other = next((name for name in self.world.oracle.decided.states if name != group), "g3")
        subject = f"s{choice % 2 + 1}"
        force = {"force": "true"}
        return [
            ("ExtendSubjectRoute", {"relatedSubject": "*", "relatedBrokerGroup": group, "newBrokerGroup": other}),
            ("ExtendSubjectRoute", {"relatedSubject": subject, "relatedBrokerGroup": group, "newBrokerGroup": other}),
            ("AddSubjectBrokerGroup", {"brokerGroup": group, "subject": subject}),
            ("RemoveSubjectBrokerGroup", {"brokerGroup": group, "subject": "*", **force}),
            ("RemoveSubjectBrokerGroup", {"brokerGroup": group, "subject": subject, **force}),
        ]

    def likely_marks(self, group: str, choice: int) -> Ideas:
        words = {"brokerGroup": group, "subject": "*" if choice % 2 else "s1"}
        marks = [("MarkReadonlyBrokerGroup", words), ("UnMarkReadonlyBrokerGroup", words)]
        return marks + [("DrainGroup", {"brokerGroup": group}), ("UndrainGroup", {"brokerGroup": group})]

    @step(4, who=NUMBERS, fate=[LOST, LOST, Fate("uncommitted"), AWAY, Fate("broken", 4), None, None])
    def strike(self, who: int, fate: Fate | None) -> None:
        """Let an operator's change fail, or take long."""
        errand = self.operators[who]
        if errand and self.world.busy(errand) and errand.server.process is errand.process:
            self.world.strike(errand, fate)

    @step(1)
    def release(self) -> None:
        self.world.release()

    def words(self, what: str, *chosen: Any) -> dict[str, str]:
        """Return the parameters of an order, with names of brokers filled in."""
        match what, *chosen:
            case "AddBroker", who, group, role, *_:
                return place(self.box(who, group), group, role)
            case "ReplaceBroker", who, group, role, swap, loss:
                return place(self.box(who, group), group, role) | {"swap": swap, "acceptLoss": loss}
            case "RemoveBroker", who, group, force:
                return {"hostname": self.box(who, group).name, "servePort": "20881", "force": force}
            case "SwapRoles" | "DrainGroup" | "UndrainGroup", group:
                return {"brokerGroup": group}
            case "SetCopies", group, number:
                return {"brokerGroup": group, "minCopies": str(number)}
            case "Failover", group, gone:
                return {"brokerGroup": group, "masterGone": "false" if self.is_old(group) else gone}
            case "MarkReadonlyBrokerGroup" | "UnMarkReadonlyBrokerGroup", group, subject:
                return {"brokerGroup": group, "subject": subject}
            case "AddSubjectBrokerGroup", group, subject, _:
                return {"brokerGroup": group, "subject": subject.replace("*", "s3")}
            case "RemoveSubjectBrokerGroup", group, subject, force:
                return {"brokerGroup": group, "subject": subject, "force": force}
            case "ExtendSubjectRoute", group, other, subject:
                return {"relatedSubject": subject, "relatedBrokerGroup": group, "newBrokerGroup": other}
            case "RemoveSubject", subject, force:
                return {"subject": subject.replace("*", "s3"), "force": force}
            case "OnOffline", subject, state:
                return {"state": state, "subject": subject, "consumerGroup": "cg", "clientId": "*"}
        return {}

    def box(self, who: str, group: str) -> Box:
        boxes = self.world.brokers.boxes
        decided = self.world.oracle.decided
        roles = decided.roles_of(group)
        slave = max(roles.slaves, default=None)
        spare = next((box.key for box in boxes.values() if box.key not in decided.places), None)
        key = {"master": roles.master, "slave": slave, "spare": spare}.get(who) or (who, 0)
        return boxes.get(key[0], boxes["f"])

    @step(1, who=NUMBERS)
    def give_up(self, who: int) -> None:
        """Close the operator's connection before the answer."""
        errand = self.operators[who]
        if errand and errand.task and self.world.busy(errand):
            self.world.note(f"operator gives up: {errand}")
            errand.given_up = True
            errand.task.cancel()
            self.world.run()

    @step(5, which=[0, 1, 2, 3], fate=FATES)
    def proceed(self, which: int, fate: Fate) -> None:
        if self.world.jobs:
            self.world.carry_out(self.world.jobs[which % len(self.world.jobs)], fate)

    @step(2)
    def finish(self) -> None:
        self.world.finish()

    @step(1, group=GROUPS)
    def burn(self, group: str) -> None:
        """Replace the slave's disk by an empty one, and deliver the master's earlier report late."""
        world, roles = self.world, self.world.oracle.decided.roles_of(group)
        keys = roles.master, max(roles.slaves, default=None)
        master, slave = (world.brokers.boxes[key[0]] if key else None for key in keys)
        if master and slave and master.process and slave.process and not world.went_back:
            world.note(f"{slave.name} burns down")
            world.report(master)
            world.stop_box(slave, closes=True)
            world.finish()
            world.brokers.change_disk(slave, None)
            world.start_box(slave, world.servers[0])
            world.finish()
            world.deliver(master)
            world.stop_box(master, closes=False)
            world.wait(0.3)
            world.stop_box(slave, closes=True)
            world.wait(3)

    @step(2, group=["g1", "g2", "g2"], at=NUMBERS, cut=[None, 0, 1], also=[None, 0, 1], how=["stop", "put back"])
    def lose_master(self, group: str, at: int, cut: int | None, also: int | None, how: str) -> None:
        """Stop a master after a last message, and maybe a slave or its disk; an operator orders a failover."""
        world, server, brokers = self.world, self.world.servers[at], self.world.brokers
        master, slaves = self.master_to_lose(group, at, "loses")
        if master is None or not slaves:
            return
        if cut is not None:
            brokers.cut(master, cut)
        brokers.produce(master)
        slave = brokers.boxes[slaves[(also or 0) % len(slaves)][0]]
        if also is not None and (len(slaves) > 1 or how == "put back"):
            world.stop_box(slave, closes=True)
        if also is not None and how == "put back" and not self.is_old(group):
            slave.disk.put_back(1, forgets=bool(at))
            world.start_box(slave, server)
            world.finish()
            world.take_assignments(slave)
        world.stop_box(master, closes=True)
        world.finish()
        if server.process:
            self.operators[0] = world.operate(server, "Failover", {"brokerGroup": group})

    @step(1, group=GROUPS, at=NUMBERS, number=NUMBERS)
    def doubt(self, group: str, at: int, number: int) -> None:
        """Cut a running master off from the metaservers and its slaves; it goes on while roles change."""
        world, server, brokers = self.world, self.world.servers[at], self.world.brokers
        master, slaves = self.master_to_lose(group, at, "loses touch with")
        if master is None:
            return
        for _ in slaves:
            brokers.cut(master, 0)
        master.is_cut_off = True
        world.disconnect(master)
        world.wait(2.2)
        if server.process:
            self.operators[0] = errand = world.operate(server, "Failover", {"brokerGroup": group})
            while job := next((job for job in world.jobs if job.whose is errand and not job.writes), None):
                world.carry_out(job)
            brokers.sync(master, number)
            brokers.produce(master)
        master.is_cut_off = False

    def master_to_lose(self, group: str, at: int, loses: str) -> tuple[Box | None, list[Key]]:
        """Let the master and its slaves catch up; return them if a slave follows and the first operator can act."""
        world, roles = self.world, self.world.oracle.decided.roles_of(group)
        master = world.brokers.boxes[roles.master[0]] if roles.master else None
        if world.servers[at].process is None or master is None or not world.brokers.sync(master):
            return None, []
        if world.busy(self.operators[0]):
            return None, []
        world.note(f"{group} {loses} its master, {master.name}")
        world.wait(0.6)
        return master, sorted(roles.slaves)

    def is_old(self, group: str) -> bool:
        """Whether a disk of the group was put back and is not whole again.

        No promise covers two such disks, or a disk and the database.
        """
        if self.world.went_back:
            return True
        keys = self.world.oracle.decided.roles_of(group).all
        return any(self.world.brokers.boxes[name].disk.is_old for name, _ in keys)

    @step(2, who=WHO, group=["g1", "g2", "g2"], frames=[1, 1, 2, 4], forgets=[False, True])
    def put_back(self, who: str, group: str, frames: int, forgets: bool) -> None:
        """Put a disk back while no roles change; its points were reported before."""
        world, box = self.world, self.box(who, group)
        if any(map(world.busy, self.operators)) or self.is_old(box.disk.group):
            return
        world.wait(0.6)
        server = next((server for server in world.servers if server.process), None)
        if server is None or not world.remembers(box.disk):
            return
        world.note(f"the disk of {box.name} is put back by {frames}, {forgets=}")
        world.stop_box(box, closes=True)
        box.disk.put_back(frames, forgets=forgets)
        world.start_box(box, server)
        world.finish()
        world.report(box)  # or only the broker itself would refuse to begin
        world.deliver(box)
        world.finish()

    @step(1, group=GROUPS, at=NUMBERS)
    def dissolve(self, group: str, at: int) -> None:
        """Remove all brokers of a group, and with the last one the group."""
        world, server = self.world, self.world.servers[at]
        keys = world.oracle.decided.roles_of(group).all[::-1]
        if server.process is None or not keys or self.world.busy(self.operators[0]):
            return
        for name, _ in keys:
            world.stop_box(world.brokers.boxes[name], closes=True)
        world.wait(3)
        for name, port in keys:
            words = {"hostname": name, "servePort": str(port), "force": "true"}
            if server.process:
                world.operate(server, "RemoveBroker", words)
                world.finish()

    @step(2, seconds=[0.1, 0.3, 1, 3], stuck=[False, False, True])
    def wait(self, seconds: float, stuck: bool) -> None:
        self.world.note(f"{seconds} s go by" + (" without answers" if stuck else ""))
        self.world.wait(seconds, stuck=stuck)

    @step(
        3,
        what=["crash", "crash", "start", "start", "away", "back", "back"],
        at=NUMBERS,
        arrive=[0, 1, 2, 3],
    )
    def server(self, what: str, at: int, arrive: int) -> None:
        """Crash, start or disconnect a metaserver. Some jobs of a crashed one still reach the database."""
        server = self.world.servers[at]
        self.world.note(f"{server.name}: {what}")
        match what:
            case "crash":
                self.world.release()
                under_way = [job for job in self.world.jobs if job.whose.server is server]
                server.kill()
                for job in under_way[arrive:]:
                    self.world.jobs.remove(job)
                for job in under_way[:arrive]:
                    self.world.carry_out(job)
            case "start" if server.process is None:
                server.start()
                self.world.run()
            case "away" | "back":
                server.is_away = what == "away"

    @fault("database", 3)
    def keep_copy(self) -> None:
        self.world.keep_copy()

    @fault("database", 3, which=CHOICES, restarts=[False, False, True])
    def put_database_back(self, which: int, restarts: bool) -> None:
        """Restore an earlier database; metaservers go on meanwhile, or are stopped."""
        world = self.world
        if not world.copies or any(box.disk.is_old for box in world.brokers.boxes.values()):
            return
        self.replace_database(world.copies[-1 - which % min(len(world.copies), 3)], restarts)

    @fault("emptied", 1, restarts=[False, False, True])
    def empty_database(self, restarts: bool) -> None:
        """Put an empty database in place, after all jobs are done."""
        world = self.world
        if world.oracle.decided.terms and not any(box.disk.is_old for box in world.brokers.boxes.values()):
            world.finish()
            world.release()
            world.finish()
            self.replace_database(world.bare, restarts)

    @fault("emptied", 2, at=NUMBERS, who=NUMBERS, keep=["memory", "memory", "database"])
    def adopt_database(self, at: int, who: int, keep: str) -> None:
        self.order(who, at, "AdoptDatabase", {"keep": keep})

    def replace_database(self, copy: Any, restarts: bool) -> None:
        world = self.world
        world.note(f"the database is put back, {restarts=}")
        for server in world.servers if restarts else ():
            world.jobs = [job for job in world.jobs if job.whose.server is not server]
            server.kill()
        world.put_database_back(copy)
        for server in world.servers if restarts else ():
            server.start()
            world.run()

    @fault("database", 6, group=GROUPS, at=NUMBERS, choice=CHOICES, delivered=[True, True, False], restarts=FLAGS)
    def lose_a_change(self, group: str, at: int, choice: int, delivered: bool, restarts: str) -> None:
        """Change roles, with or without brokers receiving them, then restore the database to before."""
        world, server = self.world, self.world.servers[at]
        ideas = self.likely_roles(group, choice // 10)
        if server.process is None or server.is_away or self.world.busy(self.operators[0]) or not ideas:
            return
        world.keep_copy()
        what, words = ideas[choice % len(ideas)]
        self.operators[0] = errand = world.operate(server, what, words)
        world.finish()
        while delivered and world.busy(errand):
            world.wait(0.2)
        if delivered:
            world.wait(0.6)
        self.put_database_back(0, restarts == "true")

    @fault("database", 2, group=GROUPS, at=NUMBERS, who=NUMBERS)
    def adopt(self, group: str, at: int, who: int) -> None:
        """Choose the master of a group with an old row, as Doctor names it, or another broker."""
        keys = self.world.oracle.decided.roles_of(group).all
        if keys:
            host, port = keys[(at + who) % len(keys)]
            words = {"brokerGroup": group, "hostname": host, "servePort": str(port), "force": "false"}
            self.order(who, at, "AdoptRoles", words)

    @fault("fillings", 3, group=GROUPS, at=NUMBERS, who=NUMBERS, mode=["manual", "manual", "automatic"])
    def set_mode(self, group: str, at: int, who: int, mode: str) -> None:
        self.order(who, at, "SetCopies", {"brokerGroup": group, "syncMode": mode})

    @fault("fillings", 3, group=GROUPS, at=NUMBERS, who=NUMBERS, what=["SyncReplica", "SyncReplica", "CancelSync"])
    def order_filling(self, group: str, at: int, who: int, what: str) -> None:
        slaves = sorted(self.world.oracle.decided.roles_of(group).slaves)
        if slaves:
            self.order(who, at, what, {"brokerGroup": group, "host": slaves[at % len(slaves)][0]})

    @fault("fillings", 2, group=GROUPS)
    def empty_slave(self, group: str) -> None:
        self.burn(group)

    @fault("losses", 3, group=GROUPS, at=NUMBERS, number=NUMBERS, swap=FLAGS)
    def accept_loss(self, group: str, at: int, number: int, swap: str) -> None:
        """Stop all brokers of a group and accept a loss: go on with one copy, or with none."""
        keys = self.world.oracle.decided.roles_of(group).all
        if keys and self.world.servers[at].process and not self.world.busy(self.operators[0]):
            for name, _ in keys:
                self.world.stop_box(self.world.brokers.boxes[name], closes=True)
            self.world.wait(0.6)
            box = self.world.brokers.boxes[keys[number % len(keys)][0]]
            self.order(0, at, "ReplaceBroker", place(box, group, 0) | {"swap": swap, "acceptLoss": "true"})

    @fault("losses", 2, group=GROUPS, at=NUMBERS, who=NUMBERS)
    def acknowledge(self, group: str, at: int, who: int) -> None:
        self.order(who, at, "AcknowledgeLoss", {"brokerGroup": group})

    def order(self, who: int, at: int, what: str, words: dict[str, str]) -> None:
        server = self.world.servers[at]
        if server.process and not self.world.busy(self.operators[who]):
            self.operators[who] = self.world.operate(server, what, words, f"operator {who}")

    @step(2, group=GROUPS, what=["stop", "outage", "start"], at=NUMBERS)
    def group(self, group: str, what: str, at: int) -> None:
        """Stop all brokers of a group, at times for longer than the timeout; or start them."""
        self.world.note(f"{group}: {what}")
        for name, _ in self.world.oracle.decided.roles_of(group).all:
            box = self.world.brokers.boxes[name]
            if what != "start" and box.process:
                self.world.stop_box(box, closes=True)
            elif what == "start" and not box.process:
                self.world.start_box(box, self.world.servers[at])
        if what == "outage":
            self.world.wait(3)

    @step(
        2,
        who=WHO,
        group=GROUPS,
        what=["stop", "vanish", "start", "new disk", "old disk", "reconnect"],
        at=NUMBERS,
    )
    def broker(self, who: str, group: str, what: str, at: int) -> None:
        """Stop, start or reconnect a broker, or change the disk in its machine."""
        box, server = self.box(who, group), self.world.servers[at]
        self.world.note(f"{box.name}: {what}, {server.name}")
        match what:
            case "stop" | "vanish" if box.process:
                self.world.stop_box(box, closes=what == "stop")
            case "start" if not box.process:
                self.world.start_box(box, server)
            case "reconnect" if box.process:
                self.world.connect(box, server)
            case "new disk" | "old disk" if not self.world.went_back:
                for other in self.world.brokers.boxes.values():  # late reports of earlier states
                    self.world.report(other)
                self.world.stop_box(box, closes=True)
                self.world.brokers.change_disk(box, None if what == "new disk" else 0)
                self.world.start_box(box, server)

    @step(1, seconds=[0.1, 1, 3])
    def all_is_well(self, seconds: float) -> None:
        """Let a quiet time pass: all brokers with a role run, and copies catch up."""
        world = self.world
        world.note(f"all is well for {seconds} s")
        for server in world.servers:
            server.is_away = False
            if server.process is None:
                server.start()
                world.run()
        world.finish()
        for key in list(world.oracle.decided.places):
            box = world.brokers.boxes[key[0]]
            if not box.process and not box.is_lost:
                world.start_box(box, world.servers[0])
        world.wait(seconds)
        for box in world.brokers.boxes.values():
            if world.brokers.sync(box):
                world.brokers.produce(box)
        world.wait(1)

    @step(2, name=BOXES, what=["report", "deliver", "take_assignments", "sync", "produce", "cut"], number=NUMBERS)
    def broker_does(self, name: str, what: str, number: int) -> None:
        box, brokers = self.world.brokers.boxes[name], self.world.brokers
        self.world.note(f"{name}: {what}")
        if what == "sync":
            brokers.sync(box, number)
        elif what == "cut":
            brokers.cut(box, number)
        elif what == "produce":
            brokers.produce(box)
        else:
            getattr(self.world, what)(box)

    @step(1, at=NUMBERS, subject=["s1", "s2", "s3"])
    def client_asks(self, at: int, subject: str) -> None:
        server = self.world.servers[at]
        if server.process:
            self.world.ask_route(server, subject)

    def converge(self) -> None:
        for server in self.world.servers:
            server.is_away = False
            if server.process is None:
                server.start()
                self.world.run()
        self.world.finish()
        self.world.release()
        self.world.finish()
        self.use_database()
        for _ in range(20):
            decided = self.world.oracle.decided
            self.world.wait(1.7)
            if decided == self.world.oracle.decided:
                break
        for server in self.world.servers:
            for difference in differing(read_tables(self.world.database), server.process.registry):
                raise Violation(f"{server.name} has {difference}")
        self.check_groups_work()

    def use_database(self) -> None:
        """Let Doctor's AdoptDatabase bring a database back into use."""
        world, servers = self.world, self.world.servers
        if not world.went_back:
            return
        for keep in ("memory", "database"):
            for server in servers:
                world.wait(1.7)
                if not any(each.process.all._database.set_aside_because for each in servers):
                    return
                operator = Operator(world, server, "")
                if server.process.all._database.set_aside_because and keep not in operator.adopted_database():
                    raise Violation(f"Doctor does not name AdoptDatabase --keep={keep}")
                operator.type("AdoptDatabase", {"keep": keep})
        world.wait(1.7)
        if aside := [each.name for each in servers if each.process.all._database.set_aside_because]:
            raise Violation(f"{aside} use no database after every decision")

    def check_groups_work(self) -> None:
        """Check, without faults, that each group accepts produces, or that Doctor names a remedy that works."""
        world, dice = self.world, self.world.loop.rng
        self.all_is_well(3)
        for group in list(world.oracle.decided.states):
            self.lose_for_good(group, how_many=dice.choice([0, 0, 1, 1, 2]))
        self.all_is_well(1)
        world.wait(1.5)
        self.check_assignments()
        self.check_losses_are_shown()
        for group in self.not_at_work():
            operator = Operator(world, world.servers[0], group)
            operator.bring_to_work(lambda group=group: group not in self.not_at_work())

    def check_assignments(self) -> None:
        """Check that brokers' newest assignments equal the tables."""
        decided = self.world.oracle.decided
        for box in self.world.brokers.boxes.values():
            part = box.process.assignment if box.process and box.name in self.world.streams else None
            if part is None or part.term != decided.terms.get(part.broker_group):
                continue
            sent = part.min_copies, part.sync_mode, {(order.fill_id, order.allowed) for order in part.fills}
            mode, orders = decided.fillings[part.broker_group]
            if sent != (decided.min_copies[part.broker_group], mode, orders):
                raise Violation(f"{box.name} was sent {sent}, and the tables hold {mode}, {sorted(orders)}")

    def check_losses_are_shown(self) -> None:
        for group, term in self.world.oracle.decided.losses.items():
            if term and not Operator(self.world, self.world.servers[0], group).is_told_of_a_loss():
                raise Violation(f"Doctor does not show the loss of {group} in term {term}")

    def lose_for_good(self, group: str, how_many: int) -> None:
        """Lose machines of a group, with their disks."""
        keys = self.world.oracle.decided.roles_of(group).all
        for name, _ in self.world.loop.rng.sample(keys, min(how_many, len(keys))):
            box = self.world.brokers.boxes[name]
            self.world.note(f"{name} of {group} is lost for good")
            self.world.stop_box(box, closes=True)
            box.is_lost = True

    def not_at_work(self) -> list[str]:
        """Return the groups that are readonly although no operator ordered that."""
        decided, registry = self.world.oracle.decided, self.world.servers[0].process.registry
        wanted = {name for name, (draining, *_) in decided.states.items() if draining}
        wanted |= {group for subject, group in decided.marks if subject == "*"}
        groups = registry.directory.groups
        with self.world.loop.own_clock():
            return [name for name, group in groups.items() if name not in wanted and not registry.is_writable(group)]


NAMES = [name for name, (weight, _) in STEPS.items() for _ in range(weight)]
ROTA = "", "database", "", "fillings", "", "losses", "", "emptied"
"""Kind of faults by seed; half of the walks have none of these."""
STEPS_OF_A_WALK = 50


def take_walk(walk: Walk, seed: int, skipped: frozenset[int], faults: str) -> None:
    """Take the steps of a seed, then repair everything and check that all groups return to work.

    Args:
        skipped: numbers of steps that are drawn and not taken.
        faults: kind of the faults that follow steps. They have dice of their own, so other walks do not change.
    """
    dice, world = Random(seed), walk.world
    more, others = Random(f"{seed} {faults}"), [fault for fault in FAULTS.get(faults, ()) for _ in range(fault[1])]

    def take(name: str, offered: dict[str, Any], rng: Random) -> None:
        words = {key: pick(values, rng) for key, values in offered.items()}
        if world.counts["strike"] not in skipped:
            walk.do(name, words)
        world.counts["strike"] += 1

    walk.begin(populated=dice.random() < 0.8)
    for _ in range(STEPS_OF_A_WALK):
        name = dice.choice(NAMES)
        take(name, STEPS[name][1], dice)
        if others and more.random() < OFTEN:
            name, _, offered = more.choice(others)
            take(name, offered, more)
    walk.converge()


def simulate(seed: int, *, steering: Steering = UNSTEERED, faults: str | None = None, copies_max: int = 3) -> Outcome:
    """Run one walk to its end; a failure is in the outcome.

    Args:
        steering: its fault is the kind of faults.
        faults: the same, may be none; None: by seed.
        copies_max: limit of copies in a group, of six brokers in all.
    """
    kind = steering.fault or ROTA[seed % len(ROTA)] if faults is None else faults
    with contextlib.ExitStack() as stack:
        for module in (rules, causes):
            stack.enter_context(mock.patch.object(module, "COPIES_MAX", copies_max))
        walk = Walk(_template())
        stack.callback(walk.world.close)
        failure = failure_of(lambda: take_walk(walk, seed, steering.skipped, kind))
        world = walk.world
        recent = tuple(world.trace[-KEPT_EVENTS:]) if failure else ()
        return Outcome(
            seed,
            crc32(world.story().encode()),
            len(world.trace),
            world.oracle.commits,
            sum(len(owed.messages) for owed in world.brokers.acknowledged.values()),
            world.counts,
            failure=failure,
            recent=recent,
        )


@functools.cache
def _template() -> Template:
    with tempfile.TemporaryDirectory(prefix="qmq-metaserver-") as folder:
        template = Template(Path(folder))
        add_groups(template)
        return template
