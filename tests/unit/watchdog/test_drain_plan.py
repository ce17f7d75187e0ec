"""Core. Plan of a drain: claimed rows, their groups, and the outcome of each claim."""

from __future__ import annotations

import pytest

from qmq.client.batch import NotStored, Stored, Unknown
from qmq.client.routes import group_of_key
from qmq.codec import label_of
from qmq.errors import AccessError, BrokerReadOnly, InvalidMessage, InvalidRequest
from qmq.outbox.claims import (
    RELAY_TERM,
    AdoptClaims,
    Candidate,
    ClaimName,
    ClaimRows,
    Disown,
    Known,
    Page,
    ReadClaims,
    ReadPage,
    SettleClaims,
)
from qmq.outbox.drain_plan import NUMBERS_SPAN_MAX, RELAY_MS, DrainPlan, Limits


class Brokers:
    """Groups set by the test."""

    def __init__(self, *names):
        self.writable = set(names)
        self.usable = set(names)
        self.rooms = dict.fromkeys(names, 1 << 20)
        self.watched = []
        self.flights = {}
        self.of = {}

    def watch(self, subject):
        self.watched.append(subject)

    def groups(self, subject):
        return sorted(self.writable & set(self.of.get(subject, self.writable)))

    def home(self, subject, label):
        return group_of_key(label >> 32, sorted(self.rooms))

    def is_usable(self, name):
        return name in self.usable

    def is_any_usable(self):
        return bool(self.usable)

    def why_not(self, subject):
        return "readonly"

    def room(self, name):
        return self.rooms[name]

    def in_flight(self, name):
        return self.flights.get(name, 0)


class Drain:
    """A plan and its database, which does all work."""

    def __init__(self, *groups, term=7, **limits):
        self.brokers = Brokers(*(groups or ("g1",)))
        producers = iter(range(100, 1_000))
        self.core = DrainPlan(term, Limits(**limits), self.brokers, lambda: next(producers))
        self.now_ms = 10_000
        assert isinstance(self.next(), ReadClaims)
        self.core.known([])

    def next(self):
        return self.core.next_work(self.now_ms)

    def page(self, *rows, after=None):
        if isinstance(self.next(), ReadClaims):
            self.core.known([])
        assert isinstance(self.next(), ReadPage)
        self.core.page(Page(list(rows), after, self.now_ms), self.now_ms)

    def delay_ms(self, end):
        """Return the delay of postponed or released rows."""
        return end.due.plus_ms + (0 if end.due.clock is None else end.due.clock - self.now_ms)

    def claim(self):
        work = self.next()
        assert isinstance(work, ClaimRows), work
        self.core.claimed(dict(work.claims), self.now_ms)
        return work

    def postponed(self, *rows, after=None):
        """Return the delays in ms of a page's rows without a usable group."""
        self.page(*rows, after=after)
        [found] = self.claim().postponed
        return self.delay_ms(found)

    def attempts(self):
        return self.core.attempts(self.now_ms)

    def answer(self, attempt, answer):
        self.core.answered(attempt.claim, answer, self.now_ms)

    def sent(self, *rows, after=None):
        """Return the attempt for a page whose rows are one batch."""
        self.page(*rows, after=after)
        self.claim()
        [attempt] = self.attempts()
        return attempt

    def store(self, attempt):
        self.answer(attempt, stored(attempt))
        return self.settle()

    def settle(self):
        work = self.next()
        assert isinstance(work, SettleClaims), work
        self.core.settled(work, self.now_ms)
        return work


def row(id, subject="a", *, errors=0, key=None, size=10):
    return Candidate(id, errors, subject, b"x" * size, label_of((), key) if key else 0)


def key_of(drain, group):
    """Return an order key that belongs to a group."""
    return next(key for key in map(str, range(100)) if drain.brokers.home("a", label_of((), key)) == group)


def stored(attempt, *refused):
    return Stored(0, attempt.batch.count - len(refused), list(refused))


