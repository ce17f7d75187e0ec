"""Core. Model of three copies: the choice of a master, the copies that count, and when members may change.

    pytest tests/model/test_copies.py                        all rules hold; each omitted rule breaks a promise
    python -m tests.model.copies three_of_two 2 2 1 0 0      count the states: a world, then its bounds
    python -m tests.model.copies three_of_two 4 1 0 0 0 own_epoch  the counterexample without that rule

`tests.model.protocol` models two copies in every detail of packets and fsyncs. With more copies, the copies that
acknowledged a message and those among which a new master is chosen may differ. This model is about that, and simplifies
the rest:

- A slave receives, fsyncs and confirms in one step. An unsynced frame equals one not received; a late packet equals one
  received early and followed by nothing. A master's fsync is a step: its slaves may have more.
- Connecting is one step: the slave cuts conflicting frames, by comparing histories.
- An acknowledgement is no step. It happens as soon as the rules allow it; a later one promises less.
- A broker receives only the current row, at any time; receiving an older row equals receiving it early and idling.
- An operator's statement that the master never returns holds from then on, true or not; that no disk was rolled back is
  true.

Model: the row (term, master, members, the number of copies that must have a message); masters that restart
without unsynced frames; promises; a choice of a new master at any moment, whether the old one is gone or not (failover
and SwapRoles are equal in this model); a change of members or of m, the number that acknowledges; a rollback of a disk
with its epochs and promises; a rollback of the row, which is raised again; metaservers that end between promises and
choice, and others that ask again, for the same term too. Copies are interchangeable, so a state is stored with its
copies sorted.

Checks: of two acknowledged histories, one is a prefix of the other; every active master of a newer epoch has
all that was ever acknowledged, and so has the chosen copy; no copy cuts acknowledged frames; no two copies share an
epoch.

A disk is not rolled back between a promise and the choice that uses it (milliseconds), and at most one of a disk and
the row is rolled back. With both, two copies of three may acknowledge frames that the third one contradicts; requiring
all three to acknowledge covers that, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tests.model.search import Found, search

Log = tuple[int, ...]
Words = tuple[Any, ...]
"""A sentence with placeholders, and their values."""
OUT, SLAVE, MASTER, FENCED = 0, 1, 2, 3
ROLES = ("no member", "slave", "master", "fenced")
"""OUT: no member. FENCED: a master that promised."""
NO_ANSWER = (0,)


class Rules(NamedTuple):
    """Rules of the protocol. Omit one with `ALL._replace(name=False)`."""

    enough_copies: bool = True
    """The high watermark is the m-th largest matched end; without: the next larger one."""
    own_fsync: bool = True
    """The master is one of the m, with its fsynced frames."""
    own_epoch: bool = True
    """Frames of older epochs count only together with the own epoch frame."""
    enough_promises: bool = True
    """A master is chosen among n - m + 1 copies that promised; without: one is enough."""
    promise_first: bool = True
    """A copy's frames count for the choice only once it refuses older epochs."""
    promise_durable: bool = True
    """A promise survives a crash."""
    highest: bool = True
    """The highest (epoch of the last frame, end) of those that promised is chosen."""
    in_this_term: bool = True
    """It was in sync with the master of this term. A change of members or of m needs no second rule: a copy in sync in
    the new term has all that the members before acknowledged.
    """
    new_term: bool = True
    """A change of members or of m begins a new term."""
    in_sync: bool = True
    """Only a copy in sync since its process began may promise for a choice."""
    row_first: bool = True
    """A restarted broker takes no part before it receives the row."""
    row: bool = True
    """A master that receives an acknowledged point which it lacks does not begin without it."""
    new_life: bool = True
    """A restarted master begins in a new term, which the row stores first: its disk may have lost its epoch."""
    chosen_point: bool = True
    """The frames with which a master was chosen count as acknowledged for it: its disk may be rolled back before it
    begins.
    """
    above: bool = True
    """No row changes while a broker reports a newer term; the row is raised above that term first."""
    compare_and_set: bool = True
    """Promises choose once: a choice changes only the row of the term in which they were requested."""
    seen_whole: bool = True
    """If the master is declared gone and all copies acknowledge, a restarted copy counts if the row saw it in sync."""
    frame_of_term: bool = True
    """If fewer copies acknowledge, it counts if its log has a frame of the row's term."""


