"""Core. Rules for roles in a broker group: which broker may become master or slave, and by which command.

Each decision is a `RoleChange`: compare the term, raise it by one, set all roles at once. Safety comes from epochs: a
term has one master, ever, and brokers reject older terms. These checks keep an operator from promoting a copy that
lacks acknowledged messages.

Keeps I13.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from qmq.errors import OperatorError
from qmq.metaserver.model import (
    COPIES_MAX,
    DELAY,
    NORMAL,
    Broker,
    BrokerKey,
    Directory,
    Group,
    ReplicaState,
    part,
    role_and_kind,
)
from qmq.replication.readonly import Reason
from qmq.subjects import check_name
from qmq.types import Host, Role

MayBeUp = Callable[[Broker], bool]

_HOSTNAME = re.compile(r"[A-Za-z0-9._-]+")
_UNSUPPORTED_ROLES = {4: "BACKUP", 7: "DELAY_BACKUP"}
_ROLES = "0 is MASTER, 1 is SLAVE, 5 is DELAY_MASTER, 6 is DELAY_SLAVE"
_KINDS = {
    NORMAL: "of brokers, with roles 0 (MASTER) and 1 (SLAVE)",
    DELAY: "of delay servers, with roles 5 (DELAY_MASTER) and 6 (DELAY_SLAVE)",
}


@dataclass(frozen=True, slots=True)
class RoleChange:
    """Replacement of a group's row, if its term still is `term`, by these roles and `new_term`."""

    group: str
    term: int
    """Compared; 0: the group must not exist yet."""
    before: Group | None
    master: Broker | None
    slaves: tuple[Broker, ...] = ()
    half_swapped: bool = False
    kind: int = NORMAL
    """Kind of a new group; never changes."""
    min_copies: int = 2
    above: int = 0
    """Newest term that a broker of the group reported: the row may come from an old copy of the database."""

    @property
    def new_term(self) -> int:
        return max(self.term, self.above) + 1

    @property
    def brokers(self) -> tuple[Broker, ...]:
        return self.slaves if self.master is None else (self.master, *self.slaves)

    @property
    def slave(self) -> Broker | None:
        """The only slave; None: there is none, or several."""
        return self.slaves[0] if len(self.slaves) == 1 else None


def parse_broker(group: str, role: str, hostname: str, ip: str, serve_port: str, sync_port: str) -> Broker:
    """Parse an operator's parameters into a broker.

    Raises:
        OperatorError, InvalidName: the text names the wrong parameter and gives a valid value.
    """
    check_name("brokerGroup", group)
    check_name("hostname", hostname)
    if not _HOSTNAME.fullmatch(hostname):
        raise OperatorError(f"hostname {hostname!r} may consist of letters, digits, dots, hyphens and underscores")
    serve, sync = parse_port("servePort", serve_port), parse_port("syncPort", sync_port)
    if serve == sync:
        raise OperatorError(f"servePort and syncPort are both {serve}; a broker needs two ports")
    plain, kind = role_and_kind(parse_role(role))
    return Broker(group, plain, hostname, parse_address(ip), serve, sync, kind=kind)


def parse_role(text: str) -> Role:
    if not text.isascii() or not text.isdigit():
        raise OperatorError(f"role {text!r} is no role code; {_ROLES}")
    if name := _UNSUPPORTED_ROLES.get(int(text)):
        raise OperatorError(f"role {int(text)} ({name}) is not supported; {_ROLES}")
    if int(text) not in tuple(Role):
        raise OperatorError(f"invalid broker role code {int(text)}; {_ROLES}")
    return Role(int(text))


def parse_address(text: str) -> str:
    """Return a host name or IP address in its canonical form, so that an address has one text in every row."""
    try:
        host = Host(text)
    except ValueError as error:
        raise OperatorError(f"ip {error}") from None
    if host.is_any or host == "255.255.255.255" or (host.address is not None and host.address.is_multicast):
        raise OperatorError(
            f"ip {host} is not the address of one machine; use the one that clients and other brokers connect to"
        )
    return str(host)


def parse_port(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) < 65536:
        raise OperatorError(f"{name} {text!r} is no port; it is a number from 1 to 65535")
    return int(text)


