"""Core. Intake of a delay server, and its answers to repeats."""

from __future__ import annotations

from tests.unit.delayserver.world import HOUR_MS, a_group, delayed


def test_repeated_batch_has_its_first_receipt():
    copies, producer = a_group(delay_days_max=1)
    batch = [delayed("s", "ok", copies.now_ms), delayed("s", "too far", copies.now_ms + 24 * HOUR_MS + 500)]
    asked = producer.produce_raw(batch, batch=5)
    copies.settle()
    assert (producer.receipt(asked).stored, [at for at, _ in producer.receipt(asked).refused]) == (1, [1])
    again = producer.produce_raw(batch, batch=5)
    copies.settle()
    assert producer.receipt(again) == producer.receipt(asked)
    copies.run(1_000)
    again = producer.produce_raw(batch, batch=5)
    copies.settle()
    receipt = producer.receipt(again)
    assert receipt.stored == 1 and [at for at, _ in receipt.refused] == [1], "the log says which of them is there"
