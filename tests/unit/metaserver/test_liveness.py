"""Core. Liveness: claims, sessions, silence, rows of other metaservers, queries; all times are given."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qmq.metaserver.cluster.liveness import Liveness, PlaceTaken
from qmq.metaserver.model import Broker, BrokerKey, Group, MetaserverRow, ReplicaState, SightingRow
from qmq.types import Role

KEY = BrokerKey("a", 1)
ACTING_MASTER = ReplicaState(role=0, term=7, writable=True)
READONLY = replace(ACTING_MASTER, writable=False, readonly_reasons=("slave_down",))
START = 10_000
TIMEOUT = 1000


def group(incarnation="x", term=7):
    return Group("g1", term, Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation=incarnation), (), 0)


def liveness(own="m1"):
    return Liveness(own, timeout_ms=TIMEOUT)


def started(*brokers, own="m1", at=START):
    """Return a metaserver that has just started and read these brokers."""
    signs = liveness(own)
    signs.serve(brokers, now_ms=at)
    return signs


def beating(state=ACTING_MASTER, at=START):
    signs = liveness()
    session = signs.join(KEY, "x", now_ms=at)
    signs.beat(KEY, session, state, now_ms=at)
    return signs, session


def row(session="m2.1", metaserver="m2", up=True, state=ACTING_MASTER, incarnation="x"):
    return SightingRow(KEY, session, metaserver, incarnation, up, state)


def flush(signs):
    rows = signs.news()
    signs.stored(rows)
    return rows


def peer(id="m2", beat=1):
    return MetaserverRow(id, "h", "g", beat, "1")


# -- sessions here ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later, asked", [(0, False), (TIMEOUT, False), (TIMEOUT + 1, True)])
def test_silent_broker_is_asked_after_timeout(later, asked):
    signs, _ = beating()
    signs.tick(now_ms=START + later)
    assert bool(signs.to_ask(now_ms=START + later)) is asked
    assert signs.is_up(KEY, now_ms=START + later)


@pytest.mark.parametrize("answer", [None, ACTING_MASTER])
def test_master_lost_by_slave_is_asked(answer):
    signs = liveness()
    signs.peers.read([peer()], now_ms=START)
    signs.take_rows([row()], now_ms=START)
    signs.tick(now_ms=START)
    assert signs.to_ask(now_ms=START) == []
    assert signs.suspect(KEY, now_ms=START)
    signs.tick(now_ms=START)
    (question,) = signs.to_ask(now_ms=START)
    signs.answered(question, answer, now_ms=START + 10)
    signs.tick(now_ms=START + 500)
    assert signs.is_up(KEY, now_ms=START + 500) is (answer is not None)
    assert signs.to_ask(now_ms=START + 500) == [], "asked once"


def test_broker_with_stream_here_is_not_suspected():
    signs, _ = beating()
    assert not signs.suspect(KEY, now_ms=START)
    signs.tick(now_ms=START)
    assert signs.to_ask(now_ms=START) == []


def silenced(at=START + TIMEOUT + 1):
    signs, session = beating()
    flush(signs)
    signs.tick(now_ms=at)
    (question,) = signs.to_ask(now_ms=at)
    signs.answered(question, None, now_ms=at)
    return signs, session


def test_silence_is_stored_once_until_a_heartbeat():
    signs, session = silenced()
    assert not signs.is_up(KEY, now_ms=START + 1100) and signs.state(KEY) is None
    assert [(each.up, each.begins) for each in flush(signs)] == [(False, False)]
    signs.tick(now_ms=START + 1200)
    assert not signs.has_news and signs.to_ask(now_ms=START + 1200) == []
    assert signs.beat(KEY, session, ACTING_MASTER, now_ms=START + 3000)
    assert signs.is_up(KEY, now_ms=START + 3000) and [each.up for each in flush(signs)] == [True]


def test_weakness_13_other_disk_cannot_take_a_live_place():
    """Weakness 13: in QMQ any process can claim any group, and two masters overwrite each other without alarm."""
    (beats_here, _), registered, elsewhere = beating(), liveness(), liveness()
    registered.claim(KEY, "x", now_ms=START)
    elsewhere.take_rows([row()], now_ms=START)
    for signs in (beats_here, registered, elsewhere):
        for refused in (signs.claim, signs.join):
            with pytest.raises(PlaceTaken):
                refused(KEY, "y", now_ms=START + 500)
        assert signs.is_up(KEY, now_ms=START + 500)
    assert not registered.is_up(KEY, now_ms=START + TIMEOUT + 1)
    silenced()[0].claim(KEY, "y", now_ms=START + TIMEOUT + 1)
    elsewhere.take_rows([row(up=False)], now_ms=START)
    elsewhere.claim(KEY, "y", now_ms=START)


def test_end_of_stream_causes_a_query():
    signs, session = beating()
    signs.leave(KEY, session, now_ms=START)
    assert signs.is_up(KEY, now_ms=START) and signs.is_writable(group(), now_ms=START)
    (question,) = signs.to_ask(now_ms=START)
    assert signs.to_ask(now_ms=START) == []
    signs.answered(question, ACTING_MASTER, now_ms=START)
    assert signs.is_up(KEY, now_ms=START + 5000) and signs.to_ask(now_ms=START + 5000) != []
    signs.answered(question, None, now_ms=START + 5000)
    assert not signs.is_up(KEY, now_ms=START + 5000) and not signs.is_writable(group(), now_ms=START + 5000)


def test_late_answer_changes_nothing():
    signs, session = beating()
    signs.leave(KEY, session, now_ms=START)
    (question,) = signs.to_ask(now_ms=START)
    again = signs.join(KEY, "x", now_ms=START + 1)
    signs.beat(KEY, again, ACTING_MASTER, now_ms=START + 1)
    signs.answered(question, None, now_ms=START + 2)
    assert signs.is_up(KEY, now_ms=START + 2)


def test_end_of_a_replaced_stream_changes_nothing():
    signs, old = beating()
    new = signs.join(KEY, "x", now_ms=START)
    assert not signs.beat(KEY, old, ACTING_MASTER, now_ms=START)
    assert signs.beat(KEY, new, ACTING_MASTER, now_ms=START)
    signs.leave(KEY, old, now_ms=START)
    assert signs.is_writable(group(), now_ms=START) and signs.to_ask(now_ms=START) == []


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(ReplicaState(role=0, term=6, writable=True), id="older term"),
        pytest.param(ReplicaState(role=0, term=8, writable=True), id="newer term"),
        pytest.param(ReplicaState(role=1, term=7, writable=True), id="slave"),
        pytest.param(ReplicaState(role=0, term=7, writable=False), id="readonly"),
    ],
)
def test_only_the_current_master_makes_a_group_writable(state):
    signs, _ = beating(state)
    assert not signs.is_writable(group(), now_ms=START)


# -- stored rows --------------------------------------------------------------------------------------------------


def test_repeated_heartbeats_store_nothing():
    signs, session = beating()
    assert [(each.session, each.begins, each.up) for each in flush(signs)] == [(session, True, True)]
    version = signs.version
    for number in range(100):
        signs.beat(KEY, session, replace(ACTING_MASTER, log_end=number), now_ms=START + number)
    assert not signs.has_news and signs.version == version
    signs.beat(KEY, session, READONLY, now_ms=START + 200)
    assert [(each.begins, each.state.writable) for each in flush(signs)] == [(False, False)]


def test_unstored_rows_are_stored_in_newest_form():
    signs, session = beating()
    failed = signs.news()
    signs.beat(KEY, session, READONLY, now_ms=START)
    signs.not_stored(failed)
    assert [(each.begins, each.state) for each in flush(signs)] == [(True, READONLY)]


def test_unstored_ended_session_replaces_no_row():
    signs = liveness()
    signs.take_rows([row("m2.1", up=False)], now_ms=START)
    session = signs.join(KEY, "x", now_ms=START)
    signs.leave(KEY, session, now_ms=START)
    (question,) = signs.to_ask(now_ms=START)
    signs.answered(question, None, now_ms=START)
    assert [(each.session, each.begins, each.up) for each in flush(signs)] == [("m2.1", False, False)]


# -- several metaservers ------------------------------------------------------------------------------------------


def test_weakness_11_moving_broker_stays_up():
    """Weakness 11: in QMQ a metaserver marks brokers of another metaserver down."""
    first, second = liveness("m1"), liveness("m2")
    old = first.join(KEY, "x", now_ms=START)
    first.beat(KEY, old, ACTING_MASTER, now_ms=START)
    second.take_rows([replace(each, begins=False) for each in flush(first)], now_ms=START)
    new = second.join(KEY, "x", now_ms=START + 10)
    second.beat(KEY, new, ACTING_MASTER, now_ms=START + 10)
    first.leave(KEY, old, now_ms=START + 20)
    (question,) = first.to_ask(now_ms=START + 20)
    first.take_rows(flush(second), now_ms=START + 30)
    first.answered(question, None, now_ms=START + 40)
    for later in (40, 10 * TIMEOUT):
        first.peers.read([peer("m2", beat=later)], now_ms=START + later)
        first.tick(now_ms=START + later)
        assert first.is_writable(group(), now_ms=START + later)
    assert not first.has_news


def test_stale_stream_of_moved_broker_is_ended():
    signs, session = beating()
    flush(signs)
    signs.take_rows([row("m2.1")], now_ms=START)
    assert not signs.beat(KEY, session, ACTING_MASTER, now_ms=START)
    signs.leave(KEY, session, now_ms=START)
    assert signs.where(KEY) == "m2" and signs.to_ask(now_ms=START) == []


def test_row_of_earlier_session_is_older():
    signs = liveness()
    session = signs.join(KEY, "x", now_ms=START)
    signs.take_rows([row("m2.1")], now_ms=START)
    assert signs.beat(KEY, session, ACTING_MASTER, now_ms=START)
    assert [each.session for each in flush(signs)] == [session]


def test_wrong_down_begins_a_new_session():
    signs, session = beating()
    stored = flush(signs)
    signs.take_rows([replace(stored[0], up=False)], now_ms=START)
    assert signs.is_up(KEY, now_ms=START)
    (again,) = flush(signs)
    assert again.begins and again.up and again.session != session
    assert signs.beat(KEY, session, ACTING_MASTER, now_ms=START)


def test_weakness_11_restart_keeps_a_group_down():
    """Weakness 11: in QMQ a restarted metaserver takes every group for up."""
    signs = liveness()
    signs.take_rows([row(up=False)], now_ms=START)
    signs.serve([group().master], now_ms=START)
    assert not signs.is_writable(group(), now_ms=START)
    assert not signs.is_up(KEY, now_ms=START) and not signs.may_be_up(group().master, now_ms=START)


def test_stored_up_holds_for_one_timeout():
    signs = started(group().master)
    signs.take_rows([row()], now_ms=START)
    for now in range(START, START + TIMEOUT, 100):
        signs.peers.read([peer()], mentioned=signs.mentioned(), now_ms=now)
        signs.tick(now_ms=now)
        assert signs.is_writable(group(), now_ms=now) and signs.to_ask(now_ms=now) == []
    for now in (START + TIMEOUT, START + TIMEOUT + 100):
        signs.peers.read([peer()], mentioned=signs.mentioned(), now_ms=now)
    signs.tick(now_ms=START + TIMEOUT + 100)
    (question,) = signs.to_ask(now_ms=START + TIMEOUT + 100)
    signs.answered(question, None, now_ms=START + TIMEOUT + 100)
    assert not signs.is_up(KEY, now_ms=START + TIMEOUT + 100)
    assert [(each.session, each.up, each.begins) for each in flush(signs)] == [("m2.1", False, False)]


def test_rows_lost_by_a_restore_are_stored_again():
    """Other metaservers use the old row until the broker's state changes."""
    signs, _ = beating()
    (stored,) = flush(signs)
    signs.take_rows([replace(stored, state=replace(ACTING_MASTER, term=6))], now_ms=START)
    (again,) = flush(signs)
    assert (again.session, again.state.term, again.begins) == (stored.session, 7, False)
    signs.take_rows([again], now_ms=START)
    assert not signs.has_news, "once is enough"
    signs.take_rows([], now_ms=START)
    assert not signs.has_news, "the rows were the changed ones only"
    signs.take_rows([], now_ms=START, are_all=True)
    (again,) = flush(signs)
    assert (again.session, again.begins) == (stored.session, True)