def test_stored_rows_are_deleted():
    drain = Drain()
    drain.page(row(1), row(2), row(3, "b"))
    order = drain.claim()
    assert sorted(order.claims.values()) == [[1, 2], [3]] and order.parked == []
    attempts = drain.attempts()
    assert {attempt.batch.subject: attempt.batch.count for attempt in attempts} == {"a": 2, "b": 1}
    for attempt in attempts:
        drain.answer(attempt, stored(attempt))
    assert sorted(end.stored for end in drain.settle().settled) == [[1, 2], [3]]
    assert drain.core.counts.sent == 3 and drain.attempts() == []


def test_nothing_is_sent_before_its_claim_is_stored():
    drain = Drain()
    drain.page(row(1))
    assert drain.attempts() == []
    work = drain.next()
    drain.core.failed(work, drain.now_ms)
    assert drain.attempts() == []


def test_unclaimed_rows_are_not_sent():
    drain = Drain()
    drain.page(row(1), row(2))
    [(claim, _)] = drain.next().claims.items()
    drain.core.claimed({claim: [2]}, drain.now_ms)
    [attempt] = drain.attempts()
    assert attempt.batch.count == 1 and attempt.claim.ids == [2]


def test_group_rejection_is_no_row_error():
    """A group that is readonly for long must neither park the rows, nor delay them beyond its readonly time."""
    drain = Drain(postpone_ms=1_000, postpone_ms_max=3_000, rest_ms=0)
    released = []
    for _ in range(4):
        attempt = drain.sent(row(1, errors=9), row(2), after=1)
        drain.answer(attempt, NotStored(BrokerReadOnly("no slave")))
        [end] = drain.settle().released
        assert end.ids == [1, 2] and "no slave" in end.reason
        released.append((drain.delay_ms(end), end.failures))
        drain.now_ms += released[-1][0]
    assert released == [(1_000, 0), (2_000, 0), (3_000, 0), (3_000, 0)]
    attempt = drain.sent(row(1), after=1)
    drain.store(attempt)
    attempt = drain.sent(row(3), after=1)
    drain.answer(attempt, NotStored(BrokerReadOnly("no slave")))
    assert drain.delay_ms(drain.settle().released[0]) == 1_000, "it stored something in between"


def test_failed_batch_waits_as_its_best_row():
    drain = Drain(release_ms=1_000, release_ms_max=60_000)
    attempt = drain.sent(row(1, errors=9), row(2, errors=2))
    drain.answer(attempt, NotStored(AccessError("no right to it")))
    [end] = drain.settle().released
    assert (end.ids, drain.delay_ms(end), end.failures) == ([1, 2], 4_000, 1), "no row makes others wait for minutes"


def test_unknown_batch_is_repeated_to_the_same_group():
    drain = Drain("g1", "g2")
    first = drain.sent(row(1), row(2))
    drain.answer(first, Unknown("lost"))
    assert drain.attempts() == [], "not at once"
    for answer in (NotStored(BrokerReadOnly("no slave")), NotStored(InvalidMessage("wrong")), Unknown("again")):
        drain.now_ms += 20_000
        [again] = drain.attempts()
        assert (again.group, again.batch) == (first.group, first.batch)
        drain.answer(again, answer)
    drain.now_ms += 20_000
    drain.brokers.writable.clear()
    [last] = drain.attempts()
    assert drain.store(last).settled[0].stored == [1, 2]


def test_unknown_batch_is_released_after_a_day():
    drain = Drain(unknown_ms_max=86_400_000)
    attempt = drain.sent(row(1))
    drain.answer(attempt, Unknown("lost"))
    drain.now_ms += 86_400_001
    assert drain.attempts() == []
    [end] = drain.settle().released
    assert "86400 s" in end.reason and drain.core.counts.unknown == 1


def test_rejected_messages_are_parked():
    drain = Drain()
    attempt = drain.sent(row(1), row(2), row(3))
    drain.answer(attempt, stored(attempt, (1, "too large")))
    [end] = drain.settle().settled
    assert (end.stored, end.parked) == ([1, 3], [(2, "too large")])