ALL = Rules()


class Bounds(NamedTuple):
    terms: int
    messages: int
    crashes: int
    changes: int = 0
    """Changes of members or of m."""
    faults: int = 0
    """Rollbacks of disks or of the row."""
    gone: int = 0
    """An operator may declare the master gone. It holds from then on, true or not."""


class Copy(NamedTuple):
    """One broker: its disk, its memory, its place in the row, and the metaserver's knowledge of it."""

    role: int
    epoch: int
    """term * 10 + boot; of a slave: term * 10."""
    promised: int
    """Refuses epochs of lower terms."""
    log: Log
    flushed: int
    members: int
    """Bit c: it is a member in configuration c."""
    is_master_in_row: bool = False
    was_master_in_row: bool = False
    config: int = 0
    """Of a master: the configuration by which it acknowledges."""
    heard: bool = True
    """It received the row since its restart."""
    lacks: bool = False
    fit: bool = True
    """Since its restart and in this term it had fsynced all frames of the master."""
    follows: int = 0
    """Epoch of the master that counts it; 0: none."""
    matched: int = 0
    is_whole_in_row: bool = False
    """The row saw it in sync while all copies acknowledged. Kept if the master may be declared gone, as the next
    field.
    """
    is_old: bool = False
    """Its disk was rolled back and it was not in sync since: operators do not count it."""
    answer: Log = NO_ANSWER
    """Its frames when it promised the requested term, as sent to the metaserver."""


class State(NamedTuple):
    term: int
    config: int
    copies: tuple[Copy, ...]
    safe: Log = ()
    """The longest acknowledged history."""
    ms: tuple[int, ...] = (2,)
    """Per configuration, the number of copies that acknowledge."""
    written: int = 0
    crashes: int = 0
    faults: int = 0
    asked: int = 0
    """The term for which promises are requested."""
    row_forgot: bool = False
    """The row was rolled back, with its acknowledged point."""
    chosen_with: Log = ()
    """The frames of the last chosen master at its choice, stored in the row as if acknowledged."""
    before: tuple[int, ...] = ()
    """The previous row: term, configuration. Kept while the row may be rolled back."""
    broken: str = ""


def world(size: int, m: int) -> State:
    """Three brokers, of which `size` are members; the first is the master of term 1."""
    copies = [Copy(MASTER, 11, 0, (), 0, 1, True)]
    copies += [Copy(SLAVE, 10, 0, (), 0, 1) for _ in range(size - 1)]
    copies += [Copy(OUT, 0, 0, (), 0, 0) for _ in range(3 - size)]
    return State(1, 0, tuple(sorted(copies)), ms=(m,))


# ---- frames and histories


def frame(epoch: int, faults: int, message: int) -> int:
    """Encode a frame; message 0 is the epoch frame. No two first frames are equal, even where a rolled-back disk reuses
    an epoch: they contain times, here the number of faults so far.
    """
    return (epoch * 10 + faults) * 10 + message


def others_than_before() -> State:
    """Two of three acknowledge, from term 2 on. In term 1 the master did so with a broker that is no member now."""
    log = (frame(11, 0, 0),)
    copies = [Copy(MASTER, 11, 0, log, 1, 1, True), Copy(SLAVE, 10, 0, (), 0, 1), Copy(SLAVE, 10, 0, (), 0, 1)]
    return State(2, 0, tuple(sorted(copies)), safe=log)


WORLDS = {
    "three_of_two": world(3, 2),
    "three_of_three": world(3, 3),
    "two_of_two": world(2, 2),
    "others_than_before": others_than_before(),
}
"""n copies of which m acknowledge, as `n_of_m`."""


def epoch_of(log: Log) -> int:
    return log[-1] // 100 if log else 0


def show(log: Log) -> str:
    names = (f"{f // 1000}.{f // 100 % 10}" + (f":{'_abcdefgh'[f % 10]}" if f % 10 else "") for f in log)
    return f"[{' '.join(names)}]"


