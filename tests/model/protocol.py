"""Core. Model of the replication protocol between two copies, small enough to visit every reachable state.

Two brokers, the metaserver's row `(term, master)`, a few messages, terms and crashes. `explore` visits all states
within such bounds, nearest first, and stops at the first state that breaks a promise, with the shortest list of steps
to it. Change this file first when the protocol changes.

    pytest tests/model                              all rules hold; each omitted rule breaks a promise
    python -m tests.model.protocol                  count the states of the full rule set
    python -m tests.model.protocol 2 1 0 1          other bounds: terms, messages, crashes, rollbacks of disks
    python -m tests.model.protocol 2 1 0 1 failover also let the metaserver choose a new master by itself
    python -m tests.model.protocol boot             the counterexample without that rule (names: `Rules`)

What is modelled. A log is a tuple of frames, an offset is a count of frames, the chain at an offset is the prefix
before it (a hash without collisions). A slave's epoch table in its hello follows from its log, and `agreement` uses
only these tables. fsync is a separate step on either broker. A crash keeps any part of the unsynced frames and does not
fsync them. A broker restarts with the contents of its disk (the metaserver is down) and may receive the row later, an
older version of it, or none. Cutting a log is durable at once. Every packet may be late, lost or repeated; frames and
confirmations of a crashed master still arrive. `wedged` searches for states from which the two brokers cannot recover
by themselves.

A disk may be rolled back (`rollbacks`): its broker restarts with any prefix of its fsynced frames, and with its own
stored points and epoch as they are now or as old as the log. The other broker's points are as new as its log; a
rollback of both disks is not covered. The row stores the same points, or none since its database was rolled back, too.

The metaserver may choose a new master by itself (`failover`) at any moment: no rule needs the old master to be gone. A
swap is the same change of the row without the two rules of the choice. It keeps every promise as well, but an operator
may choose an incomplete copy, which then waits for the other one.

Not modelled: damaged or exchanged disks, seeding, consumers, clocks. No promise below needs a clock.

Promises, checked in every state:

    safe        frames that were ever below a high watermark (acknowledged or delivered) are in the fsynced part of both
                logs from then on, and so in every later master's log
    matching    equal (epoch, offset) means equal bytes, and equal bytes before it
    one master  two brokers never write and acknowledge frames in one epoch
    confirmed   frames that a master counts as confirmed are fsynced, byte for byte, on the other broker
    failover    the master chosen by the metaserver has fsynced all frames that were ever below a high watermark
    good faith  a master that received an acknowledged point which its log lacks has not begun
    no alarm    no confirmation ever differs from the master's log: that comparison detects events outside the model

Why fewer states suffice. Each of these joins runs that differ in nothing that is checked:

- Broker 0 is the first master and messages are numbered in order: other names give the same runs.
- Crash and restart are one step, at the moment of the restart: a stopped broker does the same as an idle one.
- Acknowledging is not a step. The high watermark counts from the moment when the rules allow it; a later
  acknowledgement promises less, since `safe` must hold for ever.
- fsync covers the whole log: a partial fsync equals one before the last append.
- Packets are sent as soon as possible, and are received at any later time or never. So the frames in flight are the log
  of the master of that epoch (`pipe` None) or, when it has left the epoch, its log at that time (`pipe`).
- Of several confirmations to one master in one epoch only the longest is kept: a run that receives the shorter one
  first equals the run that received it before the longer one was sent.
- A packet that no receiver can accept any more (of a connection its slave has closed, of an epoch its master has
  left) is dropped: receiving it changes nothing.
- A repeated frame stands before the log's end and is ignored, so only the next frame is received.

In one point the model is wider than the protocol: a master counts a confirmation, and restores a tail, from any
connection of its epoch, not only the current one. Promises that hold here hold there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tests.model.search import Found, search

Epoch = tuple[int, int]
Log = tuple[int, ...]
Step = tuple[object, ...]
"""A name, the broker, details. `describe` turns it into a sentence."""

SLAVE, MASTER, FENCED = 0, 1, 2
"""FENCED: it received a newer epoch from the other broker and waits for its assignment."""
CLOSED, HELLO_SAID, FOLLOWING = 0, 1, 2
EMPTY: Log = ()
BOOTS_MAX = 4
"""Number of times that a master yields and restarts in one term; more would reach no new state."""


class Rules(NamedTuple):
    """The rules of the protocol. Omit one with `ALL._replace(name=False)`."""

    boot: bool = True
    """A master that restarts raises `boot`."""
    master_fsync: bool = True
    """A master acknowledges only frames that it has fsynced."""
    slave_fsync: bool = True
    """A slave confirms only frames that it has fsynced."""
    recovery_fsync: bool = True
    """Frames found by a restart count as fsynced only after another fsync."""
    matched_end: bool = True
    """A slave confirms its matched end, not its log's length; the master compares the chain."""
    fence: bool = True
    """A broker that received a newer epoch closes older connections and refuses their packets."""
    persist: bool = True
    """An epoch is on disk before a broker acts in it."""
    history: bool = True
    """Histories are compared by epoch and chain, not by length."""
    both_copies: bool = True
    """One copy alone acknowledges nothing."""
    hello_counts_nothing: bool = True
    """The offset that a slave requests confirms nothing."""
    own_connection: bool = True
    """An agreement answers one hello, once, on its own connection."""
    compare_and_set: bool = True
    """The row changes only together with its term."""
    keeps_confirmed: bool = True
    """A copy keeps the frames it confirmed: a slave all frames of a master, a master those it had followed."""
    keeps_acknowledged: bool = True
    """A copy keeps frames up to its stored acknowledged point."""
    gives_way: bool = True
    """A master yields unconfirmed frames that it wrote alone, if they conflict with its slave's confirmed frames."""
    proof: bool = True
    """Two masterships of one epoch, which a rolled-back disk uses twice, differ in their first frames."""
    chosen_in_sync: bool = True
    """A failover chooses only a slave that, since it started, reached the end of its master's log."""
    chosen_covers: bool = True
    """A failover chooses only a slave with a log up to the row's acknowledged point."""
    row: bool = True
    """A master that received an acknowledged point which its log lacks does not begin without it."""


