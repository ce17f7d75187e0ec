"""Laws of the metaservers, checked after every commit and every answer to an operator.

The oracle compares the tables before and after a commit. It uses no code of the metaserver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from qmq.types import Role
from tests.simulation.events import Violation
from tests.simulation.metaserver.brokers import Brokers
from tests.simulation.metaserver.database import COLUMNS, Tables

Record = Mapping[str, Any]
Key = tuple[str, int]

DONE, REFUSED, UNKNOWN, WAIT = 0, -1, -2, -3

REPEATABLE = {
    "MarkReadonlyBrokerGroup",
    "UnMarkReadonlyBrokerGroup",
    "DrainGroup",
    "UndrainGroup",
    "SetGroupTag",
    "OnOffline",
    "ReplaceBroker",
    "SyncReplica",
    "CancelSync",
}
"""Actions that two operators may order at once: the second one changes nothing. ReplaceBroker may store addresses."""


def records(tables: Tables, name: str) -> list[Record]:
    return [dict(zip(COLUMNS[name], row)) for row in sorted(tables.get(name, ()), key=repr)]


@dataclass(frozen=True)
class Place:
    """Role of one broker in its group."""

    group: str
    role: int
    key: Key
    incarnation: str
    complete: bool


class Roles(NamedTuple):
    """Roles of all brokers of a group."""

    master: Key | None = None
    slaves: frozenset[Key] = frozenset()

    @property
    def all(self) -> list[Key]:
        """Keys of the brokers, the master first."""
        return ([self.master] if self.master else []) + sorted(self.slaves)

    def with_master(self, key: Key) -> Roles:
        """Return the roles after a swap of the master and this slave."""
        return Roles(key, self.slaves - {key} | ({self.master} if self.master else set()))


@dataclass
class Decided:
    """State that operators decide, at one moment."""

    terms: dict[str, int]
    gone: frozenset[str]
    """Groups that were removed; their terms stay in the tables."""
    places: dict[Key, Place]
    marks: frozenset[tuple[str, str]]
    routes: dict[str, frozenset[str]]
    states: dict[str, tuple[bool, bool, str]]
    """Group -> draining, full, tag."""
    offline: frozenset[tuple[str, str, str]]
    tags: dict[str, str]
    min_copies: dict[str, int]
    losses: dict[str, int]
    """Group -> term in which an operator accepted a loss; 0: none, or the loss was acknowledged."""
    fillings: dict[str, tuple[str, frozenset[tuple[str, bool]]]]
    """Group -> (fill mode, (fill id, allowed) of each slave)."""

    @classmethod
    def of(cls, tables: Tables) -> Decided:
        groups = records(tables, "broker_group")
        places = [
            Place(
                row["group_name"],
                row["role"],
                (row["hostname"], row["serve_port"]),
                row["incarnation"],
                bool(row["complete"]),
            )
            for row in records(tables, "broker")
        ]
        orders: dict[str, frozenset[tuple[str, bool]]] = {}
        for row in records(tables, "broker"):
            if row["fill_id"]:
                order = row["fill_id"], bool(row["fill_allowed"])
                orders[row["group_name"]] = orders.get(row["group_name"], frozenset()) | {order}
        masters = [place.group for place in places if place.role == Role.MASTER]
        if len(set(masters)) != len(masters):
            raise Violation("a group has two masters")
        return cls(
            terms={row["group_name"]: row["term"] for row in groups},
            gone=frozenset(row["group_name"] for row in groups if not row["kind"]),
            places={place.key: place for place in places},
            marks=frozenset(
                (row["subject"], row["broker_group"]) for row in records(tables, "readonly_broker_group_setting")
            ),
            routes={
                row["subject_info"]: frozenset(json.loads(row["broker_group_json"]))
                for row in records(tables, "subject_route")
            },
            states={
                row["group_name"]: (bool(row["draining"]), bool(row["is_full"]), row["tag"])
                for row in groups
                if row["kind"]
            },
            offline=frozenset(
                (row["subject_info"], row["consumer_group"], row["client_id"])
                for row in records(tables, "client_offline_state")
            ),
            tags={row["name"]: row["tag"] for row in records(tables, "subject_info")},
            min_copies={row["group_name"]: row["min_copies"] for row in groups if row["kind"]},
            losses={row["group_name"]: row["lost_term"] for row in groups if row["kind"]},
            fillings={
                row["group_name"]: (row["sync_mode"], orders.get(row["group_name"], frozenset()))
                for row in groups
                if row["kind"]
            },
        )

    def changed(self, before: Decided) -> list[str]:
        """Name the fields that differ. A broker's disk and addresses do not count."""
        names = ["terms", "gone", "marks", "routes", "states", "offline", "tags", "min_copies", "losses", "fillings"]
        changed = [name for name in names if getattr(self, name) != getattr(before, name)]
        return changed + (["roles"] if self.roles() != before.roles() else [])

    def serving(self, group: str) -> set[str]:
        return {subject for subject, groups in self.routes.items() if group in groups}

    def roles(self) -> dict[str, Roles]:
        """Return the roles in each group."""
        slaves: dict[str, set[Key]] = {name: set() for name in self.terms}
        masters: dict[str, Key] = {}
        for key, place in self.places.items():
            if place.role == Role.MASTER:
                masters[place.group] = key
            else:
                slaves[place.group].add(key)
        return {name: Roles(masters.get(name), frozenset(slaves[name])) for name in self.terms}

    def roles_of(self, group: str) -> Roles:
        return self.roles().get(group, Roles())

    def master(self, group: str) -> Place | None:
        return next((p for p in self.places.values() if (p.group, p.role) == (group, Role.MASTER)), None)