def add_broker(directory: Directory, broker: Broker) -> RoleChange:
    """Return the change that gives `broker` a vacant place of its group, or makes it a further slave. The first broker
    creates the group.

    One place is reserved for the master.
    """
    _require_free(directory, broker.key)
    group = directory.groups.get(broker.group)
    if group is None:
        return _with_holder(RoleChange(broker.group, 0, None, None, kind=broker.kind), broker)
    _require_kind(group, broker)
    if broker.role == Role.MASTER and group.master:
        raise OperatorError(
            f"{group.name} has a {broker.part.name} already, {group.master.key}; ReplaceBroker puts another in its "
            "place"
        )
    if len(group.brokers) >= COPIES_MAX:
        raise OperatorError(f"{group.name} has {len(group.brokers)} copies already, and {COPIES_MAX} are the most")
    if broker.role == Role.SLAVE and group.master is None and len(group.slaves) == COPIES_MAX - 1:
        raise OperatorError(
            f"{group.name} has no master, and its last place is the master's: AddBroker "
            f"--role={part(Role.MASTER, group.kind):d} adds one; ReplaceBroker puts another in a slave's place"
        )
    copies = len(group.brokers) + 1
    if group.min_copies < majority(copies):
        raise OperatorError(
            f"of {copies} copies at least {majority(copies)} have to acknowledge, and of {group.name} "
            f"{group.min_copies} do: first SetCopies --minCopies={majority(copies)}"
        )
    return _with_holder(_unchanged(group), broker)


def majority(copies: int) -> int:
    """Return the fewest copies that may acknowledge: any two sets of so many share a copy.

    Otherwise an old row, which assigns a term twice, could lead to two masters that acknowledge in one epoch.
    """
    return copies // 2 + 1


def set_copies(group: Group, min_copies: int) -> RoleChange | None:
    """Return the change of minCopies: how many copies, the master's among them, must have a message before it is
    acknowledged. None: no change.
    """
    check_not_half_swapped(group)
    most = max(len(group.brokers), 2)
    least = majority(most)
    if not least <= min_copies <= most:
        allowed = f"{least}" if most == least else f"{least} to {most}"
        more = "; AddBroker adds a copy" if len(group.brokers) < COPIES_MAX else ""
        raise OperatorError(f"{group.name} has {len(group.brokers)} copies, so minCopies is {allowed}{more}")
    if min_copies == group.min_copies:
        return None
    slaves = group.slaves
    if len(group.brokers) > group.min_copies:  # the row may be outdated: the next reports decide
        slaves = tuple(replace(slave, complete=False) for slave in slaves)
    return replace(_unchanged(group), slaves=slaves, min_copies=min_copies)


def replace_broker(
    directory: Directory,
    broker: Broker,
    may_be_up: MayBeUp,
    *,
    accept_loss: bool = False,
    lacking: str = "",
    master_lacking: str = "",
) -> tuple[RoleChange | None, Broker]:
    """Return the change that puts `broker` in the place of the present holder of its role.

    The swap of two stopped brokers takes two calls, as QMQ documents it: the slave into the master's place, which
    leaves the slave's place vacant, then the old master into the slave's. Any other new master would have to hold every
    acknowledged message, which only the slave can.

    Args:
        accept_loss: the operator accepts the loss of the other copy: an incomplete slave may be promoted, and a master
            that lacks acknowledged messages continues with its own, in a new term, even with another disk.
        lacking: why the slave cannot be promoted, by its own report; empty: nothing known.
        master_lacking: the same for the master; then the slave may be the last complete copy.

    Returns:
        The change (None: only addresses are stored) and the earlier holder of the role.
    """
    group = directory.groups.get(broker.group)
    if group is not None:
        _require_kind(group, broker)
    before = _holder_before(group, broker)
    if group is None or before is None:
        raise OperatorError(
            f"no broker with group {broker.group} and role {broker.part.name}; AddBroker adds one to a vacant place"
        )
    for member in group.brokers:
        if member.key in (before.key, broker.key) and not _stays_master(member, broker):
            _require_stopped(group, member, may_be_up)
    if before in group.brokers and before.key == broker.key:
        if not accept_loss or broker.role != Role.MASTER:
            return None, before
        return replace(_unchanged(group), master=replace(before, incarnation="")), before  # with any disk
    if broker.role == Role.MASTER:
        return _promote(directory, group, broker, accept_loss, lacking), before
    check_two_copies(group, "RemoveBroker takes a slave out, AddBroker adds another")
    if group.master and group.master.key == broker.key:
        raise OperatorError(
            f"{broker.key} is the master of {group.name}; for a swap, first put {before.key} in its place with "
            f"{_replace_call(group, Role.MASTER)}, then repeat this call"
        )
    _require_free(directory, broker.key)
    if before == group.slave and not accept_loss:
        require_not_the_last(group, before, may_be_up, master_lacking)
    return _with_holder(replace(_unchanged(group), slaves=()), broker), before


