"""Core. Every rule of AddBroker, ReplaceBroker and SwapRoles, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq.errors import InvalidName, OperatorError
from qmq.metaserver.model import DELAY, NORMAL, Broker, Directory, Group, ReplicaState
from qmq.metaserver.roles import rules
from qmq.metaserver.rpc import convert
from qmq.types import Role

WORDS = {"group": "g1", "role": "0", "hostname": "h1", "ip": "10.0.0.1", "serve_port": "20881", "sync_port": "20882"}


def broker(hostname, role=Role.MASTER, group="g1", **values):
    return Broker(group, role, hostname, "10.0.0.1", 20881, 20882, **values)


MASTER = broker("a", incarnation="disk a", control_port=1)
SLAVE = broker("b", Role.SLAVE, incarnation="disk b", control_port=2, complete=True)


def directory(master=MASTER, slave=SLAVE, *, term=7, half_swapped=False):
    other = Group("g2", 1, broker("z", group="g2"), (), 0)
    return Directory({"g1": Group("g1", term, master, (slave,) if slave else (), 0, half_swapped), "g2": other})


def delay_server(hostname, role=Role.MASTER, **values):
    return broker(hostname, role, kind=DELAY, **values)


def delay_directory():
    master, slave = replace(MASTER, kind=DELAY), replace(SLAVE, kind=DELAY)
    return Directory({"g1": Group("g1", 7, master, (slave,) if slave else (), 0, kind=DELAY)})


def is_down(_):
    return False


def is_up(*hostnames):
    return lambda member: member.hostname in hostnames


@pytest.mark.parametrize(
    "change, complaint",
    [
        pytest.param({"group": "g/1"}, "brokerGroup.*'/'", id="group with a slash"),
        pytest.param({"group": "g" * 300}, "longer than 100", id="group of 300 characters"),
        pytest.param({"group": ""}, "brokerGroup is empty", id="no group"),
        pytest.param({"hostname": "h" * 300}, "longer than 100", id="hostname of 300 characters"),
        pytest.param({"hostname": "a:b"}, "hostname 'a:b'", id="hostname with a colon"),
        pytest.param({"hostname": ""}, "hostname is empty", id="no hostname"),
        pytest.param({"ip": "fd00::zz"}, "no IPv6 address", id="bad ip of version 6"),
        pytest.param({"ip": "[::]"}, "not the address of one machine", id="any address of version 6"),
        pytest.param({"ip": "ff02::1"}, "not the address of one machine", id="multicast of version 6"),
        pytest.param({"ip": "mq1:20881"}, "has a port; use the host alone", id="ip with a port"),
        pytest.param({"ip": "0.0.0.0"}, "not the address of one machine", id="any address"),
        pytest.param({"ip": "224.0.0.1"}, "not the address of one machine", id="multicast"),
        pytest.param({"serve_port": "0"}, "servePort '0'", id="port 0"),
        pytest.param({"sync_port": "99999"}, "syncPort '99999'", id="port above 65535"),
        pytest.param({"sync_port": "-1"}, "syncPort '-1'", id="negative port"),
        pytest.param({"sync_port": "٣"}, "syncPort", id="digit of another script"),
        pytest.param({"sync_port": "9" * 5000}, "syncPort", id="very long number"),
        pytest.param({"sync_port": "20881"}, "needs two ports", id="same port twice"),
        pytest.param({"role": "MASTER"}, "no role code", id="role by name"),
        pytest.param({"role": "7"}, "DELAY_BACKUP.*not supported", id="delay backup"),
        pytest.param({"role": "4"}, "BACKUP.*not supported", id="backup"),
        pytest.param({"role": "2"}, "invalid broker role code 2", id="standby"),
        pytest.param({"role": "99"}, "invalid broker role code 99", id="unknown role"),
        pytest.param({"role": ""}, "no role code", id="no role"),
    ],
)
def test_wrong_parameters_are_refused(change, complaint):
    words = WORDS | change
    with pytest.raises((OperatorError, InvalidName), match=complaint):
        rules.parse_broker(*words.values())


@pytest.mark.parametrize(("ip", "stored"), [("10.0.0.1", "10.0.0.1"), ("[FD00:0:0::2]", "fd00::2")])
def test_right_parameters_make_a_broker(ip, stored):
    made = rules.parse_broker(*(WORDS | {"ip": ip}).values())
    assert made == Broker("g1", Role.MASTER, "h1", stored, 20881, 20882)


@pytest.mark.parametrize("code, role", [("5", Role.MASTER), ("6", Role.SLAVE)])
def test_delay_roles_exist_for_operators_only(code, role):
    added = rules.parse_broker(*(WORDS | {"role": code}).values())
    assert (added.role, added.kind, int(added.part)) == (role, DELAY, int(code))


def test_first_member_sets_the_kind():
    assert rules.add_broker(Directory(), delay_server("a")).kind == DELAY
    assert rules.add_broker(Directory(), broker("a")).kind == NORMAL


@pytest.mark.parametrize(
    "decide",
    [
        rules.add_broker,
        *(
            lambda known, added, change=change: change(known, added, is_down)
            for change in (rules.replace_broker, rules.swap_stopped)
        ),
    ],
)
def test_a_group_keeps_its_kind(decide):
    with pytest.raises(OperatorError, match=r"6 \(DELAY_SLAVE\) is no role in g1: that is a group of brokers, with"):
        decide(directory(), delay_server("c", Role.SLAVE))
    with pytest.raises(OperatorError, match=r"1 \(SLAVE\) is no role in g1: that is a group of delay servers, with"):
        decide(delay_directory(), broker("c", Role.SLAVE))


def test_refusals_name_the_roles_of_delay_servers():
    with pytest.raises(OperatorError, match="g1 has a DELAY_MASTER already"):
        rules.add_broker(delay_directory(), delay_server("c"))
    with pytest.raises(OperatorError, match="first put b:20881 in its place with ReplaceBroker --role=5"):
        rules.replace_broker(delay_directory(), delay_server("a", Role.SLAVE), is_down)
    half = replace(delay_directory().groups["g1"], slaves=(), half_swapped=True)
    with pytest.raises(OperatorError, match="finish the swap with ReplaceBroker --role=6"):
        rules.check_not_half_swapped(half)


def test_delay_servers_are_swapped_like_brokers():
    change = rules.swap_roles(delay_directory().groups["g1"], term=7)
    assert (change.master.part, change.slave.part) == (Role.DELAY_MASTER, Role.DELAY_SLAVE)
    assert (change.master.hostname, change.slave.hostname) == ("b", "a")


@pytest.mark.parametrize("place, program", [(broker, "a delay server"), (lambda name: delay_server(name), "a broker")])
def test_program_of_other_kind_is_refused(place, program):
    reported = delay_server("a") if program == "a delay server" else broker("a")
    with pytest.raises(OperatorError, match=f"{program} runs there"):
        rules.check_kind(place("a"), reported)
    rules.check_kind(reported, reported)


def test_first_broker_creates_its_group():
    change = rules.add_broker(Directory(), broker("a"))
    assert (change.before, change.master, change.slave, change.term) == (None, broker("a"), None, 0)


@pytest.mark.parametrize(
    "added, complaint",
    [
        pytest.param(broker("c"), "has a MASTER already, a:20881", id="role is taken"),
        pytest.param(broker("a", group="g3"), "is the MASTER of g1 already", id="broker serves another group"),
        pytest.param(broker("z", Role.SLAVE), "is the MASTER of g2 already", id="broker of another group as slave"),
    ],
)
def test_add_refuses_a_taken_place(added, complaint):
    with pytest.raises(OperatorError, match=complaint):
        rules.add_broker(directory(), added)


@pytest.mark.parametrize("copies_max", [2, 3])
def test_slaves_never_take_the_masters_place(copies_max, monkeypatch):
    monkeypatch.setattr(rules, "COPIES_MAX", copies_max)
    slaves = tuple(broker(host, Role.SLAVE) for host in ("b", "c")[: copies_max - 1])
    known = Directory({"g1": Group("g1", 7, None, slaves, 0)})
    with pytest.raises(OperatorError, match="g1 has no master, and its last place is the master's: .* --role=0 adds"):
        rules.add_broker(known, broker("d", Role.SLAVE))
    assert rules.add_broker(known, broker("d")).brokers == (broker("d"), *slaves)


def test_added_slave_finishes_a_half_swap():
    change = rules.add_broker(directory(slave=None, half_swapped=True), broker("c", Role.SLAVE))
    assert change.slave == broker("c", Role.SLAVE) and not change.half_swapped


def test_two_calls_swap_two_stopped_brokers():
    first, before = rules.replace_broker(directory(), broker("b"), is_down)
    assert before == MASTER
    assert first.master.key == SLAVE.key and first.master.incarnation == "disk b" and first.slave is None
    assert first.half_swapped
    half = directory(first.master, None, term=8, half_swapped=True)
    second, before = rules.replace_broker(half, broker("a", Role.SLAVE), is_down)
    assert before.key == SLAVE.key and before.role == Role.SLAVE, "QMQ answers with the row as it was"
    assert (second.master, second.slave) == (first.master, broker("a", Role.SLAVE))
    assert second.term == 8 and not second.half_swapped


HALF_SWAPPED = directory(broker("b"), None, half_swapped=True)
UNUSED = directory(broker("a"), broker("b", Role.SLAVE))


@pytest.mark.parametrize(
    "known, wanted, up, hostnames",
    [
        pytest.param(HALF_SWAPPED, broker("a", Role.SLAVE), ["b"], ("b", "a"), id="end of a half swap"),
        pytest.param(HALF_SWAPPED, broker("c", Role.SLAVE), [], ("b", "c"), id="third broker ends a half swap"),
        pytest.param(directory(), broker("c", Role.SLAVE), ["a"], ("a", "c"), id="absent slave"),
        pytest.param(UNUSED, broker("c"), [], ("c", "b"), id="master that never registered"),
        pytest.param(directory(master=broker("a")), broker("c", Role.SLAVE), [], ("a", "c"), id="no log yet"),
        pytest.param(directory(slave=UNUSED.groups["g1"].slave), broker("c", Role.SLAVE), [], ("a", "c"), id="no copy"),
    ],
)
def test_replacement_is_allowed(known, wanted, up, hostnames):
    change, _ = rules.replace_broker(known, wanted, is_up(*up))
    assert (change.master.hostname, change.slave.hostname) == hostnames
    assert not change.slave.complete, "a new slave has no frames"


@pytest.mark.parametrize(
    "up, master_lacking, complaint",
    [
        pytest.param([], "", "a:20881, the master of g1, does not run", id="the master is stopped"),
        pytest.param(["a"], "a:20881 was rolled back", "a:20881 was rolled back", id="the master lacks something"),
    ],
)
def test_last_copy_is_replaced_by_force_only(up, master_lacking, complaint):
    wanted = broker("c", Role.SLAVE)
    with pytest.raises(OperatorError, match=f"{complaint}.* so b:20881 may be the last .*--role=0.*--acceptLoss=true"):
        rules.replace_broker(directory(), wanted, is_up(*up), master_lacking=master_lacking)
    accepted, _ = rules.replace_broker(directory(), wanted, is_up(*up), master_lacking=master_lacking, accept_loss=True)
    assert accepted.slave == wanted


def test_new_addresses_change_no_role():
    moved = replace(broker("a"), ip="10.0.0.9")
    assert rules.replace_broker(directory(), moved, is_down) == (None, MASTER)


@pytest.mark.parametrize(
    "known, wanted, up, complaint",
    [
        pytest.param(directory(), broker("b"), ["a"], "a:20881 .* is running", id="master still runs"),
        pytest.param(directory(), broker("b"), ["b"], "b:20881 .* is running", id="slave still runs"),
        pytest.param(directory(), broker("c", Role.SLAVE), ["b"], "is running", id="replaced slave still runs"),
        pytest.param(directory(), broker("a"), ["a"], "is running", id="new addresses of a running broker"),
        pytest.param(directory(), broker("c"), [], "only the slave .* can become the master", id="stranger as master"),
        pytest.param(directory(), broker("a", Role.SLAVE), [], "first put b:20881 in its place", id="calls reversed"),
        pytest.param(
            directory(slave=replace(SLAVE, complete=False)),
            broker("b"),
            [],
            "may lack messages",
            id="incomplete slave",
        ),
        pytest.param(directory(slave=None), broker("c", Role.SLAVE), [], "AddBroker", id="no slave to replace"),
        pytest.param(Directory(), broker("c"), [], "no broker with group g1", id="no such group"),
        pytest.param(directory(), broker("z", Role.SLAVE), [], "MASTER of g2 already", id="serves another group"),
    ],
)
def test_replacement_is_refused(known, wanted, up, complaint):
    with pytest.raises(OperatorError, match=complaint):
        rules.replace_broker(known, wanted, is_up(*up))


def test_swap_exchanges_roles_and_keeps_completeness():
    change = rules.swap_roles(directory().groups["g1"], term=7)
    assert (change.master.hostname, change.master.role) == ("b", Role.MASTER)
    assert (change.slave.hostname, change.slave.role, change.slave.complete) == ("a", Role.SLAVE, True)


def test_swap_does_not_make_a_slave_complete():
    """With durability `master`, the next master may acknowledge alone before its first heartbeat reports that."""
    change = rules.swap_roles(directory(slave=replace(SLAVE, complete=False)).groups["g1"], term=7)
    assert not change.slave.complete


@pytest.mark.parametrize("difference", [{"chain": 78}, {"log_end": 4000}], ids=str)
def test_swap_refuses_logs_that_differ(difference):
    master = ReplicaState(role=Role.MASTER, term=7, log_end=4096, chain=77)
    rules.check_same_log(master, replace(master, role=Role.SLAVE))
    with pytest.raises(OperatorError, match="the logs differ"):
        rules.check_same_log(master, replace(master, **difference))


@pytest.mark.parametrize(
    "known, term", [(directory(), 6), (directory(slave=None), 7), (directory(master=None), 7)], ids=str
)
def test_swap_of_a_changed_group_is_refused(known, term):
    with pytest.raises(OperatorError, match="changed meanwhile"):
        rules.swap_roles(known.groups["g1"], term=term)


@pytest.mark.parametrize(
    "state, complete",
    [
        pytest.param(
            ReplicaState(0, 7, writable=True, durability="fsync", in_step=("disk b",)),
            True,
            id="in sync with it",
        ),
        pytest.param(
            ReplicaState(0, 7, writable=True, durability="fsync", in_step=("disk before it was wiped",)),
            None,
            id="in sync with another disk",
        ),
        pytest.param(ReplicaState(0, 7, writable=True, durability="fsync"), None, id="slaves in sync are not named"),
        pytest.param(ReplicaState(0, 7, writable=False), None, id="readonly"),
        pytest.param(ReplicaState(0, 6, writable=True), None, id="older term"),
        pytest.param(ReplicaState(1, 7, writable=True), None, id="no master"),
        pytest.param(ReplicaState(0, 7, writable=True, durability="master"), False, id="acknowledges alone"),
    ],
)
def test_master_report_decides_completeness(state, complete):
    group = directory().groups["g1"]
    assert rules.slave_complete(group, group.slave, group.master.key, state) is complete


@pytest.mark.parametrize(
    "reported, complete",
    [
        pytest.param({"readonly_reasons": ("rolled_back",)}, False, id="it was rolled back"),
        pytest.param({"incomplete": True}, False, id="it is being filled"),
        pytest.param({"readonly_reasons": ("corrupt",)}, None, id="it is damaged"),
        pytest.param({}, None, id="nothing is wrong"),
    ],
)
def test_slave_reports_its_own_incompleteness(reported, complete):
    group = directory().groups["g1"]
    state = ReplicaState(1, 7, **reported)
    assert rules.slave_complete(group, group.slave, group.slave.key, state) is complete


@pytest.mark.parametrize("complete", [False, pytest.param(True, id="the report is not stored yet")])
def test_slave_that_was_rolled_back_is_promoted_by_force_only(complete):
    known = directory(slave=replace(directory().groups["g1"].slave, complete=complete))
    wanted = replace(known.groups["g1"].slave, role=Role.MASTER)
    with pytest.raises(OperatorError, match="was rolled back.*acceptLoss"):
        rules.replace_broker(known, wanted, lambda _: False, lacking="b:1 was rolled back")
    change, _ = rules.replace_broker(known, wanted, lambda _: False, lacking="b:1 was rolled back", accept_loss=True)
    assert change.master.key == wanted.key


def test_accepted_loss_lets_master_continue():
    known = directory()
    master = known.groups["g1"].master
    assert rules.replace_broker(known, master, lambda _: False)[0] is None
    change, _ = rules.replace_broker(known, master, lambda _: False, accept_loss=True)
    assert (change.new_term, change.slave) == (8, known.groups["g1"].slave)
    assert change.master == replace(master, incarnation="")
    rules.check_registration(change.master, "its disk is lost")


def test_master_returns_with_its_own_disk_only():
    rules.check_registration(MASTER, "disk a")
    rules.check_registration(broker("a"), "first disk ever")
    rules.check_registration(SLAVE, "emptied")
    with pytest.raises(OperatorError, match="another data directory") as refused:
        rules.check_registration(MASTER, "emptied")
    assert f"RecoverGroup --brokerGroup=g1 --gone={MASTER.key}" in str(refused.value), "for two copies and for more"


def test_swap_of_two_stopped_brokers_is_one_change():
    wanted = broker("b")
    change, before = rules.swap_stopped(directory(), wanted, is_down)
    assert before == MASTER and (change.term, change.half_swapped) == (7, False)
    assert change.master == replace(SLAVE, role=Role.MASTER, complete=False)
    assert change.slave == replace(MASTER, role=Role.SLAVE, complete=False)
    change, before = rules.swap_stopped(directory(), broker("a", Role.SLAVE), is_down)
    assert before == SLAVE and (change.master.hostname, change.slave.hostname) == ("b", "a")


@pytest.mark.parametrize(
    "known, wanted, up, complaint",
    [
        pytest.param(directory(), broker("b"), is_up("a"), "a:20881 .MASTER of g1. is running", id="master runs"),
        pytest.param(directory(), broker("b"), is_up("b"), "b:20881 .SLAVE of g1. is running", id="slave runs"),
        pytest.param(directory(), broker("c"), is_down, "neither of them", id="third broker"),
        pytest.param(directory(slave=None), broker("b"), is_down, "neither of them", id="no slave"),
        pytest.param(directory(slave=None, half_swapped=True), broker("b"), is_down, "half swapped", id="half swapped"),
        pytest.param(Directory(), broker("b"), is_down, "no broker group g1", id="no group"),
        pytest.param(
            directory(slave=replace(SLAVE, complete=False)),
            broker("b"),
            is_down,
            "would lose them",
            id="incomplete",
        ),
    ],
)
def test_swap_of_stopped_brokers_is_refused(known, wanted, up, complaint):
    with pytest.raises(OperatorError, match=complaint):
        rules.swap_stopped(known, wanted, up)


def test_repeated_swap_changes_nothing():
    assert rules.swap_stopped(directory(), broker("a"), is_up("a")) == (None, MASTER)


def test_master_is_removed_last():
    change = rules.remove_broker(directory(), SLAVE, is_up("a"))
    assert (change.master, change.slave, change.half_swapped) == (MASTER, None, False)
    with pytest.raises(OperatorError, match="Swap them first"):
        rules.remove_broker(directory(), MASTER, is_down)
    with pytest.raises(OperatorError, match="is running"):
        rules.remove_broker(directory(), SLAVE, is_up("b"))
    last = rules.remove_broker(directory(slave=None), MASTER, is_down)
    assert (last.master, last.slave) == (None, None)


def of_three(*, min_copies=2, term=7):
    """g1 with a master and two slaves, and g2."""
    third = replace(SLAVE, hostname="c", ip="10.0.0.3", incarnation="disk c")
    group = Group("g1", term, MASTER, (SLAVE, third), 0, min_copies=min_copies)
    return replace(directory(), groups={**directory().groups, "g1": group}), group


def test_slaves_are_added_up_to_five_copies():
    known = directory()
    for host in ("c", "d", "e"):
        change = rules.add_broker(known, broker(host, Role.SLAVE))
        group = replace(known.groups["g1"], slaves=change.slaves, term=change.new_term)
        group = replace(group, min_copies=3 if len(change.slaves) > 1 else 2)
        known = replace(known, groups={**known.groups, "g1": group})
    assert [slave.hostname for slave in known.groups["g1"].slaves] == ["b", "c", "d", "e"]
    assert known.groups["g1"].term == 10, "each change of members begins a term"
    with pytest.raises(OperatorError, match="has 5 copies already, and 5 are the most"):
        rules.add_broker(known, broker("f", Role.SLAVE))


@pytest.mark.parametrize("min_copies", [1, 4])
def test_min_copies_is_bounded_by_copies(min_copies):
    _, group = of_three()
    with pytest.raises(OperatorError, match="minCopies is 2 to 3; AddBroker adds a copy"):
        rules.set_copies(group, min_copies)


def test_remedy_adds_no_refused_copy():
    _, group = of_three()
    more = tuple(replace(SLAVE, hostname=name) for name in "de")
    with pytest.raises(OperatorError, match="g1 has 5 copies, so minCopies is 3 to 5$"):
        rules.set_copies(replace(group, slaves=(*group.slaves, *more)), 6)


def test_any_two_sets_that_may_acknowledge_share_a_copy():
    known, group = of_three()
    with pytest.raises(OperatorError, match="of 4 copies at least 3 have to .* first SetCopies --minCopies=3"):
        rules.add_broker(known, broker("d", Role.SLAVE))
    group = replace(group, min_copies=rules.set_copies(group, 3).min_copies)
    added = rules.add_broker(replace(known, groups={"g1": group}), broker("d", Role.SLAVE))
    assert len(added.brokers) == 4 and added.min_copies == 3
    with pytest.raises(OperatorError, match="g1 has 4 copies, so minCopies is 3 to 4; AddBroker"):
        rules.set_copies(replace(group, slaves=added.slaves), 2)
    for copies in range(2, 6):
        assert 2 * rules.majority(copies) > copies >= 2 * (rules.majority(copies) - 1)


def test_min_copies_begins_a_term():
    _, group = of_three()
    assert rules.set_copies(group, 2) is None, "unchanged"
    change = rules.set_copies(group, 3)
    assert (change.min_copies, change.new_term) == (3, 8)
    assert [broker.key for broker in change.brokers] == [broker.key for broker in group.brokers]


def test_raised_min_copies_does_not_complete_a_slave():
    """No later report would correct it: a Failover with masterGone would promote this copy alone."""
    _, group = of_three()
    assert not any(slave.complete for slave in rules.set_copies(group, 3).slaves)
    _, group = of_three(min_copies=3)
    assert rules.set_copies(group, 2).slaves == group.slaves


def test_slave_is_removed_while_enough_remain():
    known, group = of_three()
    change = rules.remove_broker(known, group.slaves[0], is_down)
    assert [slave.key for slave in change.slaves] == [group.slaves[1].key]
    assert (change.master, change.min_copies) == (MASTER, 2)
    known, group = of_three(min_copies=3)
    with pytest.raises(OperatorError, match="First SetCopies with a smaller minCopies"):
        rules.remove_broker(known, group.slaves[0], is_down)


def test_removal_leaves_slaves_incomplete():
    """The removed slave may have confirmed frames that the remaining one lacks."""
    known, group = of_three()
    change = rules.remove_broker(known, group.slaves[1], is_down)
    left = replace(group, slaves=change.slaves, term=change.new_term)
    with pytest.raises(OperatorError, match="would lose them"):
        rules.replace_broker(replace(known, groups={"g1": left}), replace(SLAVE, role=Role.MASTER), is_down)
    reported = ReplicaState(int(Role.MASTER), change.new_term, writable=True, in_step=("disk b",))
    assert rules.slave_complete(left, left.slaves[0], MASTER.key, reported)


def test_swap_names_the_slave_of_several():
    _, group = of_three()
    change = rules.swap_roles(group, term=7, to=group.slaves[1].key)
    assert (change.master.hostname, change.master.role) == ("c", Role.MASTER)
    assert [(slave.hostname, slave.role, slave.complete) for slave in change.slaves] == [
        ("b", Role.SLAVE, False),
        ("a", Role.SLAVE, True),
    ]
    with pytest.raises(OperatorError, match="have changed meanwhile"):
        rules.swap_roles(group, term=7, to=broker("z").key)


def test_two_copy_commands_are_refused_with_more():
    known, group = of_three()
    with pytest.raises(OperatorError, match="has 2 slaves, and this is for groups of two: RemoveBroker"):
        rules.replace_broker(known, broker("d", Role.SLAVE), is_down)
    with pytest.raises(OperatorError, match="has 2 slaves, and this is for groups of two: start them"):
        rules.swap_stopped(known, replace(SLAVE, role=Role.MASTER), is_down)
    with pytest.raises(OperatorError, match="another slave may have messages that b:20881 lacks"):
        rules.replace_broker(known, replace(SLAVE, role=Role.MASTER), is_down)


def test_accepted_loss_promotes_one_of_several():
    known, group = of_three()
    change, before = rules.replace_broker(known, replace(SLAVE, role=Role.MASTER), is_down, accept_loss=True)
    assert (change.master.key, before, change.half_swapped) == (SLAVE.key, MASTER, False)
    left = (replace(group.slaves[1], complete=False), replace(MASTER, role=Role.SLAVE, complete=False))
    assert change.slaves == left, "the old master keeps its place, as a slave"


def test_lagging_slave_is_complete_if_all_acknowledge():
    """With three copies of which two acknowledge, the third one may lack messages acknowledged meanwhile."""
    state = ReplicaState(int(Role.MASTER), 7, writable=True, in_step=("disk b",))
    for min_copies, third in ((2, False), (3, None)):
        _, group = of_three(min_copies=min_copies)
        assert [rules.slave_complete(group, slave, MASTER.key, state) for slave in group.slaves] == [True, third]


def test_only_master_of_several_needs_new_term():
    _, group = of_three()
    assert rules.needs_new_term(group, MASTER.key) and not rules.needs_new_term(group, SLAVE.key)
    assert not rules.needs_new_term(directory().groups["g1"], MASTER.key)
    change = rules.renew(group, above=9)
    assert (change.term, change.new_term, change.brokers) == (7, 10, group.brokers)


@pytest.mark.parametrize(
    "complete, lost_term, waits_for",
    [
        pytest.param("bc", 0, "bc", id="both were in sync"),
        pytest.param("b", 0, "b", id="one was"),
        pytest.param("", 0, "bc", id="unknown after a change of roles"),
        pytest.param("", 7, "", id="an operator accepted the loss"),
    ],
)
def test_restarted_master_waits_for_slaves_in_sync_at_the_last_report(complete, lost_term, waits_for):
    known, group = of_three()
    slaves = tuple(replace(slave, complete=slave.hostname in complete) for slave in group.slaves)
    group = replace(group, slaves=slaves, lost_term=lost_term)
    assert [slave.hostname for slave in rules.awaited(group)] == list(waits_for)
    known = replace(known, groups={"g1": group})
    awaited = [list(convert.assignment_for(known, member.key).awaited) for member in (MASTER, SLAVE)]
    assert awaited == [[f"{name}:20881" for name in waits_for], []]


def test_slave_that_never_registered_is_not_waited_for():
    _, group = of_three()
    new = replace(group.slaves[1], complete=False, incarnation="")
    assert rules.awaited(replace(group, slaves=(replace(group.slaves[0], complete=False), new))) == (
        replace(group.slaves[0], complete=False),
    )