ALL = Rules()


class Bounds(NamedTuple):
    terms: int
    messages: int
    crashes: int
    rollbacks: int = 0
    """Number of rollbacks of a disk, with all its files or without its last fsynced frames."""


class Agreement(NamedTuple):
    """The master's answer to a hello: follow from `end`, or first send the tail."""

    epoch: Epoch
    end: int
    wants_tail: bool
    pipe: Log | None
    master_end: int = -1
    """The master's log end: a slave that reaches it is in sync. -1: unused, as no failover follows."""


class Broker(NamedTuple):
    """One broker: its disk, its memory, and the packets on their way to it."""

    epoch: Epoch
    role: int
    log: Log
    flushed: int
    """Frames of `log` that survive a crash."""

    followed: bool = False
    """Its last frames came from a master, so it confirmed them. On disk, as `kept`."""
    kept: int = 0
    """Offset at which its last mastership after following began."""
    heard: int = 0
    """Part of `safe` that the row sent to it since its restart."""
    lacks: bool = False
    """It received an acknowledged point that its log lacks."""
    presumed: int = 0
    """Frames found at its restart that it treats as fsynced; 0 with all rules."""

    matched: int = 0
    """As master: the slave's confirmed end."""
    confirmation: Log = EMPTY
    """On its way to this master, of its epoch: the longest history that the slave fsynced."""
    tail: Log = EMPTY
    """On its way to this master, of its epoch: the history of a slave that has more."""
    hellos: tuple[Epoch, ...] = ()
    """On their way to this broker, on any connection: newer epochs of the other broker's hellos."""

    connection: int = CLOSED
    """As slave, here and below."""
    agreement: Agreement | None = None
    """On its way to this slave."""
    follows: Epoch = (0, 0)
    agreed: int = 0
    """Length of the log that is known to equal the master's."""
    must_reach: int = -1
    """The master's log end when this slave began to follow; -1: it does not follow, or no failover follows."""
    in_sync: bool = False
    """Since its restart and in this term, the slave has fsynced such an end. Kept while a failover may follow."""
    pipe: Log | None = EMPTY
    """Incoming frames: None while the master is in the epoch that this slave follows (then its log), otherwise its log
    then.
    """


class State(NamedTuple):
    term: int
    master: int
    written: int
    crashes: int
    safe: Log
    """The longest history that was ever below a high watermark."""
    brokers: tuple[Broker, Broker]
    rollbacks: int = 0
    bad: int = -1
    """The broker whose disk was rolled back, until it has all safe frames again; -1: none."""
    row_is_old: bool = False
    """The row stores the acknowledged point; False: its database was rolled back, too."""
    gone: Log = EMPTY
    """Acknowledged frames that another history replaced."""
    failovers: int = 0
    """Number of failovers that the metaserver may still make."""
    unfit: int = -1
    """The chosen broker that lacked acknowledged frames; -1: none."""