def require_not_the_last(
    group: Group, slave: Broker, may_be_up: MayBeUp, master_lacking: str = "", *, anyway: str = "acceptLoss"
) -> None:
    """Refuse to remove a slave that may be the last copy: its master is down, or lacks acknowledged messages.

    Args:
        anyway: the option with which the operator confirms the removal.

    Raises:
        OperatorError: with two remedies: bring the master back, or promote the slave.
    """
    master = group.master
    if not slave.incarnation or master is None or not master.incarnation:
        return  # never both up, so nothing was acknowledged
    why = master_lacking or ("" if may_be_up(master) else f"{master.key}, the master of {group.name}, does not run")
    if why:
        raise OperatorError(
            f"{why}, so {slave.key} may be the last copy that holds all that {group.name} acknowledged. Start the "
            f"master, and repeat when ReplicaStatus shows it. If its disk is lost, keep the slave: put it in the "
            f"master's place with {_replace_call(group, Role.MASTER)}, then another broker in the slave's. If the "
            f"slave's disk is lost, too: --{anyway}=true"
        )


def swap_stopped(
    directory: Directory, broker: Broker, may_be_up: MayBeUp, *, accept_loss: bool = False, lacking: str = ""
) -> tuple[RoleChange | None, Broker]:
    """Return the change that exchanges master and slave of a group, both stopped, in place of QMQ's two ReplaceBroker
    calls.

    Args:
        broker: the slave as the new master, or the master as the new slave.
        accept_loss, lacking: as in `replace_broker`.

    Returns:
        The change (None: the broker has that role, only addresses are stored) and the earlier holder of the role.
    """
    group = directory.groups.get(broker.group)
    if group is None:
        raise OperatorError(f"there is no broker group {broker.group}; ListBrokerGroups names them")
    _require_kind(group, broker)
    check_not_half_swapped(group)
    check_two_copies(group, "start them, and exchange the roles with SwapRoles")
    holder, other = (group.master, group.slave) if broker.role == Role.MASTER else (group.slave, group.master)
    if holder and holder.key == broker.key:
        return None, holder
    if holder is None or other is None or other.key != broker.key:
        raise OperatorError(
            f"a swap exchanges the two brokers of {group.name}, and {broker.key} is neither of them; without "
            "swap=true, ReplaceBroker puts a new broker in a place"
        )
    for member in (holder, other):
        _require_stopped(group, member, may_be_up)
    new_master, new_slave = (broker, holder) if broker.role == Role.MASTER else (holder, broker)
    promoted = _promote(directory, group, replace(new_master, role=Role.MASTER), accept_loss, lacking).master
    # Frames of the old master that the new one lacks are cut when they connect, so it is incomplete until then.
    demoted = replace(_addressed(group, new_slave), role=Role.SLAVE, complete=False)
    return replace(_unchanged(group), master=promoted, slaves=(demoted,)), holder


def remove_broker(directory: Directory, broker: Broker, may_be_up: MayBeUp) -> RoleChange:
    """Return the change that removes a stopped broker from its group; the master must be the last one."""
    group = directory.groups[broker.group]
    _require_stopped(group, broker, may_be_up)
    if broker.role == Role.SLAVE:
        if 2 < len(group.brokers) <= group.min_copies:
            raise OperatorError(
                f"{group.name} has {len(group.brokers)} copies, and minCopies is {group.min_copies}: without this one "
                "it would be readonly. First SetCopies with a smaller minCopies, or AddBroker"
            )
        left = tuple(slave for slave in group.slaves if slave.key != broker.key)
        if len(group.brokers) > group.min_copies:  # the removed one may have confirmed frames that these lack
            left = tuple(replace(slave, complete=False) for slave in left)
        return replace(_unchanged(group), slaves=left)
    if group.slaves:
        raise OperatorError(
            f"{broker.key} is the master of {group.name}, and {group.slaves[0].key} its slave. Swap them first "
            "(SwapRoles; ReplaceBroker with swap=true if both are stopped), then remove it as the slave"
        )
    return replace(_unchanged(group), master=None, min_copies=2)


