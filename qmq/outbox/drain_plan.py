"""Core. Drain of one outbox: the rows to claim, their broker groups, and the outcome of each claim.

    row         claimed -> sent -> stored        deleted
                                -> not stored    released: until the group takes rows if it is at fault, else with
                                                 back-off; parked after the error limit
                                -> unknown       the same batch again to the same group, also by the next leader
                invalid                          parked, with its reason
                under a foreign claim            parked, after a while
                without a group to take it       postponed: others go first

A batch is sent only after its claim is stored, and rows leave a claim only when their outcome is certain. One piece of
work runs in the database at a time; answers of brokers arrive at any time.

Order: messages with order keys go to the group of their key, one batch of a subject and group at a time, and none while
another drain has claims for that group.

A drain belongs to a watchdog, one at a time by a lease, or to a producer (`qmq.outbox.relay`), several at a time. A
producer's drain never ends another's claim because of its term alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from qmq.client.batch import (
    BATCH_LIFE,
    Answer,
    BatchEvent,
    BatchLife,
    BatchSender,
    BatchState,
    NotStored,
    NumberedBatch,
    Stored,
)
from qmq.errors import AskAnotherBroker, CallError, NotServed, QmqError
from qmq.outbox.claims import (
    AdoptClaims,
    Candidate,
    ClaimName,
    ClaimRows,
    Disown,
    Due,
    Known,
    Page,
    Postponed,
    ReadClaims,
    ReadPage,
    Released,
    SettleClaims,
    Settled,
    Work,
    batch_of,
    is_relay,
)
from qmq.states import TRANSITIONS_KEPT, Transition

BATCH_BYTES_MAX = 1 << 20
NUMBERS_SPAN_MAX = 60
"""Limit of the distance between the oldest and the newest number under way. Brokers remember the last 64 numbers of a
producer.
"""
SUSPECTS_MAX = 100_000
REASON_CHARS_MAX = 500
"""Size of the column `reason`."""
OTHER_TERMS_MS = 600_000
"""Age after which a claim of a later term is adopted. Such a claim normally belongs to a later leader. One this old,
longer than any lease, is of another room, or from before the metaservers were reset, and no other drain adopts it. If
it is adopted wrongly, its batch is sent again. Rows of foreign or damaged claims are parked after this time.
"""
RELAY_MS = 60_000
"""Age at which any drain adopts a producer's claim, because the process may have ended. If it still runs, both send the
same batch, which the broker group stores once.
"""
PASS_MS_MAX = 60_000
"""Maximum time of a pass: rows that come due as fast as they are read must not hide the rows behind them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and delays, from the settings.

    `rate`: rows a second, of this database. `room_ms`: maximum wait of other rows for a group that is full or silent.
    """

    rate: int = 10_000
    page_rows: int = 500
    claims_max: int = 8
    errors_max: int = 1_000
    release_ms: int = 1_000
    release_ms_max: int = 600_000
    repeat_ms: int = 200
    repeat_ms_max: int = 10_000
    postpone_ms: int = 1_000
    postpone_ms_max: int = 60_000
    rest_ms: int = 1_000
    room_ms: int = 2_000
    unknown_ms_max: int = 24 * 3_600_000

    def __post_init__(self) -> None:
        assert self.claims_max < NUMBERS_SPAN_MAX


Lane = tuple[str, str | None]
"""(subject, home) of rows that wait together. `home` is "" without order keys, the group of the order keys, or None if
that group is unknown.
"""


@dataclass(slots=True, eq=False)
class Claim:
    """Claim under way. `due_ms`: time of its next send. `end`: its outcome, to be stored."""

    name: ClaimName
    rows: list[Candidate]
    life: BatchLife
    due_ms: int
    claimed_ms: int
    unsound: list[tuple[int, str]] = field(default_factory=list)
    """Rows that this program cannot read, although the one that claimed them could. They are parked when the claim
    ends.
    """
    attempts: int = 0
    end: Settled | Released | None = None

    @property
    def subject(self) -> str:
        return self.rows[0].subject

    @property
    def is_waiting(self) -> bool:
        """Whether the claim is to be sent at `due_ms`."""
        return self.end is None and not self.life.is_in_flight

    @property
    def may_be_stored(self) -> bool:
        """Whether an attempt by any leader may have stored the batch."""
        return self.end is None and self.life.may_be_stored

    @property
    def is_ordered(self) -> bool:
        return any(row.is_ordered for row in self.rows)

    @property
    def lane(self) -> Lane:
        return self.subject, self.name.group if self.is_ordered else ""

    @property
    def ids(self) -> list[int]:
        return [row.id for row in self.rows]


@dataclass(slots=True)
class _Numbering:
    """Numbers of this leader's batches to one broker group: a producer id of their own, and ascending numbers."""

    producer: int
    number: int = 0