class Oracle:
    """Made by the world, once per walk."""

    def __init__(self, brokers: Brokers, tables: Tables) -> None:
        self._brokers = brokers
        self._tables = tables
        self.decided = Decided.of(tables)
        self._terms: dict[str, int] = {}
        self._masterships: dict[tuple[str, int], tuple[Roles, int]] = {}
        self._lost: dict[str, int] = {}
        """Groups with a row restored to an older state, with the newest term lost by that."""
        self._found: Violation | None = None
        self._rows: dict[Any, Record] = {}
        self._states: dict[Any, list[Decided]] = {}
        self.commits = 0

    # Commits.

    def committed(self, errand: Any, tables: Tables) -> None:
        """Check a commit. A violation is raised later, outside of the transaction."""
        try:
            before, self.decided = self.decided, Decided.of(tables)
            old_tables, self._tables = self._tables, tables
            self.commits += 1
            self._check(errand, before, self.decided, old_tables, tables)
        except Violation as violation:
            self._found = self._found or violation

    def went_back(self, tables: Tables) -> None:
        """The database was restored to an earlier state. Brokers may have newer terms."""
        before, self.decided, self._tables = self.decided, Decided.of(tables), tables
        for group, term in before.terms.items():
            if term > self.decided.terms.get(group, 0):
                self._lost[group] = max(term, self._lost.get(group, 0))
        self._terms = dict(self.decided.terms)
        for states in self._states.values():
            states.append(self.decided)

    def raise_found(self) -> None:
        if self._found:
            raise self._found

    def check_brokers(self) -> None:
        self._brokers.check_masters()
        if self._brokers.broken:
            self._found = self._found or Violation(self._brokers.broken)
        self.raise_found()

    def _check(self, errand: Any, before: Decided, now: Decided, old: Tables, new: Tables) -> None:
        changed = now.changed(before)
        self._check_terms(errand, now)
        self._check_masters(errand, before, now)
        self._check_who(errand, changed, before, now)
        if self._lost and not before.terms and changed and errand.what != "AdoptDatabase":
            if any(errand.process.newest_terms.values()):
                raise Violation(f"{errand} changed {changed} of a database that lost all groups")
        self._check_losses(errand, before, now)
        self._check_trail(errand, changed, old, new)
        if before.roles() != now.roles() and errand.is_action:
            self._check_roles(errand, before, now)
        if errand.is_action and changed:
            self._check_all_subjects(errand, before, now)
            self._check_routes(errand, before, now)
        for states in self._states.values():
            states.append(now)

    def _check_terms(self, errand: Any, now: Decided) -> None:
        if forgotten := self._terms.keys() - now.terms.keys():
            raise Violation(f"the terms of {forgotten} are lost: {errand}")
        for group, term in now.terms.items():
            if term < self._terms.get(group, 0):
                raise Violation(f"the term of {group} went back from {self._terms[group]} to {term}: {errand}")
            self._terms[group] = term
            roles, m = now.roles()[group], now.min_copies.get(group, 2)
            if group in now.gone:
                continue
            had = self._masterships.setdefault((group, term), (roles, m))
            is_free = not had[0].all or term > errand.process.newest_terms[group]  # no broker had or reported this term
            if had != (roles, m) and self._lost.get(group, 0) >= term and is_free:
                self._masterships[group, term] = had = roles, m
            if had != (roles, m):
                raise Violation(f"term {term} of {group} had brokers and minCopies {had}, now {roles, m}: {errand}")
            if 2 * m <= len(roles.all):
                raise Violation(f"{m} of {len(roles.all)} acknowledge in {group}, so the others may too: {errand}")

    def _check_masters(self, errand: Any, before: Decided, now: Decided) -> None:
        for group in now.gone - before.gone:  # a removed group owes nothing
            self._brokers.owed(group)
            known = self._brokers.acknowledged[group]
            known.given_up |= known.messages
        for group in now.terms:
            master, old = now.master(group), before.master(group)
            if master is None or (old and (old.key, old.incarnation) == (master.key, master.incarnation)):
                continue
            goes_on = old is not None and (old.key, old.incarnation) == (master.key, "")  # on whatever disk
            disk = self._brokers.disk(master.incarnation) or self._brokers.boxes[master.key[0]].disk
            missing = self._brokers.owed(group) - disk.messages
            if errand.what == "AdoptRoles" and errand.words.get("force") == "true":
                continue  # it does not begin before it has every remembered point
            if missing and old is None and self._lost and not errand.reported[group]:
                self._brokers.acknowledged[group].given_up |= missing  # the row was lost, and no broker reports it
                continue
            if missing and (goes_on or errand.words.get("acceptLoss") == "true"):
                self._brokers.acknowledged[group].given_up |= missing
                if not goes_on and now.losses[group] != now.terms[group]:
                    raise Violation(f"{errand} gives up {len(missing)} messages of {group} without a notice")
            elif missing:
                raise Violation(f"{master.key} became the master of {group} without {len(missing)} messages: {errand}")

    def _check_who(self, errand: Any, changed: list[str], before: Decided, now: Decided) -> None:
        if not changed:
            return
        if not errand.is_action and changed == ["terms", "roles"]:
            self._check_raised_rows(errand, before, now)
        elif not errand.is_action:
            if changed != ["terms"] and (changed != ["routes"] or not errand.what.startswith("route of")):
                raise Violation(f"{changed} were changed by {errand}")
        if not errand.is_action:
            return
        errand.commits += 1
        if errand.commits > 1:
            raise Violation(f"{errand} is done in more than one transaction")
        if errand.status in (REFUSED, WAIT):
            raise Violation(f"{errand} is stored after it was answered as not done")

    def _check_losses(self, errand: Any, before: Decided, now: Decided) -> None:
        """An accepted loss is shown until an operator acknowledges it."""
        for group in before.losses.keys() & now.losses.keys():
            was, became = before.losses[group], now.losses[group]
            accepted = errand.words.get("acceptLoss") == "true" and became == now.terms[group] > before.terms[group]
            known = errand.what == "AcknowledgeLoss" and errand.words["brokerGroup"] == group and not became
            if was != became and not accepted and not known:
                raise Violation(f"the loss of {group} in term {was} became one in term {became}: {errand}")

    def _check_adopted_rows(self, errand: Any, now: Decided) -> None:
        """A row adopted from memory is one that the group had in a term of its own."""
        for group, became in now.roles().items():
            known = [roles for (name, _), (roles, _) in self._masterships.items() if name == group]
            if became.all and became not in known[:-1]:
                raise Violation(f"{errand} gave {group} the roles {became}, which it never had")

    def _check_raised_rows(self, errand: Any, before: Decided, now: Decided) -> None:
        """A restored row is raised to the master of the newest term that brokers report; its copies stay."""
        for group in now.terms:
            was, became = before.roles_of(group), now.roles_of(group)
            if was == became:
                continue
            later = [
                roles.master
                for (name, term), (roles, _) in self._masterships.items()
                if name == group and before.terms[group] < term <= now.terms[group]
            ]
            if became.master not in later or set(was.all) != set(became.all):
                raise Violation(f"the row of {group} was raised from {was} to {became}: {errand}")

    def _check_trail(self, errand: Any, changed: list[str], old: Tables, new: Tables) -> None:
        """Each change has one row of the audit trail, stored in its transaction; no row lacks a change."""
        if old["audit_trail"] - new["audit_trail"]:
            raise Violation(f"rows of the audit trail were changed by {errand}")
        rows = records({"audit_trail": new["audit_trail"] - old["audit_trail"]}, "audit_trail")
        done = [row for row in rows if row["result"] == "done"]
        if changed in (["terms"], ["terms", "roles"]) and not errand.is_action:  # changed by the metaserver itself
            raises = ["AdoptRoles"] if "roles" in changed else ["AdoptRoles", "NewTerm"]
            if len(done) != 1 or done[0]["action"] not in raises:
                raise Violation(f"{errand} began a term, and the audit trail has {done}")
        elif changed and errand.is_action:
            if len(done) != 1 or (done[0]["action"], done[0]["who"]) != (errand.what, errand.who):
                raise Violation(f"{errand} changed {changed}, and the audit trail has {done}")
            self._rows[errand] = done[0]
        elif done and errand.what not in REPEATABLE and not _is_only_a_mode(errand):
            raise Violation(f"{errand} changed nothing, and the audit trail has {done}")

    def _check_all_subjects(self, errand: Any, before: Decided, now: Decided) -> None:
        """An action on all subjects changes all of them or none."""
        words = errand.words
        if errand.what == "RemoveSubjectBrokerGroup" and words["subject"] == "*" and now.serving(words["brokerGroup"]):
            raise Violation(f"{errand} is half done: the group still serves {now.serving(words['brokerGroup'])}")
        if errand.what == "ExtendSubjectRoute" and words["relatedSubject"] == "*":
            missing = before.serving(words["relatedBrokerGroup"]) - now.serving(words["newBrokerGroup"])
            if missing:
                raise Violation(f"{errand} is half done: without {missing}")

    def _check_roles(self, errand: Any, before: Decided, now: Decided) -> None:
        """An action changes the roles it names and no others, compared with the row right before: no update is lost."""
        if errand.what == "AdoptDatabase":
            return self._check_adopted_rows(errand, now)
        group = errand.words.get("brokerGroup", "")
        differing = {name for name in before.terms | now.terms if before.roles().get(name) != now.roles().get(name)}
        wanted = errand.words
        key = (wanted.get("hostname", ""), int(wanted.get("servePort", 0)))
        if errand.what == "RemoveBroker":
            group = before.places[key].group if key in before.places else ""
        was, became = (state.roles_of(group) for state in (before, now))
        match errand.what, wanted.get("role"):
            case "AddBroker", "0":
                expected = was.master is None and became == (key, was.slaves)
            case "AddBroker", "1":
                expected = key not in was.slaves and became == (was.master, was.slaves | {key})
            case "ReplaceBroker", _ if wanted.get("swap") == "true":
                expected = len(was.slaves) == 1 and _swapped(was, became)
            case "ReplaceBroker", "0" if len(was.slaves) > 1 and key in was.slaves:
                expected = became == was.with_master(key)
            case "ReplaceBroker", "0":
                expected = became == (key, was.slaves - {key})
            case "ReplaceBroker", "1":
                expected = len(was.slaves) < 2 and became == (was.master, {key})
            case "SwapRoles" | "Failover", _:
                expected = _swapped(was, became)
            case "AdoptRoles", _:
                expected = became.master == key and set(became.all) == set(was.all)
            case "RemoveBroker", _:
                expected = became == (None if was.master == key else was.master, was.slaves - {key})
            case _:
                expected = False
        if not expected or differing != {group} or now.terms[group] <= before.terms.get(group, 0):
            raise Violation(f"{errand} changed {was} to {became}; groups changed: {differing}")

    def _check_routes(self, errand: Any, before: Decided, now: Decided) -> None:
        """An action changes the routes it names and no others."""
        words, none = errand.words, frozenset[str]()
        if errand.what == "AdoptDatabase":
            return  # they become those in the metaserver's memory
        group, subject = words.get("brokerGroup", ""), words.get("subject", "*")
        for name in before.routes.keys() | now.routes.keys():
            was, became = before.routes.get(name, none), now.routes.get(name, none)
            match errand.what:
                case "AddSubjectBrokerGroup" if name == subject:
                    allowed = [was | {group}]
                case "RemoveSubjectBrokerGroup" if subject in (name, "*"):
                    allowed = [was - {group}, none] if group in was else [was]
                case "RemoveSubject" if name == subject:
                    allowed = [none]
                case "ExtendSubjectRoute" if words["relatedSubject"] in (name, "*"):
                    allowed = [was | {words["newBrokerGroup"]}] if words["relatedBrokerGroup"] in was else [was]
                case "RemoveBroker":
                    allowed = [was, was - now.gone, none if not was - now.gone else was]
                case _:
                    allowed = [was]
            if became not in allowed:
                raise Violation(f"{errand} changed the route of {name} from {sorted(was)} to {sorted(became)}")

    # Answers.

    def begun(self, errand: Any) -> None:
        self._states[errand] = [self.decided]
        errand.reported = errand.process.newest_terms.copy()

    def answered(self, errand: Any, status: int, text: str) -> None:
        """Check an answer against the commits of its action."""
        states = self._states.pop(errand, [self.decided])
        errand.status = status
        if status in (REFUSED, WAIT) and errand.commits:
            raise Violation(f"{errand} is answered as not done ({text}), and is stored")
        if errand.what in ("SwapRoles", "Failover"):  # by this order or by one of another operator at the same moment
            roles = [state.roles_of(errand.words["brokerGroup"]) for state in states]
            done = any(_swapped(was, became) for was, became in pairwise(roles))
        else:
            done = any(self._is_done(errand, state) for state in states)
        if status == DONE and not done:
            raise Violation(f"{errand} is answered as done, and was never stored")
        excused = any(reason in text for reason in ("did not report", "was removed at the same time"))
        if status == UNKNOWN and not errand.failures and not excused:
            raise Violation(f"{errand}: is answered as unknown without a failure: {text}")

    def _is_done(self, errand: Any, state: Decided) -> bool:
        """Whether the tables are as the action asks for."""
        words = errand.words
        group, subject = words.get("brokerGroup", ""), words.get("subject", "*")
        key = (words.get("hostname", ""), int(words.get("servePort", 0)))
        match errand.what:
            case "AddBroker" | "ReplaceBroker":
                place = state.places.get(key)
                return place is not None and (place.group, place.role) == (group, int(words["role"]))
            case "AdoptRoles":
                return state.roles_of(group).master == key
            case "RemoveBroker":
                return key not in state.places
            case "MarkReadonlyBrokerGroup" | "UnMarkReadonlyBrokerGroup":
                return ((subject, group) in state.marks) == (errand.what == "MarkReadonlyBrokerGroup")
            case "DrainGroup" | "UndrainGroup":
                return group in state.states and state.states[group][0] == (errand.what == "DrainGroup")
            case "SetCopies":
                copies, mode = words.get("minCopies"), words.get("syncMode")
                is_mode = not mode or state.fillings.get(group, ("",))[0] == mode
                return is_mode and (not copies or state.min_copies.get(group) == int(copies))
            case "AcknowledgeLoss":
                return not state.losses.get(group)
            case "SetGroupTag":
                return group in state.states and state.states[group][2] == words["tag"]
            case "AddSubjectBrokerGroup":
                return group in state.routes.get(subject, ())
            case "RemoveSubjectBrokerGroup":
                return group not in (
                    state.routes.get(subject, ()) if subject != "*" else set().union(*state.routes.values())
                )
            case "RemoveSubject":
                return not state.routes.get(subject)
            case "ExtendSubjectRoute":
                chosen = words["relatedSubject"]
                served = state.serving(words["relatedBrokerGroup"]) & ({chosen} if chosen != "*" else set(state.routes))
                return served <= state.serving(words["newBrokerGroup"])
            case "OnOffline":
                switched = (subject, words["consumerGroup"], words["clientId"])
                return (switched in state.offline) == (words["state"] == "offline")
        return True