def swap_roles(group: Group, *, term: int, to: BrokerKey | None = None) -> RoleChange:
    """Return the change that exchanges the master and a slave, after their logs were proven equal.

    Args:
        to: the slave; None: the only one.
    """
    slave = group.slave if to is None else next((slave for slave in group.slaves if slave.key == to), None)
    if group.master is None or slave is None or group.term != term:
        raise OperatorError(f"the roles of {group.name} have changed meanwhile (term {group.term}); look, then repeat")
    # Both logs are equal, but complete only if no master continues without its slave. Other slaves count as incomplete
    # until the new master reports them in sync.
    old_master = replace(group.master, role=Role.SLAVE, complete=slave.complete)
    return replace(
        _unchanged(group),
        master=replace(slave, role=Role.MASTER, complete=False),
        slaves=tuple(old_master if other is slave else replace(other, complete=False) for other in group.slaves),
    )


def renew(group: Group, *, above: int) -> RoleChange:
    """Return the change that keeps the roles in a new term above `above`."""
    return replace(_unchanged(group), above=above)


def needs_new_term(group: Group, key: BrokerKey) -> bool:
    """Return whether a starting broker may act in a new term only: as the master of several slaves.

    Its disk may have been restored to a state before its mastership. The broker would use the same epoch again, and
    slaves with different frames of one epoch could not be compared.
    """
    return len(group.slaves) > 1 and group.master is not None and group.master.key == key


def awaited(group: Group) -> tuple[Broker, ...]:
    """Return the slaves that a restarted master waits for: those in sync at its last report.

    If the row names too few to have acknowledged anything, as right after a change of roles, these are all registered
    slaves, except losses that an operator accepted.
    """
    if len(group.slaves) < 2:
        return ()
    in_sync = tuple(slave for slave in group.slaves if slave.complete)
    if len(in_sync) >= group.min_copies - 1 or group.lost_term:
        return in_sync
    return tuple(slave for slave in group.slaves if slave.incarnation)


def has_clock_for(group: Group, slave: ReplicaState | None) -> bool:
    """Return whether a slave's clock is good enough for a master; only delay groups need it."""
    return group.kind != DELAY or slave is None or not slave.clock_off_s


def check_clock(group: Group, slave: Broker, state: ReplicaState | None) -> None:
    """Refuse a planned promotion of a delay slave with a wrong clock.

    After a failure it is still promoted: it then uses the clocks of the other copies.
    """
    if state is not None and not has_clock_for(group, state):
        off = f"{abs(state.clock_off_s):,} s {'ahead of' if state.clock_off_s > 0 else 'behind'}"
        raise OperatorError(
            f"the clock of {slave.key} is {off} those of the metaserver and of the master, and {group.name} goes by "
            "its master's. Set it right (a time service: chrony, systemd-timesyncd) and repeat after ten seconds"
        )


def check_same_log(master: ReplicaState, slave: ReplicaState) -> None:
    """Refuse a swap unless both logs end at the same offset with the same chain, so every byte is equal."""
    if (master.log_end, master.chain) != (slave.log_end, slave.chain):
        raise OperatorError(
            f"the logs differ: the master ends at {master.log_end} with chain {master.chain:016x}, the slave at "
            f"{slave.log_end} with chain {slave.chain:016x}; look with ReplicaStatus, repeat when the slave caught up"
        )


def check_two_copies(group: Group, instead: str) -> None:
    if len(group.slaves) > 1:
        raise OperatorError(f"{group.name} has {len(group.slaves)} slaves, and this is for groups of two: {instead}")


def check_not_half_swapped(group: Group) -> None:
    if group.half_swapped:
        call = _replace_call(group, Role.SLAVE)
        raise OperatorError(f"{group.name} is half swapped; finish the swap with {call}")


def refuse_unknown(registering: Broker, directory: Directory) -> NoReturn:
    """Raise OperatorError with the command that gives a broker a place."""
    vacant = next((group for group in directory.groups.values() if group.half_swapped), None)
    master, slave = (part(role, registering.kind) for role in (Role.MASTER, Role.SLAVE))
    command, group, role = "AddBroker", registering.group or "GROUP", f"{master:d} (master) or {slave:d} (slave)"
    if vacant and vacant.kind == registering.kind and registering.group in ("", vacant.name):
        command, group, role = "ReplaceBroker", vacant.name, f"{slave:d}"
    raise OperatorError(
        f"{registering.key} is no broker here. Run: qmq {command} --metaserver=HOST:PORT --token=TOKEN "
        f"--brokerGroup={group} --role={role} --hostname={registering.hostname} --ip={registering.ip} "
        f"--servePort={registering.serve_port} --syncPort={registering.sync_port}"
    )