START = State(1, 0, 0, 0, EMPTY, (Broker((1, 1), MASTER, EMPTY, 0), Broker((1, 0), SLAVE, EMPTY, 0)))
FAILOVER = START._replace(failovers=1)
"""The start of a world in which the metaserver may choose a new master once."""


# ---- frames and histories


def frame(epoch: Epoch, author: int, message: int) -> int:
    """Encode a frame as a number; message 0 is the epoch frame."""
    return (epoch[0] * 10 + epoch[1]) * 100 + author * 10 + message


def spell(epoch: Epoch) -> str:
    return f"{epoch[0]}.{epoch[1]}"


def show(log: Log) -> str:
    """Return a log as text: `1.1` is an epoch frame, `1.1:a` a message of that epoch."""
    words = [spell((f // 1000, f // 100 % 10)) + (f":{'_abcdefgh'[f % 10]}" if f % 10 else "") for f in log]
    return f"[{' '.join(words)}]"


def fsynced(broker: Broker) -> str:
    """Return a broker's log as text, with the part that survives a crash."""
    return f"{show(broker.log)}, {broker.flushed} of {len(broker.log)} fsynced"


@lru_cache(None)
def epoch_table(log: Log, proof: bool = True) -> tuple[tuple[int, int, int, Log], ...]:
    """Return (epoch, first, end, chain) per epoch; each end is the next one's first, or the log's end.

    The chain is the one before the first frame, with `proof` the one behind it.
    """
    firsts = [i for i, f in enumerate(log) if i == 0 or f // 100 != log[i - 1] // 100]
    ends = [*firsts[1:], len(log)]
    return tuple((log[a] // 100, a, b, log[: a + proof]) for a, b in zip(firsts, ends, strict=False))


@lru_cache(None)
def last_agreement(master: Log, slave: Log, proof: bool = True) -> int:
    """Return the length of the common prefix of two logs, from their epoch tables alone."""
    known = {(epoch, first, chain): end for epoch, first, end, chain in epoch_table(master, proof)}
    for epoch, first, end, chain in reversed(epoch_table(slave, proof)):
        if (epoch, first, chain) in known:
            return min(end, known[epoch, first, chain])
    return 0


def has_begun(broker: Broker) -> bool:
    """Whether this master has written the epoch frame of its epoch."""
    return bool(broker.log) and broker.log[-1] // 100 == broker.epoch[0] * 10 + broker.epoch[1]


def keeps(state: State, who: int, rules: Rules) -> int:
    """Return the length of the log that a broker keeps. A rolled-back disk has points as old as itself."""
    me = state.brokers[who]
    if me.followed and rules.keeps_confirmed:
        return len(me.log)
    known = len(state.safe) if rules.keeps_acknowledged and state.bad != who and not me.followed else 0
    return min(max(me.kept if rules.keeps_confirmed else 0, known), len(me.log))


# ---- results of a step


def put(state: State, who: int, me: Broker, other: Broker) -> State:
    """Return the state with these two brokers; `me` is number `who`."""
    return state._replace(brokers=(me, other) if who == 0 else (other, me))


def enter(me: Broker, epoch: Epoch, role: int, rules: Rules) -> Broker:
    """Set a newer epoch of a broker: it drops the state of the old epoch and, by the fence, closes its connection."""
    hellos = tuple(e for e in me.hellos if e > epoch)
    me = me._replace(epoch=epoch, role=role, matched=0, confirmation=EMPTY, tail=EMPTY, hellos=hellos)
    me = me._replace(must_reach=-1, in_sync=False)
    if rules.fence:
        me = me._replace(connection=CLOSED, agreement=None, follows=(0, 0), agreed=0, pipe=EMPTY)
    return me


def orphaned(slave: Broker, master: Broker) -> Broker:
    """Keep the frames in flight of a master that leaves its epoch."""
    if master.role != MASTER:
        return slave
    if slave.pipe is None and slave.follows == master.epoch:
        n = len(slave.log)
        slave = slave._replace(pipe=master.log if len(master.log) > n and master.log[:n] == slave.log else EMPTY)
    if slave.agreement and slave.agreement.pipe is None and slave.agreement.epoch == master.epoch:
        slave = slave._replace(agreement=slave.agreement._replace(pipe=master.log))
    return slave


def confirmable(slave: Broker, master: Broker, rules: Rules) -> Broker:
    """Return the master with its slave's current confirmation on its way."""
    if slave.connection != FOLLOWING or master.role != MASTER or slave.follows != master.epoch:
        return master
    end = max(slave.flushed, slave.presumed) if rules.slave_fsync else len(slave.log)
    if rules.matched_end:
        end = min(end, slave.agreed)
    if end > master.matched and end > len(master.confirmation):
        return master._replace(confirmation=slave.log[:end])
    return master


def acknowledged(state: State, who: int, rules: Rules) -> State:
    """Move the high watermark of a master as far as the rules allow."""
    me = state.brokers[who]
    if me.role != MASTER:
        return state
    flushed = max(me.flushed, me.presumed) if rules.master_fsync else len(me.log)
    watermark = min(flushed, me.matched) if rules.both_copies else flushed
    n = min(watermark, len(state.safe))
    if me.log[:n] != state.safe[:n]:
        return state._replace(gone=state.safe)
    return state._replace(safe=me.log[:watermark]) if watermark > len(state.safe) else state


def healed(state: State) -> State:
    """A rolled-back disk counts again once it has all safe frames."""
    if state.bad < 0:
        return state
    broker, other, n = state.brokers[state.bad], state.brokers[1 - state.bad], len(state.safe)
    fsynced_log = broker.log[: broker.flushed]
    is_whole = fsynced_log[:n] == state.safe
    for confirmed in (other.log[: other.matched], other.confirmation):  # confirmed before the rollback
        is_whole &= fsynced_log[: len(confirmed)] == confirmed
    return state._replace(bad=-1) if is_whole else state


# ---- the steps


def steps(state: State, bounds: Bounds, rules: Rules) -> Iterator[tuple[Step, State]]:
    """Yield all next steps."""
    for step, after in _steps(state, bounds, rules):
        yield step, healed(after)


def _steps(state: State, bounds: Bounds, rules: Rules) -> Iterator[tuple[Step, State]]:
    if state.bad >= 0 and not state.row_is_old:
        yield ("row",), state._replace(row_is_old=True)
    if state.term < bounds.terms:
        yield ("swap", 1 - state.master), state._replace(term=state.term + 1, master=1 - state.master)
    if state.failovers and state.term < bounds.terms:
        yield from failover(state, rules)
    if not rules.compare_and_set and state.term > 1 and state.master == (state.term - 1) % 2:
        yield ("overwrite", 1 - state.master), state._replace(master=1 - state.master)
    for who in (0, 1):
        me, other = state.brokers[who], state.brokers[1 - who]
        yield from epochs(state, who, me, other, bounds, rules)
        yield from disk(state, who, me, other, bounds, rules)
        if me.role == MASTER:
            yield from as_master(state, who, me, other, rules)
        if me.role == SLAVE or not rules.fence:
            yield from as_slave(state, who, me, other, rules)


def failover(state: State, rules: Rules) -> Iterator[tuple[Step, State]]:
    """The metaserver makes the slave of the row the master. The old master may still run; only the slave's frames
    count. The chosen broker receives the row later, like any row.
    """
    who = 1 - state.master
    me, row = state.brokers[who], 0 if state.row_is_old else len(state.safe)
    if me.role != SLAVE or me.epoch[0] != state.term:
        return
    if (rules.chosen_in_sync and not me.in_sync) or (rules.chosen_covers and me.flushed < row):
        return
    has_all = me.flushed >= len(state.safe) and me.log[: len(state.safe)] == state.safe
    a, b = (broker._replace(must_reach=-1, in_sync=False) for broker in state.brokers)
    after = state._replace(term=state.term + 1, master=who, failovers=0, unfit=-1 if has_all else who, brokers=(a, b))
    yield ("failover", who), after


def epochs(
    state: State, who: int, me: Broker, other: Broker, bounds: Bounds, rules: Rules
) -> Iterator[tuple[Step, State]]:
    """A broker receives a current or past term from the metaserver, or an epoch from the other broker's hello."""
    for term in range(me.epoch[0], state.term + 1):
        if term == me.epoch[0] and me.role != FENCED:
            continue
        master = state.master if term == state.term else (term - 1) % 2
        boot = me.epoch[1] if term == me.epoch[0] else 0
        role, epoch = (MASTER, (term, boot + 1)) if master == who else (SLAVE, (term, boot))
        row = 0 if state.row_is_old else len(state.safe)
        is_lacking = me.log[:row] != state.safe[:row]
        told_me = me._replace(heard=row if is_lacking else 0, lacks=rules.row and is_lacking)
        yield ("learns", who, role, epoch), put(state, who, enter(told_me, epoch, role, rules), orphaned(other, me))
    if rules.fence:
        for epoch in me.hellos:
            yield ("fenced", who, epoch), put(state, who, enter(me, epoch, FENCED, rules), orphaned(other, me))
    if state.crashes < bounds.crashes:
        crashed = state._replace(crashes=state.crashes + 1)
        epoch, role = (me.epoch, me.role) if rules.persist else ((1, 0), MASTER if who == 0 else SLAVE)
        if role == MASTER and (rules.boot or not rules.persist):
            epoch = (epoch[0], epoch[1] + 1)
        restarted = enter(me, epoch, role, ALL)
        for keep in range(me.flushed, len(me.log) + 1):
            after = restarted._replace(log=me.log[:keep], presumed=0 if rules.recovery_fsync else keep)
            yield ("crash", who, after), put(crashed, who, after, orphaned(other, me))
    if state.bad == who and me.role == MASTER and not me.heard and not has_begun(me) and not state.row_is_old:
        after = me._replace(heard=len(state.safe), lacks=rules.row)
        yield ("told", who, len(state.safe)), put(state, who, after, other)
    if state.rollbacks < bounds.rollbacks and state.bad < 0:
        yield from put_back(state, who, me, other)


def put_back(state: State, who: int, me: Broker, other: Broker) -> Iterator[tuple[Step, State]]:
    """A disk is rolled back, or loses its last frames. This happens to one of the two only: the other one's points are
    as new as its log, and a rollback of both is not covered.
    """
    forgot = state._replace(rollbacks=state.rollbacks + 1, bad=who)
    for keep in range(me.flushed):
        log = me.log[:keep]
        last = (log[-1] // 1000, log[-1] // 100 % 10) if log else (1, 0)
        for epoch in {me.epoch, max(last, (1, 0))}:  # the broker's own file is as new as before, or as old as the log
            role = me.role if epoch == me.epoch else (MASTER if (epoch[0] - 1) % 2 == who else SLAVE)
            boot = epoch[1] + 1 if role == MASTER else epoch[1]
            for followed in {me.followed, role == SLAVE}:
                after = enter(me, (epoch[0], boot), role, ALL)
                after = after._replace(
                    log=log, flushed=keep, followed=followed, kept=min(me.kept, keep), lacks=False, heard=0
                )
                yield ("put back", who, after), put(forgot, who, after, orphaned(other, me))


def disk(
    state: State, who: int, me: Broker, other: Broker, bounds: Bounds, rules: Rules
) -> Iterator[tuple[Step, State]]:
    """A broker fsyncs; a master appends."""
    if me.flushed < len(me.log):
        in_sync = me.in_sync or 0 <= me.must_reach <= len(me.log)
        after = me._replace(flushed=len(me.log), presumed=0, in_sync=in_sync)
        yield (
            ("fsync", who, after.log),
            acknowledged(put(state, who, after, confirmable(after, other, rules)), who, rules),
        )
    if me.role != MASTER:
        return
    if not has_begun(me) and not me.lacks:
        kept = len(me.log) if me.followed else min(me.kept, len(me.log))
        begun = frame(me.epoch, who + 2 * state.rollbacks, 0)  # no two first frames are equal: they contain times
        after = me._replace(log=(*me.log, begun), tail=EMPTY, followed=False, kept=kept)
        yield ("begin", who, after), acknowledged(put(state, who, after, other), who, rules)
    elif has_begun(me) and state.written < bounds.messages:
        after = me._replace(log=(*me.log, frame(me.epoch, who + 2 * state.rollbacks, state.written + 1)))
        more = put(state._replace(written=state.written + 1), who, after, other)
        yield ("append", who, after.log), acknowledged(more, who, rules)


def as_master(state: State, who: int, me: Broker, other: Broker, rules: Rules) -> Iterator[tuple[Step, State]]:
    """A master receives a hello, a confirmation, or a restored frame."""
    n = len(me.log)
    if other.role == SLAVE and other.connection == HELLO_SAID and (other.epoch <= me.epoch or not rules.fence):
        end = last_agreement(me.log, other.log, rules.proof) if rules.history else min(n, len(other.log))
        wants_tail = end == n < len(other.log) and not has_begun(me) and rules.history
        used = (other.log[-1] // 1000, other.log[-1] // 100 % 10) if other.log else (0, 0)
        if used >= me.epoch and not has_begun(me) and used[0] == me.epoch[0]:
            raised = enter(me, (used[0], used[1] + 1), MASTER, rules)
            yield ("raised", who, raised), put(state, who, raised, orphaned(other, me))
            return
        if not wants_tail and min(keeps(state, 1 - who, rules), n) > end:
            if keeps(state, who, rules) <= end and rules.gives_way and me.epoch[1] < BOOTS_MAX:
                cut = enter(me, (me.epoch[0], me.epoch[1] + 1), MASTER, rules)
                cut = cut._replace(log=me.log[:end], flushed=min(me.flushed, end), presumed=min(me.presumed, end))
                yield ("gives way", who, me.log, cut.log), put(state, who, cut, orphaned(other, me))
            return  # otherwise both keep their frames
        lacks = me.lacks and n <= len(other.log) and not wants_tail and n < len(state.safe)
        if lacks:
            return  # the slave lacks it, too
        if not wants_tail and me.lacks:
            me = me._replace(lacks=False, heard=0)
        agreement = Agreement(me.epoch, end, wants_tail, None, n if state.failovers else -1)
        after = me if rules.hello_counts_nothing else me._replace(matched=max(me.matched, min(n, len(other.log))))
        if agreement != other.agreement or after != me:
            answered = put(state, who, after, other._replace(agreement=agreement))
            yield ("answer", who, agreement), acknowledged(answered, who, rules)
    end = len(me.confirmation)
    if 0 < end <= n:
        proven = me.log[:end] == me.confirmation or not (rules.matched_end and rules.history)
        after = me._replace(confirmation=EMPTY, matched=max(me.matched, end) if proven else me.matched)
        yield ("confirm", who, end, proven), acknowledged(put(state, who, after, other), who, rules)
    if len(me.tail) > n and me.tail[:n] == me.log:
        after = me._replace(log=me.tail[: n + 1])
        yield ("take back", who, after.log), put(state, who, after, other)


def as_slave(state: State, who: int, me: Broker, other: Broker, rules: Rules) -> Iterator[tuple[Step, State]]:
    """A slave sends a hello on a new connection, receives the agreement, or receives the next frame."""
    if me.role == SLAVE and (me.connection != HELLO_SAID or me.agreement):
        agreement = None if rules.own_connection else me.agreement
        after = me._replace(connection=HELLO_SAID, agreement=agreement, follows=(0, 0), agreed=0, pipe=EMPTY)
        after = after._replace(must_reach=-1)
        master = other
        if me.epoch > other.epoch and me.epoch not in other.hellos:
            master = other._replace(hellos=tuple(sorted((*other.hellos, me.epoch))))
        if after != me or master != other:
            yield ("hello", who, after), put(state, who, after, master)
    older = me.agreement is not None and me.agreement.epoch < me.epoch
    if me.agreement and (not rules.fence if older else me.role == SLAVE):
        yield agreed(state, who, me, other, me.agreement, rules)
    n, source = len(me.log), other.log if me.pipe is None else me.pipe
    if me.connection == FOLLOWING and len(source) > n and (source[:n] == me.log or not rules.history):
        log = (*me.log, source[n])
        after = me._replace(log=log, agreed=n + 1, pipe=EMPTY if me.pipe and len(me.pipe) == n + 1 else me.pipe)
        yield ("receive", who, log), put(state, who, after, confirmable(after, other, rules))


def agreed(state: State, who: int, me: Broker, other: Broker, agreement: Agreement, rules: Rules) -> tuple[Step, State]:
    """A slave receives its agreement: it cuts conflicting frames, or sends frames that the master lost, and follows."""
    epoch, end, wants_tail, pipe, master_end = agreement
    after = me._replace(
        epoch=max(epoch, me.epoch),
        hellos=tuple(e for e in me.hellos if e > epoch),
        connection=FOLLOWING,
        agreement=None if rules.own_connection else agreement,
        follows=epoch,
        agreed=end,
        pipe=pipe,
    )
    if not wants_tail and end < keeps(state, who, rules):
        return ("refuses", who, agreement), put(state, who, me._replace(connection=CLOSED, agreement=None), other)
    if wants_tail:
        if pipe is None and not has_begun(other) and len(me.log) > len(other.tail):
            other = other._replace(tail=me.log)
    else:
        after = after._replace(log=me.log[:end], flushed=min(me.flushed, end), presumed=min(me.presumed, end))
        after = after._replace(followed=True, lacks=False, heard=0)
        if state.failovers:
            after = after._replace(must_reach=master_end, in_sync=me.in_sync or 0 <= master_end <= after.flushed)
    if pipe is not None and not (len(pipe) > len(after.log) and pipe[: len(after.log)] == after.log):
        after = after._replace(pipe=EMPTY)
    return ("agreed", who, me.log, after.log, agreement), put(state, who, after, confirmable(after, other, rules))


# ---- the promises


def broken(state: State, rules: Rules) -> str:
    """Return the name of a promise that this state breaks, or an empty string."""
    return (
        lost(state)
        or in_bad_faith(state)
        or shared_epoch(state)
        or mismatch(state)
        or (unproven(state) if rules == ALL else "")
    )


def lost(state: State) -> str:
    """`safe` must be a prefix of both brokers' fsynced frames, except for a rolled-back disk."""
    n = len(state.safe)
    if state.unfit >= 0:
        chosen = state.brokers[state.unfit]
        return f"failover: {show(state.safe)} was acknowledged, and broker {state.unfit} is chosen: {fsynced(chosen)}"
    if state.gone:
        return f"safe: {show(state.gone)} was acknowledged, and another history took its place"
    for who, broker in enumerate(state.brokers):
        if who == state.bad:
            continue
        if broker.flushed < n or broker.log[:n] != state.safe:
            return f"safe: {show(state.safe)} was acknowledged, but broker {who} has {fsynced(broker)}"
    return ""


def in_bad_faith(state: State) -> str:
    """A master that received a point it lacks has not begun."""
    me = state.brokers[state.bad] if state.bad >= 0 else None
    if (
        me is None
        or me.role != MASTER
        or not has_begun(me)
        or not me.heard
        or me.log[: me.heard] == state.safe[: me.heard]
    ):
        return ""
    return f"good faith: broker {state.bad} begins in {spell(me.epoch)}, and was told of {show(state.safe[: me.heard])}"


def shared_epoch(state: State) -> str:
    """No broker may act in an epoch of the other one, now or later."""
    a, b = state.brokers
    if a.role == b.role == MASTER and a.epoch == b.epoch:
        return f"one master: both brokers act in epoch {spell(a.epoch)}"
    for who, broker in enumerate(state.brokers):
        if broker.role == MASTER and has_begun(broker) and broker.log[-1] // 10 % 2 != who:
            return f"one master: broker {who} acts in epoch {spell(broker.epoch)}, in which the other one wrote"
    return ""


def mismatch(state: State) -> str:
    """Up to the last offset where both logs have a frame of one epoch, they are equal."""
    a, b = state.brokers[0].log, state.brokers[1].log
    if state.rollbacks:
        return ""  # an epoch may have been used twice
    for at in range(min(len(a), len(b)) - 1, -1, -1):
        if a[at] // 100 == b[at] // 100:
            return "" if a[: at + 1] == b[: at + 1] else f"matching: offset {at} of {show(a)} and {show(b)}"
    return ""


def unproven(state: State) -> str:
    """Frames that a master counts must be fsynced on the other broker, and confirmed frames must equal its own: no
    alarm without a cause. Both promises break before a message is lost, and would otherwise hide the rule that loses
    it.
    """
    if state.rollbacks:
        return ""  # the rolled-back disk had confirmed them
    for who, broker in enumerate(state.brokers):
        other, n, confirmed = state.brokers[1 - who], broker.matched, broker.confirmation
        if n and (other.flushed < n or other.log[:n] != broker.log[:n]):
            return f"confirmed: broker {who} counts {show(broker.log[:n])}, the other one has {fsynced(other)}"
        if confirmed and broker.log[: len(confirmed)] != confirmed:
            return f"no alarm: broker {who} has {show(broker.log)}, but {show(confirmed)} is confirmed to it"
    return ""


def healthy(state: State) -> bool:
    """Whether both brokers act by the newest row, with equal logs below the high watermark."""
    master, slave = state.brokers[state.master], state.brokers[1 - state.master]
    return (
        master.role == MASTER
        and has_begun(master)
        and master.epoch[0] == state.term
        and slave.follows == master.epoch
        and slave.log == master.log == state.safe
    )


# ---- searches


def explore(bounds: Bounds, rules: Rules = ALL, start: State = START) -> Found:
    """Visit every state within `bounds`, nearest first; stop at the first that breaks a promise."""
    return search(start, lambda state: steps(state, bounds, rules), lambda state: broken(state, rules), describe)


def wedged(bounds: Bounds, rules: Rules = ALL, start: State = START) -> list[State]:
    """Return the states that cannot recover without further crashes or swaps."""
    causes: dict[State, list[State]] = {start: []}
    frontier = [start]
    while frontier:
        state = frontier.pop()
        for step, after in steps(state, bounds, rules):
            if after not in causes:
                causes[after] = []
                frontier.append(after)
            if step[0] not in ("crash", "swap", "failover", "put back", "row"):
                causes[after].append(state)
    at_bound = {state for state in causes if max(broker.epoch[1] for broker in state.brokers) >= BOOTS_MAX}
    fine = {state for state in causes if healthy(state)} | at_bound
    frontier = list(fine)
    while frontier:
        before = [state for state in causes[frontier.pop()] if state not in fine]
        fine.update(before)
        frontier += before
    return [state for state in causes if state not in fine]


def describe(step: Step, before: State, after: State) -> str:
    """Return a step as a sentence."""
    acked = f"; acknowledged up to {show(after.safe)}" if after.safe != before.safe else ""
    return _sentence(step) + acked


def _sentence(step: Step) -> str:
    match step:
        case ("swap", int(master)):
            return f"metaserver: the next term begins, broker {master} is master"
        case ("failover", int(master)):
            return f"metaserver: broker {master} becomes the master of the next term by itself"
        case ("overwrite", int(master)):
            return f"metaserver: a second operator makes broker {master} master of the same term"
        case ("learns", int(who), int(role), (int(term), int(boot))):
            part = f"master, in epoch {spell((term, boot))}" if role == MASTER else f"slave of term {term}"
            return f"broker {who} hears from the metaserver that it is {part}"
        case ("fenced", int(who), (int(term), int(boot))):
            return f"broker {who} receives a hello of the newer epoch {spell((term, boot))} and is fenced"
        case ("crash", int(who), Broker() as after):
            part = ("slave", "master", "fenced")[after.role]
            return f"broker {who} crashes and restarts as {part} in {spell(after.epoch)} with {show(after.log)}"
        case ("told", int(who), int(end)):
            return f"broker {who} hears from the metaserver that {end} frames are acknowledged, which it lacks"
        case ("row",):
            return "metaserver: its database is put back, and the row remembers nothing that is acknowledged"
        case ("put back", int(who), Broker() as after):
            return f"the disk of broker {who} is put back: it restarts in {spell(after.epoch)} with {show(after.log)}"
        case ("raised", int(who), Broker() as after):
            return f"broker {who} hears that its epoch was used, and takes {spell(after.epoch)}"
        case ("gives way", int(who), tuple(before), tuple(log)):
            return f"broker {who} receives a hello and gives way: it cuts {show(before)} to {show(log)} and begins anew"
        case ("refuses", int(who), Agreement() as agreement):
            return f"broker {who} confirmed more than {agreement.end} and refuses to cut"
        case ("fsync", int(who), tuple(log)):
            return f"broker {who} fsyncs {show(log)}"
        case ("begin", int(who), Broker() as after):
            return f"broker {who} waits no longer and writes its epoch frame: {show(after.log)}"
        case ("append", int(who), tuple(log)):
            return f"broker {who} appends a message: {show(log)}"
        case ("answer", int(who), Agreement() as agreement):
            what = "send me your tail from" if agreement.wants_tail else "your log ends, and I stream, at"
            return f"broker {who} receives the hello and answers: {what} {agreement.end}"
        case ("confirm", int(who), int(end), bool(proven)):
            return f"broker {who} receives the confirmation of {end} and {'counts' if proven else 'refuses'} it"
        case ("take back", int(who), tuple(log)):
            return f"broker {who} takes back a frame it had lost: {show(log)}"
        case ("hello", int(who), Broker() as after):
            return f"broker {who} connects and says hello in epoch {spell(after.epoch)} with {show(after.log)}"
        case ("agreed", int(who), tuple(before), tuple(log), Agreement() as agreement):
            cut = f"cuts {show(before)} to {show(log)}" if before != log else f"keeps {show(log)}"
            return f"broker {who} receives the answer of epoch {spell(agreement.epoch)}, {cut} and follows"
        case ("receive", int(who), tuple(log)):
            return f"broker {who} receives a frame: {show(log)}"
    raise AssertionError(f"unknown step {step}")


if __name__ == "__main__":
    left_out = {name: False for name in sys.argv[1:] if name in Rules._fields}
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()] or [3, 1, 1]
    print(explore(Bounds(*numbers), ALL._replace(**left_out), FAILOVER if "failover" in sys.argv else START))