def _is_only_a_mode(errand: Any) -> bool:
    """Whether the action may be ordered twice at once: of the words of SetCopies, minCopies alone begins a term."""
    return errand.what == "SetCopies" and "minCopies" not in errand.words


def _swapped(before: Roles, now: Roles) -> bool:
    return now.master in before.slaves and now == before.with_master(now.master)


def differing(tables: Tables, registry: Any) -> Iterator[str]:
    """Describe the differences between a metaserver's memory and the tables."""
    decided, directory, groups = Decided.of(tables), registry.directory, registry.directory.groups
    memory = {
        "terms": {name: group.term for name, group in groups.items()},
        "states": {name: (group.draining, group.full, group.tag) for name, group in groups.items()},
        "min_copies": {name: group.min_copies for name, group in groups.items()},
        "losses": {name: group.lost_term for name, group in groups.items()},
        "fillings": {name: (group.sync_mode, _fill_orders(group)) for name, group in groups.items()},
        "routes": {subject: frozenset(route.groups) for subject, route in registry.routes.items() if route.groups},
        "offline": {(off.subject, off.group, off.consumer) for off in directory.offline},
        "places": {
            tuple(broker.key): Place(broker.group, broker.role, tuple(broker.key), broker.incarnation, broker.complete)
            for broker in directory.brokers()
        },
        "marks": frozenset(tuple(mark) for mark in directory.marks),
    }
    stored = vars(decided) | {
        "terms": {name: term for name, term in decided.terms.items() if name not in decided.gone},
        "routes": {subject: names for subject, names in decided.routes.items() if names},
    }
    return (f"{name} {held}, stored {stored[name]}" for name, held in memory.items() if held != stored[name])


def _fill_orders(group: Any) -> frozenset[tuple[str, bool]]:
    return frozenset((broker.fill_id, broker.fill_allowed) for broker in group.brokers if broker.fill_id)