def check_group(broker: Broker, group: str) -> None:
    """Refuse a data directory with the log of another group; an empty `group`: the directory never had a role."""
    if group not in ("", broker.group):
        raise OperatorError(
            f"{broker.key} belongs to {broker.group}, and its data directory to {group}: start it with an empty one"
        )


def check_kind(broker: Broker, registering: Broker) -> None:
    """Refuse a broker in a delay server's place and vice versa: their logs follow different rules."""
    if broker.kind != registering.kind:
        name = {NORMAL: "a broker", DELAY: "a delay server"}
        raise OperatorError(
            f"{broker.key} was added as the {broker.part.name} of {broker.group}, a place for {name[broker.kind]}, and "
            f"{name[registering.kind]} runs there. Start the other program there, or RemoveBroker and add it "
            f"to a group of its kind"
        )


def check_registration(broker: Broker, incarnation: str, *, is_older: bool = False) -> None:
    """Refuse a master with another disk than before: its empty log would count as the group's history.

    The same holds for a copy from before its promotion (`is_older`). A slave may have another disk: it is filled, and
    counts for nothing until then.
    """
    if broker.role == Role.MASTER and broker.incarnation and (broker.incarnation != incarnation or is_older):
        raise OperatorError(
            f"{broker.key} was the master of {broker.group} with another data directory. Give it that one back; if it "
            f"is lost: qmq RecoverGroup --brokerGroup={broker.group} --gone={broker.key} makes the best copy that "
            "is left the master, from which this broker is filled. Name every broker with a lost disk in --gone"
        )


def is_elsewhere(row: Broker, registering: Broker) -> bool:
    """Return whether a broker has its row's data directory, but at another place or after a start of its machine.

    The directory may be a copy, and the original process may still run where no metaserver reaches it. So its role
    begins in a new term, in which the original no longer counts.
    """
    is_same_disk = bool(row.incarnation) and row.incarnation == registering.incarnation
    return is_same_disk and row.instance != registering.instance


def may_be_copy(row: Broker, registering: Broker) -> bool:
    """Return whether a broker may be another process than the row's, with the same data directory or a copy.

    One directory at one place belongs to one process: its lock admits one at a time.
    """
    have_places = bool(row.instance or registering.instance) and row.incarnation == registering.incarnation
    return is_elsewhere(row, registering) if have_places else row.ip != registering.ip


def is_older(row: Broker, registering: Broker, term: int, last: ReplicaState | None) -> bool:
    """Return whether a broker has, at another place, a directory older than a term it once reported.

    Such a copy would cut frames that the old master acknowledged later.

    Args:
        term: newest term it has stored.
        last: its last report.
    """
    return is_elsewhere(row, registering) and last is not None and term < last.term


def begin_elsewhere(group: Group, broker: Broker, *, above: int) -> RoleChange:
    """Return the change that keeps the roles in a new term above `above`, for a broker that `is_elsewhere`."""
    master = broker if group.master and group.master.key == broker.key else group.master
    slaves = tuple(broker if slave.key == broker.key else slave for slave in group.slaves)
    return replace(renew(group, above=above), master=master, slaves=slaves)


def is_rolled_back(state: ReplicaState) -> bool:
    """Return whether a copy lacks acknowledged messages, by its own report."""
    return Reason.ROLLED_BACK in state.readonly_reasons


def slave_complete(group: Group, slave: Broker, key: BrokerKey, state: ReplicaState) -> bool | None:
    """Return whether a report of broker `key` proves a slave complete: True or False; None: nothing new.

    A writable group has `min_copies` - 1 slaves in sync; further slaves may be behind or fall behind. Only `master`
    durability acknowledges without a slave. The master must name the incarnation of the row: a slave with a wiped disk
    may register before the master sees it. A rolled-back or newly filled slave reports that itself.
    """
    if key == slave.key:
        return False if is_rolled_back(state) or state.incomplete else None
    if group.master is None or key != group.master.key:
        return None
    if not state.writable or not state.is_master_in(group.term):
        return None
    if state.durability == "master":
        return False
    if slave.incarnation and slave.incarnation in state.in_step:
        return True
    return False if len(group.brokers) > group.min_copies else None