def test_rows_of_an_invalid_batch_go_alone():
    drain = Drain(release_ms=0)
    attempt = drain.sent(row(1), row(2))
    drain.answer(attempt, NotStored(InvalidRequest("one of them is wrong")))
    drain.settle()
    drain.now_ms += 1_000
    assert isinstance(drain.next(), ReadClaims)
    drain.core.known([])
    drain.page(row(1, errors=1), row(2, errors=1))
    drain.claim()
    [first, second] = drain.attempts()
    assert [first.claim.ids, second.claim.ids] == [[1], [2]]
    drain.answer(first, stored(first))
    drain.answer(second, NotStored(InvalidRequest("this one")))
    assert [(end.stored, end.parked) for end in drain.settle().settled] == [([1], []), ([], [(2, "this one")])]


def test_row_is_parked_after_a_second_lone_rejection():
    """A packet damaged on its way is rejected as well."""
    drain = Drain(rest_ms=0)
    for tries in range(2):
        attempt = drain.sent(row(1, errors=tries), after=1)
        drain.answer(attempt, NotStored(InvalidRequest("the batch does not match its CRC")))
        work = drain.settle()
        assert [end.ids for end in work.released] == [[1]] * (not tries)
        drain.now_ms += 1_000
    assert work.settled[0].parked == [(1, "the batch does not match its CRC")]


def test_invalid_or_failed_row_blocks_no_other():
    drain = Drain(errors_max=5)
    drain.page(Candidate(1, 0, problem="no JSON"), row(2, errors=5), row(3))
    order = drain.claim()
    assert order.parked == [(1, "no JSON"), (2, "too many errors")] and list(order.claims.values()) == [[3]]
    assert drain.core.counts.parked == 2


def test_postponements_grow():
    drain = Drain(postpone_ms=1_000, postpone_ms_max=4_000, rest_ms=0)
    drain.brokers.writable.clear()
    delays = []
    for _ in range(4):
        delays.append(drain.postponed(row(1)))
        drain.now_ms += delays[-1]
    assert delays == [1_000, 2_000, 4_000, 4_000]


def test_all_pages_share_one_postponement():
    drain = Drain(postpone_ms=1_000, rest_ms=0)
    drain.brokers.writable.clear()
    delays = []
    for number in range(3):
        delays.append(drain.postponed(row(number), after=number))
        drain.now_ms += 10
    assert delays == [1_000, 990, 980]
    drain.now_ms += 970
    assert drain.postponed(row(0)) == 2_000, "as long as nobody takes it"
    drain.brokers.writable.add("g1")
    attempt = drain.sent(row(3))
    drain.store(attempt)
    drain.brokers.writable.clear()
    assert drain.postponed(row(4)) == 1_000, "somebody did in between"


def test_other_groups_do_not_reset_a_postponement():
    drain = Drain("g1", "g2", postpone_ms=1_000, rest_ms=0)
    lost, fine = key_of(drain, "g1"), key_of(drain, "g2")
    drain.brokers.writable.remove("g1")
    assert drain.postponed(row(1, key=lost), after=1) == 1_000
    attempt = drain.sent(row(2, key=fine), after=1)
    drain.store(attempt)
    drain.now_ms += 1_000
    assert drain.postponed(row(1, key=lost), after=1) == 2_000


def test_younger_rows_do_not_overtake_postponed_keys():
    drain = Drain(postpone_ms=1_000, rest_ms=0)
    drain.brokers.writable.clear()
    assert drain.postponed(row(1, key="k"), after=1) == 1_000
    drain.brokers.writable.add("g1")
    drain.now_ms += 400
    drain.page(row(2, key="k"), row(3), after=1)
    order = drain.claim()
    [younger] = order.postponed
    assert (younger.ids, drain.delay_ms(younger)) == ([2], 600) and list(order.claims.values()) == [[3]]
    drain.now_ms += 600
    drain.page(row(1, key="k"), row(2, key="k"), after=1)
    assert list(drain.claim().claims.values()) == [[1, 2]]