def test_rows_of_a_returning_metaserver_count_again():
    signs = liveness()
    signs.take_rows([row()], now_ms=START)
    for later in range(0, 2 * TIMEOUT, 500):
        signs.peers.read([peer(beat=1)], now_ms=START + later)
    signs.tick(now_ms=START + 1500)
    assert len(signs.to_ask(now_ms=START + 1500)) == 1
    signs.peers.read([peer(beat=2)], now_ms=START + 1600)
    signs.tick(now_ms=START + 1600)
    assert signs.to_ask(now_ms=START + 9000) == []


def test_query_finds_broker_during_database_outage():
    signs = liveness()
    signs.take_rows([row(up=False)], now_ms=START)
    signs.peers.read([peer()], now_ms=START)
    signs.tick(now_ms=START + TIMEOUT)
    assert signs.to_ask(now_ms=START + TIMEOUT) == []
    signs.tick(now_ms=START + TIMEOUT + 1)
    (question,) = signs.to_ask(now_ms=START + TIMEOUT + 1)
    signs.answered(question, None, now_ms=START + TIMEOUT + 2)
    assert not signs.is_up(KEY, now_ms=START + 2000) and not signs.has_news
    (question,) = signs.to_ask(now_ms=START + 4000)
    signs.answered(question, ACTING_MASTER, now_ms=START + 4000)
    assert signs.is_writable(group(), now_ms=START + 4000) and not signs.has_news