def _promote(directory: Directory, group: Group, broker: Broker, accept_loss: bool, lacking: str) -> RoleChange:
    slave = next((slave for slave in group.slaves if slave.key == broker.key), None)
    master, others = group.master, tuple(other for other in group.slaves if other != slave)
    unused = not any(member.incarnation for member in group.brokers)
    if slave:
        if others and not accept_loss:
            raise OperatorError(
                f"{group.name} has {len(group.slaves)} slaves, and another slave may have messages that {broker.key} "
                f"lacks. Start the remaining brokers, then run qmq Failover --brokerGroup={group.name}, or SwapRoles "
                f"if the master runs. If that is impossible, --acceptLoss=true keeps the messages of {broker.key}"
            )
        if master and master.incarnation and (lacking or not slave.complete) and not accept_loss:
            why = lacking or f"{slave.key} may lack messages that {group.name} acknowledged"
            raise OperatorError(
                f"{why}, and would lose them as its master. Start both brokers, wait until the group accepts "
                f"messages again, then repeat. If the master's disk is lost for good, --acceptLoss=true keeps the "
                f"messages of {slave.key}"
            )
        promoted = replace(_unchanged(group), master=_addressed(group, broker), half_swapped=not others)
        if others and master:  # as many copies as before: fewer might be too few to acknowledge
            others = (*others, replace(master, role=Role.SLAVE))
        return replace(promoted, slaves=tuple(replace(other, complete=False) for other in others))
    _require_free(directory, broker.key)
    if not unused:
        raise OperatorError(
            f"only the slave of {group.name} holds its messages and can become the master; {broker.key} would begin "
            f"with an empty log. Make it the slave ({_replace_call(group, Role.SLAVE)}), let it catch up, then "
            "SwapRoles"
        )
    return _with_holder(_unchanged(group), broker)


def _holder_before(group: Group | None, broker: Broker) -> Broker | None:
    if group is None:
        return None
    if broker.role == Role.MASTER:
        return group.master
    if group.half_swapped and group.master:
        return replace(group.master, role=Role.SLAVE)  # the row before call 1, which call 2 overwrites
    return next((slave for slave in group.slaves if slave.key == broker.key), next(iter(group.slaves), None))


def _stays_master(member: Broker, broker: Broker) -> bool:
    """Return whether `member` is the master, and stays it while `broker` gets a slave's place. The second call of a
    swap may come after the new master was started.
    """
    return broker.role == Role.SLAVE and member.role == Role.MASTER and member.key != broker.key


def _require_kind(group: Group, broker: Broker) -> None:
    if broker.kind != group.kind:
        raise OperatorError(
            f"{broker.part:d} ({broker.part.name}) is no role in {group.name}: that is a group {_KINDS[group.kind]}, "
            "and it stays one; give the other kind a group of its own"
        )


def _replace_call(group: Group, role: Role) -> str:
    return f"ReplaceBroker --role={part(role, group.kind):d}"


def _require_stopped(group: Group, member: Broker, may_be_up: MayBeUp) -> None:
    if may_be_up(member):
        raise OperatorError(
            f"{member.key} ({member.part.name} of {group.name}) is running: stop it first, or exchange the roles of "
            "two running brokers with SwapRoles"
        )


def _addressed(group: Group, broker: Broker) -> Broker:
    """Return the broker at the operator's address, with the disk and ports of its registration."""
    row = next((member for member in group.brokers if member.key == broker.key), broker)
    registered = replace(broker, control_port=row.control_port, metrics_port=row.metrics_port)
    return replace(registered, incarnation=row.incarnation, instance=row.instance)


def _require_free(directory: Directory, key: BrokerKey) -> None:
    if taken := directory.find(key):
        raise OperatorError(f"{key} is the {taken.part.name} of {taken.group} already; one broker serves one group")


def _unchanged(group: Group) -> RoleChange:
    return RoleChange(
        group.name, group.term, group, group.master, group.slaves, group.half_swapped, min_copies=group.min_copies
    )


def _with_holder(change: RoleChange, broker: Broker) -> RoleChange:
    if broker.role == Role.MASTER:
        return replace(change, master=broker)
    return replace(change, slaves=(*change.slaves, broker), half_swapped=False)