def test_postponed_rows_share_one_due_moment():
    """Otherwise a page that the database wrote slowly would come after the next one, with the same keys."""
    drain = Drain(postpone_ms=1_000, rest_ms=0)
    attempt = drain.sent(row(1, key="k"), after=1)
    drain.answer(attempt, NotStored(BrokerReadOnly("no slave")))
    [first] = drain.settle().released
    dues = [first.due]
    for id in (2, 3):
        drain.now_ms += 7
        drain.page(row(id, key="k"), after=id)
        dues += [postponed.due for postponed in drain.claim().postponed]
    assert dues == [first.due] * 3 and first.due.clock is not None


def test_old_postponements_are_forgotten():
    drain = Drain(postpone_ms=1_000, postpone_ms_max=2_000, rest_ms=0)
    drain.brokers.writable.clear()
    for id in range(3):
        drain.postponed(row(id, f"subject-{id}"))
    drain.now_ms += 10_000
    drain.page()
    assert drain.core._postponements == {}


def test_rows_stay_unchanged_without_brokers():
    drain = Drain(rest_ms=1_000)
    drain.brokers.writable.clear()
    drain.brokers.usable.clear()
    drain.page(row(1))
    assert drain.next() is None and drain.core.last_pass_ms is None
    drain.now_ms += 1_000
    assert isinstance(drain.next(), ReadPage)


def test_later_pages_are_read_without_usable_groups():
    """Groups are known only for seen subjects, and those of the first page may all be gone."""
    drain = Drain("g1", "g2", rest_ms=1_000)
    drain.brokers.of = {"a": ["g1"], "b": ["g2"]}
    drain.brokers.usable.clear()
    drain.page(row(1), row(2), after=2)
    assert drain.next() is None, "what nobody takes is read no faster than it would be again"
    drain.now_ms += 1_000
    assert drain.next().after == 2
    drain.page(row(3, "b", key="k"), after=3)
    drain.now_ms += 1_000
    drain.brokers.writable, drain.brokers.usable = {"g2"}, {"g2"}
    drain.brokers.rooms = {"g2": 1 << 20}
    work = drain.next()
    assert isinstance(work, ReadPage) and work.after is None, "what is older goes first"
    drain.page(row(1), row(2), after=2)
    assert [postponed.ids for postponed in drain.claim().postponed] == [[1, 2]]
    drain.page(row(3, "b", key="k"), after=3)
    assert list(drain.claim().claims.values()) == [[3]]


def test_returning_group_gets_the_oldest_rows_first():
    drain = Drain(rest_ms=1_000)
    drain.brokers.usable.clear()
    drain.page(row(1, key="k"), after=1)
    drain.now_ms += 1_000
    assert drain.next().after == 1
    drain.brokers.usable.add("g1")
    drain.core.page(Page([row(2, key="k")], None, drain.now_ms), drain.now_ms)
    assert drain.next().after is None and drain.core.last_pass_ms is None


def test_earlier_leaders_claim_keeps_its_number():
    drain = Drain(term=9)
    drain.core._claims_after = ""
    assert isinstance(drain.next(), ReadClaims)
    old = str(ClaimName(0xABC, 5, 8, "g1"))
    drain.core.known([Known(old, 70_000), Known(str(ClaimName(1, 1, 10, "g1")), 5), Known("by hand", 5)])
    work = drain.next()
    assert work == AdoptClaims(old, "abc:5:9:g1"), "not that of a later leader, nor what nobody of ours wrote"
    drain.core.adopted(work, [row(1), row(2)], drain.now_ms)
    [attempt] = drain.attempts()
    assert (attempt.batch.producer, attempt.batch.number, attempt.group) == (0xABC, 5, "g1")
    drain.answer(attempt, NotStored(BrokerReadOnly("no slave")))
    drain.core.known([])
    assert not isinstance(drain.next(), SettleClaims), "an attempt of the earlier leader may have stored it"


