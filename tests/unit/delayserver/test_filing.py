"""Core. The schedule follows the log; a schedule with cut frames never counts."""

from __future__ import annotations

import pytest

from tests.unit.delayserver.world import HOUR_MS, Copies


def flush_is_out(filing, host):
    filing.keep(host.now_ms() + HOUR_MS)
    filing.rebuild("the log's end was cut")


def read_is_out(filing, host):
    filing.rebuild("its files are damaged")
    filing.go_on(filing.known_end)


@pytest.mark.parametrize("begin, tail_bytes", [(flush_is_out, 1 << 20), (read_is_out, 0)])
def test_schedule_beyond_a_cut_does_not_count_as_filed(begin, tail_bytes):
    """It is rebuilt when no read or flush is running. A master that used it until then sent plans that were cut."""
    copies = Copies.made(tail_bytes=tail_bytes)
    copies.start()
    copies.producer().delayed(copies.now_ms + HOUR_MS, "m")
    copies.run(2_000)
    filing, host = copies.a.filing, copies.a.host
    assert filing.reaches(copies.a.log.flushed_end)
    begin(filing, host)
    ((job, done),) = host.reads
    host.reads.clear()
    assert not filing.reaches(filing.schedule.filed_end)
    copies.run(200)
    assert not filing.reaches(filing.schedule.filed_end)
    done(job())
    copies.run(200)
    assert filing.reaches(copies.a.log.flushed_end) and filing.schedule.pending_messages == 1