class _Postponement(NamedTuple):
    """Postponement of a lane that no group accepts: its end by both clocks, its delay, and the reason."""

    until_ms: int
    delay_ms: int
    due: Due
    reason: str


@dataclass(slots=True)
class Counts:
    """Counters of a drain, for metrics."""

    sent: int = 0
    failed: int = 0
    parked: int = 0
    unknown: int = 0
    released: int = 0
    claimed: int = 0


@dataclass(slots=True)
class Attempt:
    """Batch to send now; its answer goes to `DrainPlan.answered`."""

    claim: Claim
    group: str
    batch: NumberedBatch


@dataclass(slots=True)
class DrainPlan:
    """Plan for one outbox during one lease. Used on one loop.

    Args:
        new_producer: returns a unique producer id.
    """

    term: int
    limits: Limits
    brokers: BatchSender
    new_producer: Callable[[], int]
    counts: Counts = field(default_factory=Counts)
    history: deque[Transition] = field(default_factory=lambda: deque(maxlen=TRANSITIONS_KEPT))
    """Last transitions of its batches."""
    last_pass_ms: int | None = None
    """Time when a scan last reached the end of the table."""
    _claims: dict[str, Claim] = field(default_factory=dict)
    _numberings: dict[str, _Numbering] = field(default_factory=dict)
    _producers: set[int] = field(default_factory=set)
    """Producer ids of all numberings so far."""
    _order: ClaimRows | None = None
    _new: dict[str, Claim] = field(default_factory=dict)
    """Claims in `_order`."""
    _foreign: list[Known] = field(default_factory=list)
    _unowned: list[Known] = field(default_factory=list)
    """Old foreign claims."""
    _claims_after: str | None = ""
    """Claim after which to continue reading; None after the last one."""
    _after: tuple[object, int] | None = None
    _page: Page | None = None
    """Page with rows that have found no room yet."""
    _clock: object = None
    """The database's clock at `_clock_read_ms`."""
    _clock_read_ms: int = 0
    _page_ms: int = 0
    """Time when a row of the last page last found room, or when the page was read."""
    _pass_ms: int = 0
    """Time when the pass began."""
    _rest_until_ms: int = 0
    _is_passing_by: bool = False
    """Whether the pass changes no rows, because no group is usable. Once one is, the pass begins anew, with the oldest
    rows.
    """
    _postponements: dict[Lane, _Postponement] = field(default_factory=dict)
    """Postponements of lanes of which no batch was stored since."""
    _suspects: set[int] = field(default_factory=set)
    """Rows of a batch that was rejected as invalid. Each is sent alone, to find the invalid ones."""
    _tokens: float = 0.0
    _tokens_ms: int | None = None
    _is_stopping: bool = False

    # Next steps.

    def stop(self) -> None:
        """Stop claiming. Claims under way continue to their end."""
        self._is_stopping = True

    @property
    def is_idle(self) -> bool:
        """Whether no claim under way can end soon."""
        return all(claim.is_waiting and claim.may_be_stored for claim in self._claims.values())

    @property
    def has_stopped(self) -> bool:
        """Whether the drain was stopped, and all claims that end soon have ended."""
        return self._is_stopping and self.is_idle and not any(claim.end for claim in self._claims.values())

    def is_through(self, began_ms: int) -> bool:
        """Return whether a whole pass since `began_ms` has sent all sendable rows and got their answers."""
        is_passed = self.last_pass_ms is not None and self.last_pass_ms >= began_ms
        is_passed = is_passed or (self._is_passing_by and not self.brokers.is_any_usable())
        is_busy = self._order is not None or self._page is not None or any(claim.end for claim in self._claims.values())
        return is_passed and not is_busy and self.is_idle

    def next_work(self, now_ms: int) -> Work | None:
        """Return the next work for the database, or None until `wake_ms` or an answer."""
        if any(claim.end for claim in self._claims.values()):
            ends = [claim.end for claim in self._claims.values() if claim.end]
            settled = [end for end in ends if isinstance(end, Settled)]
            return SettleClaims(settled, [end for end in ends if isinstance(end, Released)])
        if self._is_stopping:
            return None
        if self._order is not None:
            return self._order
        if self._foreign:
            old = self._foreign[0].claim
            return AdoptClaims(old, str(ClaimName.parse(old).of_term(self.term)))
        if self._unowned:
            claim = self._unowned[0].claim
            return Disown(claim, _reason(f"its claim {claim!r} is foreign; whether it was sent is unknown"))
        if self._claims_after is not None:
            return ReadClaims(self._claims_after)
        return self._next_page(now_ms)

    def _next_page(self, now_ms: int) -> Work | None:
        if self._page is not None:
            self._compose(self._page, now_ms)
            return self._order
        if self._begin_anew_if_any_is_usable():
            self._rest_until_ms = now_ms
        limit = min(self.limits.page_rows, self._allowed(now_ms))
        if now_ms < self._rest_until_ms or not limit or not self._has_room(now_ms):
            return None
        if self._after is None:
            self._pass_ms = now_ms
        return ReadPage(self._after, limit)

    def _begin_anew_if_any_is_usable(self) -> bool:
        is_anew = self._is_passing_by and self.brokers.is_any_usable()
        if is_anew:
            self._after = None
            self._is_passing_by = False
        return is_anew

    def _has_room(self, now_ms: int) -> bool:
        """Return whether another page may be read. A fresh ordered batch must end first, so that later rows need not be
        skipped.
        """
        awaited = self._awaited(now_ms)
        return len(awaited) < self.limits.claims_max and not any(claim.is_ordered for claim in awaited)

    def _must_wait(self, now_ms: int) -> bool:
        """Return whether there is no room now, and no row has waited long enough to be passed by others."""
        is_full = len(self._awaited(now_ms)) >= self.limits.claims_max
        return is_full and now_ms - self._page_ms < self.limits.room_ms

    def _awaited(self, now_ms: int) -> list[Claim]:
        """Return the claims expected to end soon; their number is limited."""
        claims = (*self._claims.values(), *self._new.values())
        return [
            claim for claim in claims if not claim.may_be_stored and now_ms - claim.claimed_ms < self.limits.room_ms
        ]

    def wake_ms(self, now_ms: int) -> int:
        """Return the time of the next step if no answer arrives earlier."""
        dues = [claim.due_ms for claim in self._claims.values() if claim.is_waiting]
        soon = now_ms + 100  # for the rate, room, or newly usable groups
        return max(min([soon, *dues]) if self._claims or self._page else min(self._rest_until_ms, soon), now_ms + 1)

    def _allowed(self, now_ms: int) -> int:
        """Return the number of rows that may be claimed now, at most those of a second."""
        since_ms = now_ms - (self._tokens_ms if self._tokens_ms is not None else now_ms - 1_000)
        self._tokens = min(float(self.limits.rate), self._tokens + since_ms * self.limits.rate / 1000)
        self._tokens_ms = now_ms
        enough = min(self.limits.page_rows, self.limits.rate) / 2  # instead of a page per row
        return int(self._tokens) if self._tokens >= max(1.0, enough) else 0

    # Answers.

    def failed(self, work: Work, now_ms: int) -> None:
        """Handle a failure, or unknown outcome, of work in the database.

        The work is repeated, all claims are read anew, and new batches get new producer ids, so that a number that may
        be claimed does not fall out of the brokers' memory.
        """
        self._order = None
        self._page = None
        self._after = None
        self._new.clear()
        self._foreign.clear()
        self._unowned.clear()
        self._numberings.clear()
        self._claims_after = ""

    def page(self, page: Page, now_ms: int) -> None:
        if page.clock is not None:
            self._clock = page.clock
            self._clock_read_ms = now_ms
        self._page_ms = now_ms
        if not self._begin_anew_if_any_is_usable():
            self._compose(page, now_ms)

    def claimed(self, got: dict[str, list[int]], now_ms: int) -> None:
        """Handle the answer to ClaimRows; `got`: ids by claim."""
        new, order = self._new, self._order
        self._new = {}
        self._order = None
        for text, ids in got.items():
            claim, kept = new[text], set(ids)
            if claim.is_ordered and not kept:
                self._postpone(claim.lane, "another process sends for its broker group", now_ms)
            claim.rows = [row for row in claim.rows if row.id in kept]
            if claim.rows:
                self._claims[text] = claim
                self._tokens -= len(claim.rows)
                self.counts.claimed += len(claim.rows)
        if order is not None:
            self.counts.parked += len(order.parked)

    def settled(self, work: SettleClaims, now_ms: int) -> None:
        ends: list[Settled | Released] = [*work.settled, *work.released]
        for end in ends:
            claim = self._claims.get(end.claim)
            if claim is not None and claim.end is end:
                del self._claims[end.claim]
                self._count(end)
                if isinstance(end, Released) and now_ms - claim.claimed_ms >= RELAY_MS:
                    # Another drain may have adopted it and still send it, so its number must stay in the brokers'
                    # memory.
                    self._numberings.pop(claim.name.group, None)

    def _count(self, end: Settled | Released) -> None:
        if isinstance(end, Settled):
            self.counts.sent += len(end.stored)
            self.counts.parked += len(end.parked)
        else:
            self.counts.released += len(end.ids)

    def known(self, found: list[Known]) -> None:
        """Handle claims found in the database: those of earlier leaders, and own ones with an unknown outcome."""
        self._claims_after = (found[-1].claim or None) if found else None  # the empty claim comes first
        for known in found:
            if known.claim in self._claims:
                continue
            name, is_old = _name_of(known.claim), known.age_ms >= OTHER_TERMS_MS
            if name is None:
                if is_old:
                    self._unowned.append(known)
            elif name.producer in self._producers or is_old or self._is_over(name.term, known.age_ms):
                self._foreign.append(known)

    def _is_over(self, term: int, age_ms: int) -> bool:
        """Return whether a claim's drain has ended, by its term and age."""
        return age_ms >= RELAY_MS if is_relay(term) else term <= self.term and not is_relay(self.term)

    def disowned(self, work: Disown, count: int) -> None:
        """Handle the number of parked rows. The next pass finds the claim again if rows are left."""
        self._unowned = [known for known in self._unowned if known.claim != work.claim]
        self.counts.parked += count

    def adopted(self, work: AdoptClaims, rows: list[Candidate], now_ms: int) -> None:
        """Handle the rows of an adopted claim. Some may be stored, so the same batch is sent again."""
        known = next(known for known in self._foreign if known.claim == work.old)
        self._foreign.remove(known)
        sound = [row for row in rows if not row.problem]
        unsound = [(row.id, _reason(row.problem)) for row in rows if row.problem]
        if not rows:
            return
        claim = Claim(ClaimName.parse(work.new), sound, self._life(), now_ms, now_ms - known.age_ms, unsound)
        claim.life.on(BatchEvent.ADOPTED)
        self._claims[work.new] = claim
        self.counts.unknown += 1
        if sound:
            self.brokers.watch(sound[0].subject)
        else:
            claim.life.on(BatchEvent.GAVE_UP)
            self._end(claim, [], [])

    def _life(self) -> BatchLife:
        return BatchLife(BATCH_LIFE, self.history)

    # Choice of rows and groups.

    def _compose(self, page: Page, now_ms: int) -> None:
        """Put the rows of a page into batches; rows without room wait in `_page`."""
        parked = [(row.id, _reason(problem)) for row in page.rows if (problem := self._problem(row))]
        unsound = {id for id, _ in parked}
        by_subject = _by_subject(row for row in page.rows if row.id not in unsound)
        for subject in by_subject:
            self.brokers.watch(subject)
        if by_subject and not parked and not self.brokers.is_any_usable():
            # No group is usable: leave the rows unchanged. Later rows may be of groups that are still unknown.
            self._rest_until_ms = now_ms + self.limits.rest_ms
            self._page = None
            self._after = page.after
            self._is_passing_by = True
            return
        left: list[Candidate] = []
        postponed: list[Postponed] = []
        for subject, rows in by_subject.items():
            if self._must_wait(now_ms):
                left += rows  # avoids checking each of 500 subjects for each batch that ends
                continue
            rest, stuck = self._place(subject, rows, now_ms)
            left += rest
            postponed += stuck
        if parked or postponed or self._new:
            ordered = frozenset(text for text, claim in self._new.items() if claim.is_ordered)
            claims = {text: claim.ids for text, claim in self._new.items()}
            self._order = ClaimRows(claims, parked, postponed, ordered, frozenset(self._claims))
        self._page = Page(left, page.after) if left else None
        if self._new:
            self._page_ms = now_ms  # a page of many subjects takes time, which is no lack of room
        if not left:
            self._page_is_done(page, now_ms)

    def _problem(self, row: Candidate) -> str:
        return row.problem or ("too many errors" if row.errors >= self.limits.errors_max else "")

    def _page_is_done(self, page: Page, now_ms: int) -> None:
        self._after = page.after
        if page.after is None:
            self.last_pass_ms = now_ms
            self._rest_until_ms = now_ms + self.limits.rest_ms
            old_ms = now_ms - self.limits.postpone_ms_max
            self._postponements = {lane: hold for lane, hold in self._postponements.items() if hold.until_ms > old_ms}
        if page.after is None or now_ms - self._pass_ms >= PASS_MS_MAX:
            self._after = None
            self._claims_after = ""

    def _postpone(self, lane: Lane, reason: str, now_ms: int) -> _Postponement:
        """Postpone rows of a lane, all until the same time, so that they keep their order across pages.

        If no group accepts the lane then either, it is postponed for longer.
        """
        hold = self._postponements.get(lane)
        if hold is None or hold.until_ms <= now_ms:
            last_ms = hold.delay_ms if hold else 0
            delay_ms = max(self.limits.postpone_ms, min(last_ms * 2, self.limits.postpone_ms_max))
            until_ms = now_ms + delay_ms
            due = Due(self._clock, until_ms - (self._clock_read_ms if self._clock is not None else now_ms))
            hold = self._postponements[lane] = _Postponement(until_ms, delay_ms, due, _reason(reason))
        return hold

    def _is_postponed(self, lane: Lane, now_ms: int) -> bool:
        return lane in self._postponements and now_ms < self._postponements[lane].until_ms

    def _place(self, subject: str, rows: list[Candidate], now_ms: int) -> tuple[list[Candidate], list[Postponed]]:
        """Make claims of a subject's rows.

        Returns:
            Rows without room at this moment, and rows postponed in favour of others.
        """
        groups = self.brokers.groups(subject)
        homes: dict[str | None, list[Candidate]] = {}
        for row in rows:
            homes.setdefault(self.brokers.home(subject, row.label) if row.is_ordered else "", []).append(row)
        left: list[Candidate] = []
        postponed: list[Postponed] = []
        for home, some in homes.items():
            obstacle, rest = self._obstacle((subject, home), groups, now_ms), some
            if not obstacle:
                rest = self._spread(groups, some, now_ms) if home == "" else self._follow(subject, home, some, now_ms)
                is_late = now_ms - self._page_ms >= self.limits.room_ms or self._is_postponed((subject, home), now_ms)
                obstacle = "no group has room for it" if is_late else ""
            if not rest:
                continue
            if obstacle:
                postponement = self._postpone((subject, home), obstacle, now_ms)
                postponed.append(Postponed([row.id for row in rest], postponement.due, postponement.reason))
            else:
                left += rest
        return left, postponed

    def _obstacle(self, lane: Lane, groups: list[str], now_ms: int) -> str:
        """Return the reason why no group accepts rows of a lane now, or ""."""
        subject, home = lane
        if home == "":
            return "" if groups else self.brokers.why_not(subject)
        if home is None or home not in groups:
            return self.brokers.why_not(subject)
        if self._is_postponed(lane, now_ms):
            return self._postponements[lane].reason  # until the older rows are due, which these must not overtake
        under_way = self._ordered_claim(subject, home)
        return "an earlier batch of its order key may be stored" if under_way and under_way.may_be_stored else ""

    def _follow(self, subject: str, home: str | None, rows: list[Candidate], now_ms: int) -> list[Candidate]:
        """Make a batch for a group's keys unless one is under way; return the remaining rows."""
        return rows if home is None or self._ordered_claim(subject, home) else self._fill(home, rows, now_ms)

    def _spread(self, groups: list[str], rows: list[Candidate], now_ms: int) -> list[Candidate]:
        """Make batches of rows for any of these groups; return the rows without room."""
        groups = list(groups)
        while rows and groups:
            group = min(groups, key=self._load)
            rest = self._fill(group, rows, now_ms)
            if len(rest) == len(rows):
                groups.remove(group)
            rows = rest
        return rows

    def _ordered_claim(self, subject: str, group: str) -> Claim | None:
        """Return the ordered batch of a subject and group that is under way, or None."""
        claims = (*self._claims.values(), *self._new.values())
        return next(
            (claim for claim in claims if claim.is_ordered and claim.name.group == group and claim.subject == subject),
            None,
        )

    def _load(self, group: str) -> int:
        """Return the number of a group's batches, including those being claimed."""
        return sum(claim.name.group == group for claim in (*self._claims.values(), *self._new.values()))

    def _fill(self, group: str, rows: list[Candidate], now_ms: int) -> list[Candidate]:
        """Make one batch for a group from the first rows; return the others, or all if the group has no room."""
        unsent = self._unsent_bytes(group)
        room = self.brokers.room(group) - unsent
        numbering = self._numberings.get(group)
        if numbering is None:
            numbering = self._numberings[group] = _Numbering(self.new_producer())
            self._producers.add(numbering.producer)
        if room <= 0 or numbering.number + 1 - self._oldest_number(numbering) >= NUMBERS_SPAN_MAX:
            return rows
        if rows[0].bytes > room and (unsent or self.brokers.in_flight(group)):
            return rows  # an idle group itself rejects rows that are too large
        if len(self._awaited(now_ms)) >= self.limits.claims_max:
            return rows
        taken = self._fitting(rows, min(room, BATCH_BYTES_MAX))
        numbering.number += 1
        name = ClaimName(numbering.producer, numbering.number, self.term, group)
        self._new[str(name)] = Claim(name, sorted(rows[:taken], key=lambda row: row.id), self._life(), now_ms, now_ms)
        return rows[taken:]

    def _unsent_bytes(self, group: str) -> int:
        """Return the bytes of the batches to a group that are claimed and not sent yet."""
        claims = (*self._claims.values(), *self._new.values())
        waiting = (claim for claim in claims if claim.name.group == group and claim.life.state is BatchState.QUEUED)
        return sum(row.bytes for claim in waiting for row in claim.rows)

    def _fitting(self, rows: list[Candidate], room: int) -> int:
        """Return how many of the first rows form a batch: at least one; a suspect row is alone."""
        size = 0
        for position, row in enumerate(rows):
            size += row.bytes
            if position and (size > room or row.id in self._suspects or rows[0].id in self._suspects):
                return position
        return len(rows)

    def _oldest_number(self, numbering: _Numbering) -> int:
        claims = (*self._claims.values(), *self._new.values())
        numbers = (claim.name.number for claim in claims if claim.name.producer == numbering.producer)
        return min(numbers, default=numbering.number + 1)

    # Sends and their outcomes.

    def attempts(self, now_ms: int) -> list[Attempt]:
        """Return the batches to send now; each gets one answer."""
        found = []
        for claim in self._claims.values():
            if not claim.is_waiting or claim.due_ms > now_ms:
                continue
            if claim.may_be_stored and now_ms - claim.claimed_ms > self.limits.unknown_ms_max:
                claim.life.on(BatchEvent.GAVE_UP)
                self._release(claim, f"no answer for {self.limits.unknown_ms_max // 1000} s whether it is stored")
            elif self.brokers.is_usable(claim.name.group):
                claim.life.on(BatchEvent.SENT)
                claim.attempts += 1
                found.append(Attempt(claim, claim.name.group, batch_of(claim.name, claim.rows)))
            elif claim.may_be_stored:
                claim.due_ms = now_ms + self._repeat_delay_ms(claim)
            elif now_ms - claim.claimed_ms < self.limits.room_ms:
                claim.due_ms = now_ms + self.limits.repeat_ms // 10  # its connection is full, or reconnects in a moment
            else:
                claim.life.on(BatchEvent.GAVE_UP)
                self._release_postponed(claim, f"{claim.name.group} accepts nothing now", now_ms)
        return found

    def answered(self, claim: Claim, answer: Answer, now_ms: int) -> None:
        """Handle the answer to an attempt."""
        was_repeated = claim.life.state is BatchState.REPEATED
        state = claim.life.on(answer)
        if isinstance(answer, Stored):
            self._stored(claim, answer)
            return
        if isinstance(answer, NotStored):
            self.counts.failed += len(claim.rows)
            if state is BatchState.NOT_STORED:
                self._refused(claim, answer.error, now_ms)
                return
        self.counts.unknown += not was_repeated
        claim.due_ms = now_ms + self._repeat_delay_ms(claim)

    def _repeat_delay_ms(self, claim: Claim) -> int:
        return min(self.limits.repeat_ms << min(claim.attempts, 10), self.limits.repeat_ms_max)

    def _stored(self, claim: Claim, answer: Stored) -> None:
        hold = self._postponements.pop(claim.lane, None)
        if hold is not None and claim.is_ordered:
            self._postponements[claim.lane] = hold._replace(delay_ms=0)  # postponed rows are older than those to come
        refused = dict(answer.refused)
        stored = [row.id for position, row in enumerate(claim.rows) if position not in refused]
        parked = [
            (claim.rows[position].id, _reason(why)) for position, why in refused.items() if position < len(claim.rows)
        ]
        self._end(claim, stored, parked)

    def _end(self, claim: Claim, stored: list[int], parked: list[tuple[int, str]]) -> None:
        self._suspects.difference_update(claim.ids)
        claim.end = Settled(str(claim.name), stored, parked + claim.unsound)

    def _refused(self, claim: Claim, error: QmqError, now_ms: int) -> None:
        """Handle the rejection of a claim, of which nothing is stored.

        Its rows are sent once more, each alone, to find the invalid ones. There may be none: a request damaged on its
        way is rejected as well.
        """
        if isinstance(error, AskAnotherBroker | NotServed):
            self._release_postponed(claim, str(error), now_ms)
            return
        if isinstance(error, CallError):
            if len(claim.rows) == 1 and claim.rows[0].id in self._suspects:
                self._end(claim, [], [(claim.rows[0].id, _reason(str(error)))])
                return
            if len(self._suspects) < SUSPECTS_MAX:
                self._suspects.update(claim.ids)
        self._release(claim, str(error))

    def _release_postponed(self, claim: Claim, reason: str, now_ms: int) -> None:
        """Release the rows without counting an error: the group is at fault, so they wait as rows that no group
        accepts.
        """
        hold = self._postpone(claim.lane, reason, now_ms)
        self._released(claim, hold.due, reason, 0)

    def _release(self, claim: Claim, reason: str) -> None:
        """Release the rows and count an error, because a row may be at fault. All are due with the row that has the
        fewest errors.
        """
        errors = min(row.errors for row in claim.rows)
        delay_ms = min(self.limits.release_ms << min(errors, 20), self.limits.release_ms_max)
        self._released(claim, Due(None, delay_ms), reason, 1)

    def _released(self, claim: Claim, due: Due, reason: str, failures: int) -> None:
        ids = claim.ids + [id for id, _ in claim.unsound]  # parked when read again
        claim.end = Released(str(claim.name), ids, due, _reason(reason), failures)


def _by_subject(rows: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    found: dict[str, list[Candidate]] = {}
    for row in rows:
        found.setdefault(row.subject, []).append(row)
    return found


def _reason(text: str) -> str:
    """Return a text that every column accepts: a table may be Latin-1, and PostgreSQL rejects NUL."""
    return text.encode("unicode_escape").decode("ascii")[:REASON_CHARS_MAX]


def _name_of(claim: str) -> ClaimName | None:
    """Parse a claim; return None for a foreign one."""
    try:
        return ClaimName.parse(claim)
    except ValueError:
        return None