def test_old_claim_of_other_terms_is_adopted():
    """The database was registered for another room, or the metaservers were reset: no other drain would ever send
    it.
    """
    drain = Drain(term=3)
    drain.core._claims_after = ""
    drain.core.known([Known("abc:5:39:g1", 599_999), Known("abc:6:39:g1", 600_000)])
    assert drain.next() == AdoptClaims("abc:6:39:g1", "abc:6:3:g1")


@pytest.mark.parametrize("term", [7, RELAY_TERM + 7], ids=["watchdog", "producer"])
def test_producers_claim_is_adopted_after_a_minute(term):
    """By watchdogs and other producers alike; producers leave a watchdog's claims to the next watchdog for longer."""
    drain = Drain(term=term)
    young, old = f"5:1:{RELAY_TERM:x}:g1", f"5:2:{RELAY_TERM:x}:g1"
    drain.core.known([Known(young, RELAY_MS - 1), Known(old, RELAY_MS)])
    assert drain.next() == AdoptClaims(old, f"5:2:{term:x}:g1")
    drain = Drain(term=term)
    drain.core.known([Known("5:1:3:g1", RELAY_MS)])
    assert isinstance(drain.next(), AdoptClaims) == (term == 7)


def test_late_release_ends_its_producers_numbers():
    """Another drain may have adopted it, and brokers remember the last 64 numbers of a producer."""
    drain, producers = Drain(), []
    for id, late_ms in enumerate((0, RELAY_MS, 0)):
        drain.page(row(id))
        [claim] = drain.claim().claims
        producers.append(ClaimName.parse(claim).producer)
        [attempt] = drain.attempts()
        drain.answer(attempt, NotStored(InvalidRequest("damaged")))
        drain.now_ms += late_ms
        drain.settle()
        drain.core._rest_until_ms = drain.now_ms
    assert producers[0] == producers[1] != producers[2]


def test_rows_wait_for_ordered_rows_of_another_drain():
    drain = Drain()
    drain.page(row(1, key="k"), after=(1, 1))
    [claim] = drain.next().ordered
    drain.core.claimed({claim: []}, drain.now_ms)
    drain.page(row(2, key="k"))
    assert drain.claim().postponed[0].ids == [2]


def test_old_unreadable_claim_is_parked():
    """No watchdog would ever adopt them, and OutboxRetry leaves claimed rows alone."""
    drain = Drain()
    drain.core._claims_after = ""
    drain.core.known([Known("", 600_000), Known("1:1:1", 600_000), Known("by hand", 599_999)])
    for claim in ("", "1:1:1"):
        work = drain.next()
        assert isinstance(work, Disown) and work.claim == claim and repr(claim) in work.reason
        drain.core.disowned(work, 2)
    assert drain.next() == ReadClaims("by hand") and drain.core.counts.parked == 4
    drain.core.known([])
    drain.core._claims_after = ""
    drain.core.known([Known("", 5)])
    assert isinstance(drain.next(), ReadPage), "behind a claim without text is none that was not read"


def test_database_failure_resets_claims_and_numbers():
    drain = Drain(rest_ms=0)
    drain.page(row(1))
    work = drain.next()
    [unheard] = work.claims
    drain.core.failed(work, drain.now_ms)
    assert isinstance(drain.next(), ReadClaims)
    drain.core.known([Known(unheard, 10)])
    assert drain.next() == AdoptClaims(unheard, unheard)
    drain.core.adopted(drain.next(), [row(1)], drain.now_ms)
    drain.core.known([])
    drain.page(row(2))
    [claim] = drain.claim().claims
    assert ClaimName.parse(claim).producer != ClaimName.parse(unheard).producer


