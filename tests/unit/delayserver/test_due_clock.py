"""Core. Messages come due by two clocks of three."""

from __future__ import annotations

import pytest

from qmq.replication.clocks import DEAD_BAND_MS, MASTER, METASERVER, READING_MS_MAX, SLAVE, WINDOW_MS, DueClock
from tests.unit.delayserver.world import HOUR_MS, a_group

TRUE_MS = 1_700_000_000_000


class World:
    """Three clocks, each off the true time by this much; readings of the others may be late."""

    def __init__(self, *, own=0, **others):
        self.clock = DueClock()
        self.ms = 0
        self.own = own
        self.others = others

    def compare(self, *, delay_ms=0):
        own_ms = TRUE_MS + self.ms + self.own
        ahead = {whose: self.own - off + delay_ms for whose, off in self.others.items()}
        self.clock.compare(own_ms=own_ms, monotonic_ms=self.ms, ahead_ms=ahead)
        return self.clock.offset_ms - TRUE_MS

    def after(self, ms, **changes):
        """Let time pass; return by how much due times are off the true time."""
        self.own = changes.pop("own", self.own)
        self.others |= changes
        self.others = {whose: off for whose, off in self.others.items() if off is not None}
        off = self.compare()
        for _ in range(ms // 10):
            self.ms += 10
            off = self.compare()
        return off


@pytest.mark.parametrize(
    ("own", "others", "off"),
    [
        pytest.param(HOUR_MS, {}, HOUR_MS, id="nobody else is heard: its own"),
        pytest.param(HOUR_MS, {METASERVER: 0, SLAVE: 0}, 0, id="own is ahead"),
        pytest.param(-20_000, {METASERVER: 0, SLAVE: 5}, 0, id="own is behind"),
        pytest.param(0, {METASERVER: HOUR_MS, SLAVE: 0}, 0, id="the metaserver's is ahead"),
        pytest.param(0, {METASERVER: 0, SLAVE: -HOUR_MS}, 0, id="the slave's is behind"),
        pytest.param(HOUR_MS, {METASERVER: 0, MASTER: 0}, 0, id="the other copy was master just now"),
        pytest.param(HOUR_MS, {METASERVER: 0, MASTER: HOUR_MS, SLAVE: 0}, 0, id="one machine counts once"),
        pytest.param(HOUR_MS, {METASERVER: 0}, 0, id="two disagree: never early by the earlier one"),
        pytest.param(0, {SLAVE: HOUR_MS}, 0, id="two disagree, the other way round"),
    ],
)
def test_due_time_at_the_begin_of_a_mastership(own, others, off):
    assert World(own=own, **others).compare() == off


def test_set_clock_moves_nothing_while_two_agree():
    world = World(**{METASERVER: 0, SLAVE: 0})
    assert world.after(1_000) == 0
    assert world.after(1_000, own=HOUR_MS) == 0
    assert world.after(1_000, own=-HOUR_MS) == 0


def test_agreed_clocks_prove_time_after_silence():
    world = World(**{METASERVER: 0, SLAVE: 0})
    world.after(1_000)
    assert world.after(1_000, **{SLAVE: None}) == 0
    assert world.after(1_000, own=-HOUR_MS) == 0
    assert world.after(1_000, own=HOUR_MS, **{METASERVER: None}) == 0


def test_early_due_times_step_back_at_once():
    world = World(own=HOUR_MS)
    assert world.after(1_000) == HOUR_MS
    assert world.after(0, **{METASERVER: 0, SLAVE: 0}) == 0


def test_late_due_times_catch_up_gradually():
    world = World(own=-20_000, **{METASERVER: 0})
    assert world.after(1_000) == -20_000
    world.others[SLAVE] = 0
    offs = [world.after(10) for _ in range(3_000)]
    assert all(0 <= later - earlier <= 30 for earlier, later in zip(offs, offs[1:], strict=False))
    assert -DEAD_BAND_MS <= offs[-1] <= 0 and offs[1_000] < -5_000


def test_slow_reading_makes_nothing_late():
    world = World(**{METASERVER: 0, SLAVE: 0})
    world.compare(delay_ms=1)
    for _ in range(20):
        world.ms += WINDOW_MS // 25
        assert world.compare(delay_ms=800) >= -DEAD_BAND_MS


def test_readings_before_a_silence_do_not_count():
    """The own clock may have been set meanwhile. Found by delay simulation seed 207."""
    world = World(own=0, **{METASERVER: HOUR_MS, SLAVE: HOUR_MS})
    assert world.after(1_000) == HOUR_MS
    world.after(3_000, **{SLAVE: None})
    assert world.after(0, **{SLAVE: 0}) == 0


@pytest.mark.parametrize("skew_ms", [HOUR_MS, -20_000, -HOUR_MS])
def test_master_with_a_wrong_clock_sends_in_time(skew_ms):
    copies, _ = a_group()
    copies.b.host.wall_skew_ms = skew_ms
    copies.run(1_000)
    copies.swap(2)
    copies.run(1_000)
    producer = copies.producer()
    true_ms = copies.now_ms - skew_ms
    producer.delayed(true_ms + 30_000, "m")
    copies.run(29_800)
    assert copies.senders.delivered() == []
    copies.run(400)
    assert copies.senders.delivered() == ["m"]


def test_late_mastership_corrects_itself():
    copies, _ = a_group()
    copies.hears = False
    copies.swap(2)
    copies.run(READING_MS_MAX + 1_000)  # earlier readings count no more
    copies.b.host.wall_skew_ms = -20_000
    copies.swap(3)
    copies.run(1_000)
    assert copies.a.master.stats()["clocks"] == 1
    copies.a.host.wall_skew_ms = 0
    copies.hears = True
    copies.run(60_000)
    assert abs(copies.a.master.clock_off_ms) <= DEAD_BAND_MS
    producer = copies.producer()
    producer.delayed(copies.now_ms + 2_000, "m")
    copies.run(1_900)
    assert copies.senders.delivered() == []
    copies.run(200)
    assert copies.senders.delivered() == ["m"]


def test_wrongly_due_messages_wait_for_their_time():
    """Found by delay simulation seed 207."""
    copies, _ = a_group()
    copies.hears = False
    copies.run(READING_MS_MAX + 1_000)  # earlier readings count no more
    copies.b.host.wall_skew_ms = HOUR_MS
    copies.swap(2)
    copies.senders.routeless.add("s")
    producer = copies.producer()
    producer.delayed(copies.now_ms - HOUR_MS + 30_000, "m")
    copies.run(1_000)
    assert copies.a.master.stats()["waiting_messages"] == 1
    copies.hears = True
    copies.run(200)
    copies.senders.routeless.clear()
    copies.run(28_000)
    assert copies.senders.delivered() == []
    copies.run(1_500)
    assert copies.senders.delivered() == ["m"]
