"""Operator that follows the remedies of Doctor and of refusals until a group accepts produces again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qmq.tools.recover_group import decide, read_copies
from tests.simulation.events import Violation
from tests.simulation.metaserver.brokers import Acknowledged, Box
from tests.simulation.metaserver.oracle import DONE, Key
from tests.simulation.metaserver.world import Server, World, place

FOLLOWED_MAX = 3
"""Maximum of remedies that are followed one after the other."""
ANSWERED_S = 30.0

COMMAND = re.compile(r"(?:tools\.sh|qmq) ([A-Z]\w+)((?: --\w+(?:=\S+)?)*)")
GONE = "gone for good: "
OTHER_DISK = "with another data directory. Give it that one back"
ADDS = re.compile(r"AddBroker adds a (master|slave)$")
HALF_SWAPPED = re.compile(r"^finish it with ReplaceBroker --role=(\d)$")


class Nothing(Exception):
    """A remedy without a command and without work by hand."""


class Operator:
    """Made for one group that is readonly after all faults are over."""

    def __init__(self, world: World, server: Server, group: str) -> None:
        self.world = world
        self.server = server
        self.group = group
        self.followed: list[str] = []

    def bring_to_work(self, is_at_work: Callable[[], bool]) -> None:
        """Follow Doctor's remedies until the group works.

        Raises:
            Violation: the remedies do not lead there.
        """
        while not is_at_work():
            if len(self.followed) == FOLLOWED_MAX:
                named = "; then: ".join(self.followed)
                raise Violation(f"{self.group} is readonly after these remedies: {named}")
            remedies = [remedy for remedy in self.doctor() if remedy]
            if not remedies:
                raise Violation(f"{self.group} is readonly, and Doctor has no remedy")
            self.followed.append(" and ".join(remedies))
            for remedy in remedies:
                self.world.note(f"Doctor: {remedy}")
                self.follow(remedy)
            self.let_all_work()

    def let_all_work(self) -> None:
        """Let copies meet and report."""
        world = self.world
        for _ in range(2):
            world.wait(0.6)
            for box in world.brokers.boxes.values():
                if world.brokers.sync(box):
                    world.brokers.produce(box)
        world.wait(1.1)

    def doctor(self) -> list[str]:
        """Return Doctor's remedies for the group."""
        checks = self.type("Doctor", {})["checks"]
        keys = set(self.keys)
        return [
            check["remedy"]
            for check in checks
            if not check["ok"]
            and check["kind"] != "loss"
            and (self.group in check["name"].split() or keys & set(_keys_in(check)))
        ]

    def adopted_database(self) -> list[str]:
        """Return the sides that Doctor's AdoptDatabase may keep."""
        checks = self.type("Doctor", {})["checks"]
        remedies = [check["remedy"] for check in checks if check["kind"] == "database" and not check["ok"]]
        return re.findall(r"AdoptDatabase --keep=(\w+)", " ".join(remedies))

    def is_told_of_a_loss(self) -> bool:
        checks = self.type("Doctor", {})["checks"]
        return any(check["kind"] == "loss" and self.group in check["name"].split() for check in checks)

    def follow(self, remedy: str) -> None:
        if OTHER_DISK in remedy:
            self.restore_or_do_without(remedy)
        elif "start the brokers that have its log" in remedy and (left := self.unplaced()):
            for box in left:
                self.world.start_box(box, self.server)
        elif found := ADDS.search(remedy):
            self.give_place(0 if found[1] == "master" else 1, "AddBroker")
        elif found := HALF_SWAPPED.match(remedy):
            self.give_place(int(found[1]), "ReplaceBroker")
        else:
            named = remedy.partition(GONE)[2] or remedy
            if "stop the slave, " in named:
                self.stop([box for box in self.boxes if box is not self.master])
            commands = [found for found in COMMAND.finditer(named) if "=HOSTNAME" not in found[2]]
            recovers = [command for command in commands if command[1] == "RecoverGroup"]
            for command in recovers or commands:
                self.type_named(command)
            if not commands and "RecoverGroup" in named:
                self.recover()
            if "its log has the reason" in remedy:
                self.follow_logs()
            self.start_all()

    def type_named(self, command: re.Match[str]) -> None:
        words = dict(f"{word[2:]}=true".split("=")[:2] for word in map(_bare, command[2].split()))
        if command[1] == "RecoverGroup":
            return self.recover(*words.get("gone", "").split(","))
        new = None
        if words.get("hostname") == "NEW":
            new = self.spare()
            words |= {"hostname": new.name, "ip": new.ip}
        self.type(command[1], words)
        if new:
            self.world.start_box(new, self.server)

    def recover(self, *gone: str) -> None:
        """Run RecoverGroup as the tool does, take its steps by hand, and accept the loss it names."""
        answers = (
            self.type("ListBrokers", {"brokerGroup": self.group}),
            self.type("ReplicaStatus", {"brokerGroup": self.group}),
        )
        brokers, (status,) = answers
        if status["acknowledged"] is None:
            return self.world.note("RecoverGroup: the database is away")
        lost = {_name(box) for box in self.boxes if box.is_lost}
        copies = read_copies(brokers, status["replicas"], [], lost | {name for name in gone if name in self.names})
        known = {"term": status["term"], "min_copies": status["minCopies"], "remembered": status["acknowledged"]}
        decision = decide(copies, **known)
        self.world.note(f"RecoverGroup: {'; '.join(decision.steps)}: {decision.command} {dict(decision.words)}")
        for step in decision.steps:
            if step.startswith("stop "):
                stopped = step.removeprefix("stop ").split(", ")
                self.stop([box for box in self.boxes if _name(box) in stopped])
        if decision.command:
            self.accept(decision.command, decision.words, is_loss=decision.needs_acceptance)
        for box in self.boxes:
            if box.is_lost and f"start {_name(box)} with an empty data directory" in decision.steps:
                box.is_lost = False
                self.world.brokers.change_disk(box, None)
        self.start_all()

    def accept(self, command: str, words: Mapping[str, str], *, is_loss: bool) -> None:
        """Type the command that RecoverGroup chose. It gives up no message that a remaining copy has."""
        known = self.world.brokers.acknowledged.setdefault(self.group, Acknowledged())
        owed, given_up = known.messages - known.given_up, set(known.given_up)
        left = {box.name: owed - box.disk.messages for box in self.boxes if not box.is_lost}
        loss = {"acceptLoss": "true"} if is_loss else {}
        answer = self.type(command, {"brokerGroup": self.group, **loss, **words})
        if not loss and answer is None and command == "ReplaceBroker":  # the refusal names this option
            self.type(command, {"brokerGroup": self.group, "acceptLoss": "true", **words})
        lost = known.given_up - given_up
        for name, missing in left.items():
            if missing < lost:
                raise Violation(f"{self.group} gave up {lost}, and {name} lacks {missing or 'nothing'}")

    def restore_or_do_without(self, remedy: str) -> None:
        """The master came with another disk: give its own back, or lose that for good.

        Beside a copy that was put back, no promise covers the loss of another disk.
        """
        world, master = self.world, self.master
        row = world.oracle.decided.places[master.key]
        has_old = any(box.disk.is_old for box in self.boxes if box is not master)
        if world.loop.rng.random() < 0.5 or has_old:
            number = next(at for at, disk in enumerate(master.disks) if disk.incarnation == row.incarnation)
            world.note(f"{master.name} gets its disk back")
            world.stop_box(master, closes=True)
            world.brokers.change_disk(master, number)
            world.start_box(master, self.server)
        else:
            world.note(f"the disk of {master.name} is lost")
            if (command := COMMAND.search(remedy)) is None:
                raise Violation(f"a remedy without a command: {remedy}")
            self.type_named(command)

    def follow_logs(self) -> None:
        """Follow the remedy in a broker's own log."""
        for box in self.boxes:
            if box.process and box.disk.group not in ("", self.group):
                self.world.note(f"{box.name}: start this broker with an empty one")
                self.stop([box])
                self.world.brokers.change_disk(box, None)

    def give_place(self, role: int, command: str) -> None:
        """Give a new broker this role, and start it."""
        spare = self.spare()
        self.type(command, place(spare, self.group, role))
        self.world.start_box(spare, self.server)

    def stop(self, boxes: Sequence[Box]) -> None:
        for box in boxes:
            self.world.stop_box(box, closes=True)
        self.world.wait(0.6)

    def start_all(self) -> None:
        for box in self.boxes:
            if not box.process and not box.is_lost:
                self.world.start_box(box, self.server)

    def type(self, what: str, words: Mapping[str, str]) -> Any:
        """Type a command, await its answer, return its data."""
        world = self.world
        errand = world.operate(self.server, what, words, "the operator on duty")
        world.finish()
        end = world.loop.time() + ANSWERED_S
        while world.busy(errand) and world.loop.time() < end:
            world.wait(0.2)
        if not errand.task.done():
            raise Violation(f"{errand} is not answered")
        answer = errand.task.result()
        if answer.status != DONE:
            world.note(f"  {answer.message}")
            if COMMAND.search(answer.message) and len(self.followed) < FOLLOWED_MAX:
                self.followed.append(answer.message)
                self.follow(answer.message)
        return answer.data

    @property
    def keys(self) -> list[Key]:
        return self.world.oracle.decided.roles_of(self.group).all

    @property
    def names(self) -> list[str]:
        return list(map(_name, self.boxes))

    @property
    def boxes(self) -> list[Box]:
        return [self.world.brokers.boxes[name] for name, _ in self.keys]

    @property
    def master(self) -> Box | None:
        key = self.world.oracle.decided.roles_of(self.group).master
        return self.world.brokers.boxes[key[0]] if key else None

    def unplaced(self) -> list[Box]:
        """Return stopped brokers with a log of the group that have no place."""
        places, boxes = self.world.oracle.decided.places, self.world.brokers.boxes.values()
        with_log = [box for box in boxes if box.disk.group == self.group and box.disk.log and not box.is_lost]
        return [box for box in with_log if box.key not in places and not box.process]

    def spare(self) -> Box:
        """Return a broker without a role, with an empty disk; no directory with a group's log is emptied."""
        world, places = self.world, self.world.oracle.decided.places
        brokers = world.brokers
        free = [box for box in brokers.boxes.values() if box.key not in places and not box.is_lost and not box.disk.log]
        box = free[0] if free else brokers.add_box(f"new{len(brokers.boxes)}")
        if box.process:
            self.stop([box])
        brokers.change_disk(box, None)
        return box


def _bare(word: str) -> str:
    return word.rstrip(".,;:)")


def _name(box: Box) -> str:
    return f"{box.name}:{box.key[1]}"


def _keys_in(check: Mapping[str, Any]) -> list[Key]:
    """Return the brokers that a check of Doctor names."""
    facts = check["facts"]
    return [
        (broker["hostname"], broker["servePort"])
        for broker in [facts, *facts.get("brokers", ())]
        if "hostname" in broker
    ]