def test_producer_numbers_stay_within_the_brokers_window():
    drain = Drain(rest_ms=0, rate=1_000_000)
    numbers = []
    unknown = None
    for id in range(1, 80):
        work = drain.next()
        while isinstance(work, ReadClaims):
            drain.core.known([])
            work = drain.next()
        if work is None:
            break
        drain.core.page(Page([row(id)], None), drain.now_ms)
        if not isinstance(drain.next(), ClaimRows):
            break
        drain.claim()
        for attempt in drain.attempts():
            if unknown is None:
                unknown = attempt
                drain.answer(attempt, Unknown("lost"))
                attempt.claim.due_ms = 1 << 60
            else:
                numbers.append(attempt.batch.number)
                drain.store(attempt)
        drain.now_ms += 1
    assert max(numbers) - unknown.batch.number < NUMBERS_SPAN_MAX <= 60


def test_ordered_batches_go_one_at_a_time():
    drain = Drain("g1", "g2", rest_ms=0)
    keys = ["k1", "k2", "k3", "k4"]
    drain.page(*(row(id, key=keys[id % 4]) for id in range(8)), after=("t", 8))
    drain.claim()
    attempts = drain.attempts()
    for attempt in attempts:
        for claimed in attempt.claim.rows:
            assert drain.brokers.home("a", claimed.label) == attempt.group
    assert len({attempt.group for attempt in attempts}) == len(attempts)
    assert drain.next() is None, "the rows behind them wait"
    for attempt in attempts:
        drain.answer(attempt, stored(attempt))
    drain.settle()
    assert drain.next() == ReadPage(("t", 8), 500)


def test_ordered_rows_wait_for_unknown_batches():
    drain = Drain("g1", rest_ms=0)
    attempt = drain.sent(row(1, key="k"), after=("t", 1))
    drain.answer(attempt, Unknown("lost"))
    drain.page(row(2, key="k"), row(3))
    order = drain.claim()
    assert [postponed.ids for postponed in order.postponed] == [[2]] and list(order.claims.values()) == [[3]]


def test_batches_respect_a_groups_room():
    drain = Drain("g1")
    drain.brokers.rooms["g1"] = 1_000
    drain.page(*(row(id, size=300) for id in range(5)))
    assert list(drain.claim().claims.values()) == [[0, 1, 2]] and drain.next() is None, "the group has room for no more"
    [attempt] = drain.attempts()
    drain.brokers.rooms["g1"], drain.brokers.flights["g1"] = 100, 1
    assert drain.next() is None
    drain.store(attempt)
    drain.brokers.rooms["g1"], drain.brokers.flights["g1"] = 1_000, 0
    assert list(drain.claim().claims.values()) == [[3, 4]]


def test_large_row_goes_to_an_idle_group():
    drain = Drain("g1")
    drain.brokers.rooms["g1"], drain.brokers.flights["g1"] = 200, 1
    drain.page(row(1, size=300), row(2, size=5_000))
    assert drain.next() is None, "the group would refuse it, and the row would wait for longer each time"
    drain.brokers.rooms["g1"], drain.brokers.flights["g1"] = 1_000, 0
    assert list(drain.claim().claims.values()) == [[1]]
    [attempt] = drain.attempts()
    drain.store(attempt)
    assert list(drain.claim().claims.values()) == [[2]], "the group says that it is too large"


def test_silent_group_blocks_others_briefly():
    drain = Drain("g1", "g2", claims_max=2, page_rows=1, rest_ms=0, room_ms=2_000)
    drain.brokers.of = {"a": ["g1"], "b": ["g2"]}
    for id in range(1, 3):
        drain.page(row(id), after=id)
        drain.claim()
        drain.attempts()
    assert drain.next() is None
    drain.now_ms += 2_000
    drain.brokers.rooms["g1"] = 0
    drain.page(row(3, "a"), row(4, "b"), after=4)
    assert list(drain.claim().claims.values()) == [[4]]
    [attempt] = drain.attempts()
    drain.store(attempt)
    assert drain.next() is None, "row 3 waits for room"
    drain.now_ms += 2_000
    [late] = drain.claim().postponed
    assert late.ids == [3] and "room" in late.reason
    drain.page(row(5, "a"), row(6, "b"), after=6)
    order = drain.claim()
    assert [postponed.ids for postponed in order.postponed] == [[5]], "the next page does not wait for as long again"
    assert list(order.claims.values()) == [[6]] and drain.next() == ReadPage(6, 1)