def test_known_master_is_presumed_up_for_one_timeout():
    signs = started(group().master)
    known = signs.version
    for now, is_presumed in ((START + 999, True), (START + 1000, False), (START + 1100, False)):
        signs.tick(now_ms=now)
        assert signs.is_writable(group(), now_ms=now) is signs.may_be_up(group().master, now_ms=now) is is_presumed
        assert signs.version == known + (not is_presumed), "the end is published once"
    unregistered = group(incarnation="")
    signs = started(unregistered.master)
    assert not signs.is_writable(unregistered, now_ms=START) and not signs.may_be_up(unregistered.master, now_ms=START)


@pytest.mark.parametrize("before", [(), ("",), ("older disk",)], ids=["new row", "never registered", "new disk"])
def test_new_broker_is_not_presumed_writable(before):
    signs = started(*(group(incarnation).master for incarnation in before))
    signs.claim(KEY, "x", now_ms=START)
    assert not signs.is_writable(group("x"), now_ms=START)
    session = signs.join(KEY, "x", now_ms=START)
    signs.beat(KEY, session, ACTING_MASTER, now_ms=START)
    assert signs.is_writable(group("x"), now_ms=START)


# -- at random ----------------------------------------------------------------------------------------------------


class Installation:
    """Metaservers on one table, and brokers that start, end and move; the truth is known."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = START
        self.made = 0
        self.database_up = True
        self.table = {}
        self.beats = {}
        self.version = 0
        self.metaservers = {}
        self.alive = {BrokerKey("b", number): True for number in range(4)}
        self.streams = {}
        self.sure = set()
        for _ in range(2):
            self.start_metaserver()

    def start_metaserver(self):
        if not self.database_up:
            return
        self.made += 1
        own = f"m{self.made}"
        signs = started(own=own, at=self.now)
        self.metaservers[own] = (signs, {"seen": 0})
        self.beats[own] = 0
        self.read(own)

    def kill_metaserver(self):
        if len(self.metaservers) > 1:
            own = self.random.choice(sorted(self.metaservers))
            del self.metaservers[own]
            self.streams = {key: at for key, at in self.streams.items() if at[0] != own}

    def kill_broker(self):
        key = self.random.choice(sorted(self.alive))
        self.alive[key] = False
        self.sure.discard(key)
        if key in self.streams:
            own, session = self.streams.pop(key)
            self.metaservers[own][0].leave(key, session, now_ms=self.now)

    def start_broker(self):
        self.alive[self.random.choice(sorted(self.alive))] = True

    def move_broker(self):
        """The end of the old stream arrives at once, or late."""
        key = self.random.choice(sorted(self.streams or self.alive))
        own, session = self.streams.pop(key, (None, None))
        if own and self.random.random() < 0.5:
            self.metaservers[own][0].leave(key, session, now_ms=self.now)

    def store(self, own):
        signs = self.metaservers[own][0]
        rows = signs.news()
        if not self.database_up:
            signs.not_stored(rows)
            return
        self.version += 1
        for each in rows:
            if each.begins or (each.key in self.table and self.table[each.key].session == each.session):
                self.table[each.key] = replace(each, begins=False, changed=self.version)
        signs.stored(rows)

    def read(self, own):
        if not self.database_up:
            return
        signs, memory = self.metaservers[own]
        signs.take_rows([each for each in self.table.values() if each.changed > memory["seen"]], now_ms=self.now)
        memory["seen"] = self.version
        self.beats[own] += 1
        rows = [peer(id, beat) for id, beat in self.beats.items()]
        signs.peers.read(rows, mentioned=signs.mentioned(), now_ms=self.now)

    def ask(self, own):
        signs = self.metaservers[own][0]
        signs.tick(now_ms=self.now)
        for question in signs.to_ask(now_ms=self.now):
            signs.answered(question, ACTING_MASTER if self.alive[question.key] else None, now_ms=self.now)

    def live(self):
        """Open a stream for every running broker without one; send all heartbeats."""
        for key, alive in self.alive.items():
            if alive and key not in self.streams:
                own = self.random.choice(sorted(self.metaservers))
                session = self.metaservers[own][0].join(key, "x", now_ms=self.now)
                self.streams[key] = (own, session)
            if alive:
                own, session = self.streams[key]
                if not self.metaservers[own][0].beat(key, session, ACTING_MASTER, now_ms=self.now):
                    del self.streams[key]

    def step(self, settle=False):
        self.now += 50
        chaos = {
            self.kill_metaserver: 1,
            self.start_metaserver: 1,
            self.kill_broker: 1,
            self.start_broker: 2,
            self.move_broker: 3,
            self.toggle_database: 1,
            lambda: None: 20,
        }
        if not settle:
            self.random.choices(list(chaos), list(chaos.values()))[0]()
        self.live()
        for own in self.random.sample(sorted(self.metaservers), len(self.metaservers)):
            for do in self.random.sample([self.store, self.read, self.ask], 3):
                if settle or self.random.random() < 0.7:
                    do(own)

    def toggle_database(self):
        self.database_up = not self.database_up

    def settle(self):
        self.database_up = True
        for _ in range(100):
            self.step(settle=True)
        self.sure = {key for key, alive in self.alive.items() if alive}


@pytest.mark.parametrize("seed", range(60))
def test_all_metaservers_agree_under_faults(seed):
    world = Installation(seed)
    for _ in range(6):
        world.settle()
        for own, (signs, _) in world.metaservers.items():
            judged = {key: signs.is_up(key, now_ms=world.now) for key in world.alive}
            assert judged == world.alive, f"seed {seed}: {own} after a quiet time"
        for _ in range(60):
            world.step()
            for own, (signs, _) in world.metaservers.items():
                for key in world.sure:
                    assert signs.is_up(key, now_ms=world.now), f"seed {seed}: {own} shows running {key} as down"


def test_quiet_time_ends_with_the_oldest_heartbeat():
    signs, session = beating()
    assert signs.quiet_ms(now_ms=START + 100) == TIMEOUT - 100
    assert signs.quiet_ms(now_ms=START + 100, silence_ms=300) == 200
    assert signs.quiet_ms(now_ms=START + TIMEOUT + 1) == 0
    assert signs.quiet_ms(now_ms=START + TIMEOUT + 1, brokers=[]) == TIMEOUT, "no such broker beats here"
    assert signs.quiet_ms(now_ms=START + 100, silence_ms=300, brokers=[KEY]) == 200
    signs.beat(KEY, session, ACTING_MASTER, now_ms=START + 500)
    assert signs.quiet_ms(now_ms=START + 500) == TIMEOUT


def test_quiet_time_is_zero_while_a_broker_is_doubted():
    signs, session = beating()
    signs.leave(KEY, session, now_ms=START)
    assert signs.quiet_ms(now_ms=START) == 0
    signs = liveness()
    signs.take_rows([row()], now_ms=START)
    assert signs.quiet_ms(now_ms=START) == 0
    assert started(Broker("g1", Role.MASTER, "a", "10.0.0.1", 1, 2, incarnation="x")).quiet_ms(now_ms=START) == 0