def common(a: Log, b: Log) -> int:
    """Return the length of the common prefix of two logs."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def has_begun(me: Copy) -> bool:
    return epoch_of(me.log) == me.epoch


def is_at_work(me: Copy) -> bool:
    return me.role == MASTER and me.heard


def order(me: Copy) -> tuple:
    return (*me[:-1], me.answer != NO_ANSWER, me.answer or ())


def set_of(copies: Iterable[Copy], config: int) -> list[Copy]:
    return [me for me in copies if me.members >> config & 1]


# ---- results of a step


def after_step(state: State, copies: list[Copy], rules: Rules, **changes: Any) -> State:
    """Return the state with these copies: acknowledged as far as possible, checked, sorted."""
    masters = {me.epoch for me in copies if me.role == MASTER}
    for i, me in enumerate(copies):
        if me.follows and me.follows not in masters:
            copies[i] = me._replace(follows=0, matched=0)
    safe, broken, ms = state.safe, changes.pop("broken", state.broken), changes.get("ms", state.ms)
    for me in copies:
        if me.role == MASTER and me.log:
            acknowledged = me.log[: watermark(me, copies, ms, rules)]
            n = min(len(acknowledged), len(safe))
            if acknowledged[:n] != safe[:n]:
                broken = f"acknowledged: {show(acknowledged)} and {show(safe)}"
            elif len(acknowledged) > len(safe):
                safe = acknowledged
    copies.sort()
    return state._replace(copies=tuple(copies), safe=safe, broken=broken or look(copies, safe), **changes)


def watermark(me: Copy, copies: list[Copy], ms: tuple[int, ...], rules: Rules) -> int:
    """Return the acknowledged part of a master's log."""
    own = me.flushed if rules.own_fsync else len(me.log)
    slaves = [c.matched for c in copies if c.follows == me.epoch and c.members >> me.config & 1 and c is not me]
    m = ms[me.config] - (0 if rules.enough_copies else 1)
    if len(slaves) < m - 1:
        return 0
    end = min(sorted([own, *slaves])[-m], own)
    return end if not rules.own_epoch or (end and me.log[end - 1] // 100 == me.epoch) else 0


def look(copies: list[Copy], safe: Log) -> str:
    """Return the name of the broken promise."""
    at_work = [me for me in copies if me.role == MASTER and me.heard and has_begun(me)]
    if not at_work:
        return ""
    epoch, n = epoch_of(safe), len(safe)
    for i, me in enumerate(at_work):
        if me.epoch > epoch and me.log[:n] != safe:
            return f"complete: {show(safe)} was acknowledged; the master of {me.epoch / 10} has {show(me.log)}"
        if any(me.epoch == other.epoch for other in at_work[:i]):
            return f"one master: two are at work in epoch {me.epoch / 10}"
    return ""


def with_row(
    state: State, copies: list[Copy], bounds: Bounds, rules: Rules, *, keeps_whole: bool = False, **row: Any
) -> dict[str, Any]:
    """Change the row, which invalidates earlier answers. `copies` are in the order of the state's.

    `keeps_whole`: copies that the row saw in sync still have all acknowledged frames.
    """
    keeps = bounds.faults > state.faults
    for i, before in enumerate(state.copies):
        answer = NO_ANSWER if rules.compare_and_set else before.answer
        copies[i] = copies[i]._replace(
            answer=answer,
            was_master_in_row=keeps and before.is_master_in_row,
            is_whole_in_row=keeps_whole and before.is_whole_in_row,
        )
    asked = 0 if rules.compare_and_set else state.asked
    return {"asked": asked, "before": (state.term, state.config) if keeps else (), **row}


# ---- the steps


Steps = Iterator[tuple[Words, State]]


def steps(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """Yield all next steps, as (words, state)."""
    for i, me in enumerate(state.copies):
        others = state.copies[:i] + state.copies[i + 1 :]
        yield from (begins_anew if is_new_life(me, rules) else hears)(state, me, others, bounds, rules)
        yield from promises(state, me, others, bounds, rules)
        if is_at_work(me):
            yield from as_master(state, me, others, bounds, rules)
        if me.role == SLAVE and me.heard:
            yield from as_slave(state, me, others, rules)
        if state.crashes < bounds.crashes:
            yield from crashes(state, me, others, rules)
        if state.faults < bounds.faults:
            yield from put_back(state, me, others, bounds, rules)
    if bounds.gone:
        yield from seen(state, bounds, rules)
    yield from row_changes(state, bounds, rules)


def hears(state: State, me: Copy, others: tuple[Copy, ...], bounds: Bounds, rules: Rules) -> Steps:
    """A broker receives the row."""
    term = me.epoch // 10
    is_member = me.members >> state.config & 1
    is_known = me.heard and (rules.new_term or me.role != MASTER or me.config == state.config)
    if state.term < max(term, me.promised) or (state.term == term and is_known):
        return
    if not is_member:
        if me.role == OUT:
            return
        after = me._replace(role=OUT, epoch=state.term * 10, follows=0, matched=0, heard=True)
        yield ("a broker hears that it is no member in term {}", state.term), after_step(state, [after, *others], rules)
        return
    if state.term == term:
        after = me._replace(heard=True)
    else:
        role, boot = (MASTER, 1) if me.is_master_in_row else (SLAVE, 0)
        after = me._replace(role=role, epoch=state.term * 10 + boot, heard=True, follows=0, matched=0)
        after = after._replace(fit=me.fit and not rules.in_this_term)
    if after.role == MASTER:
        after = after._replace(config=state.config, lacks=is_lacking(state, after.log, rules))
    words = ("a broker with {} hears that it is {} of term {}", me.log, ROLES[after.role], state.term)
    yield words, after_step(state, [after, *others], rules)


def is_new_life(me: Copy, rules: Rules) -> bool:
    """Whether it is a restarted broker and the row's master."""
    return rules.new_life and not me.heard and me.is_master_in_row


def begins_anew(state: State, me: Copy, others: tuple[Copy, ...], bounds: Bounds, rules: Rules) -> Steps:
    """It requests its part. The row gets a term in which it was never master before, and then it receives the row."""
    term = max(state.term + 1, *(c.promised for c in state.copies))
    if term > bounds.terms or (rules.above and any(c.epoch // 10 > state.term for c in state.copies)):
        return
    copies = list(state.copies)
    row = with_row(state, copies, bounds, rules, term=term, keeps_whole=True)
    i = state.copies.index(me)
    after = copies[i]._replace(role=MASTER, epoch=term * 10 + 1, heard=True, config=state.config)
    copies[i] = after._replace(lacks=is_lacking(state, after.log, rules))
    words = ("a broker with {} restarted: it is the master of term {}", me.log, term)
    yield words, after_step(state, copies, rules, **row)


def is_lacking(state: State, log: Log, rules: Rules) -> bool:
    """Whether a master's log lacks the row's acknowledged point."""
    if state.row_forgot or not rules.row:
        return False
    return log[: len(state.safe)] != state.safe or log[: len(state.chosen_with)] != state.chosen_with


def promises(state: State, me: Copy, others: tuple[Copy, ...], bounds: Bounds, rules: Rules) -> Steps:
    """The metaserver asks a broker to refuse all terms below a new one."""
    if me.role == OUT or not me.heard or (rules.in_sync and not me.fit and not was_whole(state, me, bounds, rules)):
        return
    if rules.in_this_term and me.epoch // 10 != state.term:
        return
    if rules.above and any(c.epoch // 10 > state.term for c in state.copies):
        return
    for term in range(state.term + 1, bounds.terms + 1):
        if term <= me.epoch // 10 or (state.asked and state.asked != term):
            continue
        after = me._replace(answer=me.log[: me.flushed])
        if rules.promise_first:
            role = FENCED if me.role == MASTER else me.role
            after = after._replace(promised=max(term, me.promised), role=role, log=after.answer)
        if after == me:
            continue
        words = ("a broker with {} promises to refuse all before term {}", me.log, term)
        yield words, after_step(state, [after, *others], rules, asked=term)


def was_whole(state: State, me: Copy, bounds: Bounds, rules: Rules) -> bool:
    """Whether a slave that was not in sync since its restart counts when the master is declared gone."""
    if not bounds.gone or me.role != SLAVE or me.is_old:
        return False
    if len(set_of(state.copies, state.config)) == state.ms[state.config]:
        return me.is_whole_in_row or not rules.seen_whole
    return epoch_of(me.log) // 10 == state.term or not rules.frame_of_term


def seen(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """The master of the row's term reports, while all copies acknowledge, that all of them are in sync."""
    members, m = set_of(state.copies, state.config), state.ms[state.config]
    master = next((me for me in members if me.is_master_in_row), None)
    if master is None or not is_at_work(master) or master.epoch // 10 != state.term or len(members) != m:
        return
    if all(me is master or me.follows == master.epoch for me in members) and watermark(
        master, list(state.copies), state.ms, rules
    ):
        copies = [c._replace(is_whole_in_row=c in members and not c.is_master_in_row) for c in state.copies]
        if copies != list(state.copies):
            yield ("metaserver: all copies are in sync",), after_step(state, copies, rules)


def as_master(state: State, me: Copy, others: tuple[Copy, ...], bounds: Bounds, rules: Rules) -> Steps:
    """A master begins, appends, fsyncs; before it begins, it restores frames that a slave has."""
    if me.flushed < len(me.log):
        after = me._replace(flushed=len(me.log), fit=me.fit or has_begun(me))
        yield ("the master of {} fsyncs {}", me.epoch / 10, me.log), after_step(state, [after, *others], rules)
    if has_begun(me):
        if state.written < bounds.messages:
            log = (*me.log, frame(me.epoch, state.faults, state.written + 1))
            words = ("the master of {} appends: {}", me.epoch / 10, log)
            yield words, after_step(state, [me._replace(log=log), *others], rules, written=state.written + 1)
        return
    for other in others:
        n = len(me.log)
        if other.role == SLAVE and other.epoch // 10 == me.epoch // 10 and other.promised <= me.epoch // 10:
            if other.heard and len(other.log) > n and other.log[:n] == me.log:
                after = me._replace(log=other.log, lacks=me.lacks and is_lacking(state, other.log, rules))
                words = ("the master of {} takes back what a slave has: {}", me.epoch / 10, after.log)
                yield words, after_step(state, [after, *others], rules)
    if not me.lacks:
        after = me._replace(log=(*me.log, frame(me.epoch, state.faults, 0)))
        yield ("the master of {} begins: {}", me.epoch / 10, after.log), after_step(state, [after, *others], rules)


def as_slave(state: State, me: Copy, others: tuple[Copy, ...], rules: Rules) -> Steps:
    """A slave connects to a master of its term; receives, fsyncs and confirms the next frame."""
    for master in others:
        if master.epoch // 10 != me.epoch // 10 or not is_at_work(master) or not has_begun(master):
            continue
        if me.promised > me.epoch // 10:
            continue
        if me.follows != master.epoch:
            n = common(me.log, master.log)
            after = me._replace(log=me.log[:n], flushed=n, follows=master.epoch, matched=n)
            words: Words = ("a slave with {} follows the master of {} from {}", me.log, master.epoch / 10, n)
            broken = ""
            if n < len(state.safe) and me.log[: len(state.safe)] == state.safe:
                broken = f"cut: {show(me.log)} to {n}, and {show(state.safe)} was acknowledged"
        elif len(me.log) < len(master.log):
            n = len(me.log) + 1
            after = me._replace(log=master.log[:n], flushed=n, matched=n)
            words, broken = ("a slave has {}", after.log), ""
        else:
            continue
        if len(after.log) == len(master.log):
            after = after._replace(fit=True, is_old=False)
        yield words, after_step(state, [after, *others], rules, broken=broken)


def crashes(state: State, me: Copy, others: tuple[Copy, ...], rules: Rules) -> Steps:
    """A broker restarts with the contents of its disk."""
    if me.role == OUT:
        return
    after = me._replace(fit=False, heard=not rules.row_first, follows=0, matched=0)
    if not rules.promise_durable:
        after = after._replace(promised=0, role=MASTER if me.role == FENCED else me.role)
    if after.role == MASTER:
        after = after._replace(epoch=me.epoch + 1)
    for keep in range(me.flushed, len(me.log) + 1):
        kept = after._replace(log=me.log[:keep], flushed=keep)
        words = ("a broker with {} crashes and has {}", me.log, kept.log)
        yield words, after_step(state, [kept, *others], rules, crashes=state.crashes + 1)


def put_back(state: State, me: Copy, others: tuple[Copy, ...], bounds: Bounds, rules: Rules) -> Steps:
    """A disk is rolled back or loses its last frames; its points are as new as before, or as old."""
    if me.role == OUT:
        return
    after = me._replace(fit=False, heard=not rules.row_first, follows=0, matched=0, answer=NO_ANSWER, promised=0)
    after = after._replace(is_old=bounds.gone > 0)
    for keep in range(me.flushed):
        log = me.log[:keep]
        kept = after._replace(log=log, flushed=keep)
        words = ("the disk of a broker with {} is put back to {}", me.log, log)
        as_now = kept._replace(epoch=me.epoch + (me.role == MASTER), promised=me.promised)
        as_then = kept._replace(role=SLAVE, epoch=max(epoch_of(log), 10) // 10 * 10)
        for found in (as_now, as_then):
            yield words, after_step(state, [found, *others], rules, faults=state.faults + 1)


# ---- the row


def row_changes(state: State, bounds: Bounds, rules: Rules) -> Steps:
    newest = max(me.epoch // 10 for me in state.copies)
    if newest > state.term:
        yield from adopted(state, bounds, rules)
    if not (rules.above and newest > state.term):
        if state.asked:
            yield from chosen(state, bounds, rules)
            yield from forgotten(state, rules)
        yield from swapped(state, bounds, rules)
        if state.term < bounds.terms:
            yield from renewed(state, bounds, rules)
    if state.faults < bounds.faults and state.before:
        yield from gone_back(state, rules)


def forgotten(state: State, rules: Rules) -> Steps:
    """The asking metaserver ends before its choice. The promises stay; the same or another term is requested again."""
    copies = [me._replace(answer=NO_ANSWER) for me in state.copies]
    words = ("metaserver: what was answered for term {} is forgotten", state.asked)
    yield words, after_step(state, copies, rules, asked=0)


def reach(me: Copy) -> tuple[int, int]:
    return epoch_of(me.answer), len(me.answer)


def chosen(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """Failover and SwapRoles: one compare-and-set makes the copy with most frames the master of the promised term.

    Several metaservers may ask at the same time, so each may have any n - m + 1 of the answers.
    """
    members = set_of(state.copies, state.config)
    answered = [me for me in members if me.answer != NO_ANSWER]
    enough = len(members) - state.ms[state.config] + 1 if rules.enough_promises else 1
    for me in answered:
        if sum(reach(other) <= reach(me) or not rules.highest for other in answered) < enough:
            continue
        copies = [c._replace(is_master_in_row=c is me) for c in state.copies]
        keeps = bounds.faults and rules.chosen_point
        row = with_row(state, copies, bounds, rules, term=state.asked, chosen_with=me.answer if keeps else ())
        words = ("metaserver: the broker with {} is the master of term {}", me.log, state.asked)
        yield words, after_step(state, copies, rules, broken=lost(state, me.answer), **row)


def lost(state: State, log: Log) -> str:
    if log[: len(state.safe)] == state.safe:
        return ""
    return f"choice: {show(state.safe)} was acknowledged, and who has {show(log)} is chosen"


def swapped(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """SwapRoles: the old master's promise suffices for a slave that has all its frames of that time."""
    old = next((me for me in state.copies if me.is_master_in_row and me.role == FENCED), None)
    if old is None or old.answer == NO_ANSWER or not has_begun(old):
        return
    for me in set_of(state.copies, state.config):
        if me.role == SLAVE and me.heard and me.fit and me.epoch // 10 == state.term and me.log == old.answer:
            copies = [c._replace(is_master_in_row=c is me) for c in state.copies]
            row = with_row(state, copies, bounds, rules, term=state.asked, chosen_with=me.log if bounds.faults else ())
            words = ("metaserver: roles are swapped, who has {} is the master of term {}", me.log, state.asked)
            yield words, after_step(state, copies, rules, broken=lost(state, me.log), **row)


def renewed(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """The same master in a new term: with other members or another m, or because promises led to no choice."""
    term = max(state.term, *(me.promised for me in state.copies)) + (1 if rules.new_term else 0)
    if term <= bounds.terms and any(me.promised > state.term for me in state.copies):
        term_asked = max(me.promised for me in state.copies)
        copies = list(state.copies)
        row = with_row(state, copies, bounds, rules, term=term_asked, keeps_whole=True)
        words: Words = ("metaserver: term {} begins with the same master", term_asked)
        yield words, after_step(state, copies, rules, **row)
    if term > bounds.terms or len(state.ms) > bounds.changes:
        return
    new, m = len(state.ms), state.ms[state.config]
    members = set_of(state.copies, state.config)
    for i, me in enumerate(state.copies):
        if me.is_master_in_row:
            continue
        is_member = me in members
        if is_member and len(members) - 1 < m:
            continue
        copies = [c._replace(members=c.members | (1 << new)) if c in members else c for c in state.copies]
        copies[i] = me._replace(members=me.members ^ (0 if is_member else 1 << new))
        row = with_row(
            state, copies, bounds, rules, term=term, config=new, ms=(*state.ms, m), keeps_whole=not is_member
        )
        words = ("metaserver: in term {} the broker with {} is {} member", term, me.log, "no" if is_member else "a")
        yield words, after_step(state, copies, rules, **row)
    for other in (m - 1, m + 1):
        if 2 <= other <= len(members):
            copies = [c._replace(members=c.members | (1 << new)) if c in members else c for c in state.copies]
            row = with_row(
                state,
                copies,
                bounds,
                rules,
                term=term,
                config=new,
                ms=(*state.ms, other),
                keeps_whole=len(members) == m,
            )
            yield (
                ("metaserver: in term {}, {} copies acknowledge", term, other),
                after_step(state, copies, rules, **row),
            )


def gone_back(state: State, rules: Rules) -> Steps:
    term, config = state.before
    copies = [
        me._replace(is_master_in_row=me.was_master_in_row, was_master_in_row=False, answer=NO_ANSWER)
        for me in state.copies
    ]
    words = ("metaserver: its database is put back to term {}", term)
    yield (
        words,
        after_step(
            state, copies, rules, term=term, config=config, before=(), asked=0, row_forgot=True, faults=state.faults + 1
        ),
    )


def adopted(state: State, bounds: Bounds, rules: Rules) -> Steps:
    """A row older than its brokers' reports is raised above them, with their master."""
    term = max(max(me.epoch // 10, me.promised) for me in state.copies) + 1
    newest = max(me.epoch // 10 for me in state.copies)
    for me in set_of(state.copies, state.config):
        if term <= bounds.terms and me.role == MASTER and me.epoch // 10 == newest:
            copies = [c._replace(is_master_in_row=c is me) for c in state.copies]
            row = with_row(state, copies, bounds, rules, term=term)
            yield ("metaserver: the row is raised to term {}", term), after_step(state, copies, rules, **row)


# ---- searches


def explore(start: State, bounds: Bounds, rules: Rules = ALL) -> Found:
    """Visit every state within `bounds`, nearest first; stop at the first that breaks a promise."""
    return search(start, lambda state: steps(state, bounds, rules), lambda state: state.broken, describe)


def count(start: State, bounds: Bounds, rules: Rules = ALL) -> Found:
    """As `explore`, for worlds too large to store the path to each state."""
    return search(start, lambda state: steps(state, bounds, rules), lambda state: state.broken, None)


def describe(words: Words, before: State, after: State) -> str:
    acked = f"; acknowledged: {show(after.safe)}" if after.safe != before.safe else ""
    return str(words[0]).format(*(show(w) if isinstance(w, tuple) else w for w in words[1:])) + acked


if __name__ == "__main__":
    without = {name: False for name in sys.argv[1:] if name in Rules._fields}
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    name = next(word for word in sys.argv[1:] if word in WORLDS)
    walk = explore if without else count
    print(walk(WORLDS[name], Bounds(*numbers), ALL._replace(**without)), flush=True)