def test_endless_pass_is_restarted():
    """Rows that come due while it runs never let it end, and late commits may lie behind it."""
    drain = Drain(rest_ms=0, postpone_ms=1_000)
    drain.brokers.writable.clear()
    for number in range(1, 7):
        drain.postponed(row(number), after=number)
        assert drain.next() == ReadPage(number, 500)
        drain.now_ms += 10_000
    drain.postponed(row(7), after=7)
    drain.now_ms += 10_000
    assert drain.next() == ReadClaims("")
    drain.core.known([])
    assert drain.next() == ReadPage(None, 500) and drain.core.last_pass_ms is None


def test_reason_fits_any_column():
    drain = Drain()
    drain.page(Candidate(1, 0, problem="a\0b ü😀 \udcff" + "x" * 600))
    [(_, reason)] = drain.claim().parked
    assert reason.isascii() and reason.isprintable() and len(reason) == 500 and reason.startswith("a\\x00b \\xfc")


def test_unknown_batches_do_not_count_as_under_way():
    drain = Drain("g1", claims_max=2, page_rows=1, rest_ms=0)
    for id in (1, 2):
        drain.page(row(id), after=("t", id))
        drain.claim()
    attempts = drain.attempts()
    assert len(attempts) == 2 and drain.next() is None and drain.core.counts.claimed == 2
    drain.answer(attempts[0], Unknown("lost"))
    assert isinstance(drain.next(), ReadPage)


def test_rate_is_kept():
    drain = Drain(rate=100, rest_ms=0)
    drain.page(*(row(id) for id in range(100)), after=("t", 1))
    drain.claim()
    assert drain.next() is None
    drain.now_ms += 600
    work = drain.next()
    assert isinstance(work, ReadPage) and work.limit == 60


def test_unusable_group_releases_unsent_claims():
    drain = Drain(room_ms=1_000)
    drain.page(row(1))
    drain.claim()
    drain.brokers.usable.clear()
    assert drain.attempts() == []
    drain.now_ms += 1_000
    assert drain.attempts() == []
    [end] = drain.settle().released
    assert "accepts nothing" in end.reason and end.failures == 0


def test_stop_ends_claims_under_way():
    drain = Drain()
    attempt = drain.sent(row(1))
    drain.core.stop()
    assert drain.next() is None and not drain.core.is_idle
    drain.store(attempt)
    assert drain.core.is_idle and drain.next() is None


@pytest.mark.parametrize(
    "text",
    ["", "x", "1:2:3", "g:2:3:g1", "::::", "-1:2:3:g1", "1:-2:3:g1", f"{1 << 64:x}:2:3:g1", "0x1:2:3:g1"],
    ids=["empty", "a word", "too short", "no number", "colons", "less than 0", "that, too", "too large", "another way"],
)
def test_invalid_claim_is_not_parsed(text):
    with pytest.raises(ValueError):
        ClaimName.parse(text)


def test_claim_text_round_trip_fits_the_column():
    name = ClaimName((1 << 52) - 1, 0xFFFFFF, 0xFFFFFF, "g" * 100)
    assert ClaimName.parse(str(name)) == name and len(str(name)) <= 128
    assert ClaimName.parse("1:2:3:a:b").group == "a:b"


def test_many_subjects_are_checked_once_per_page():
    drain, subjects = Drain(claims_max=8), 200
    looks = drain.brokers.groups
    looked = []
    drain.brokers.groups = lambda subject: looked.append(subject) or looks(subject)
    drain.page(*(row(number, f"s{number}") for number in range(subjects)))
    sent = 0
    while sent < subjects:
        assert not drain.claim().postponed
        drain.now_ms += 100  # 200 rows by eight take 2.5 s, longer than a row waits for room
        for attempt in drain.attempts():
            drain.answer(attempt, stored(attempt))
            sent += 1
        drain.settle()
    assert len(looked) == subjects
