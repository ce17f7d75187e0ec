"""Shell. Damage that a broker repairs before or after the audit reads it is a finding all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from qmq.audit.copies import Description, open_copy, place_options
from qmq.audit.findings import PIECE, FindingKind
from qmq.audit.group import add_reported_damage, conclude
from qmq.audit.inspection import describe_findings
from qmq.audit.results import Group, GroupAnswer, Result
from qmq.audit.verdict import count_repaired
from qmq.audit.wave import Audit, Options
from qmq.proto import qmq_pb2, qmq_pb2_grpc
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.served import serving
from tests.unit.audit.test_walk import flip

OLD, SEEN, UNSEEN = ((begin, begin + 50, "wrong body CRC") for begin in (100, 200, 300))


class Broker(qmq_pb2_grpc.BrokerServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.damaged = [OLD]

    def DescribeLog(self, request: Any, context: grpc.ServicerContext) -> Any:
        ranges = [qmq_pb2.DamagedRange(begin=begin, end=end, reason=why) for begin, end, why in self.damaged]
        return qmq_pb2.LogDescription(log_end=1_000, damaged=ranges)


@pytest.fixture
def broker() -> Iterator[tuple[Broker, str]]:
    fake = Broker()
    with serving(fake) as [address]:
        yield fake, address


def began(address: str) -> tuple[Group, Result]:
    group = Group("g1", {"slave": place_options(address, "")})
    with closing(open_copy(group.places["slave"])) as copy:
        return group, Result("g1", {}, logs={"slave": copy.describe()})


@pytest.mark.parametrize("again", [(), (OLD,)], ids=["once", "an old one again"])
def test_damage_met_since_is_a_finding_once(
    broker: tuple[Broker, str], again: tuple[tuple[int, int, str], ...]
) -> None:
    fake, address = broker
    group, result = began(address)
    result.add(FindingKind.DAMAGED, copy="slave", offset=SEEN[0], end=SEEN[1])
    fake.damaged += [SEEN, UNSEEN, *again]
    add_reported_damage(group, result)
    found = {(row["what"], row["copy"], row["offset"], row["end"], row["text"]) for row in result.findings[1:]}
    assert found == {("damaged", "slave", *range_) for range_ in (UNSEEN, *again)}


def test_damage_repaired_between_readings_explains_the_difference(broker: tuple[Broker, str]) -> None:
    fake, address = broker
    group, result = began(address)
    result.watermark = result.logs["slave"].end
    answer = GroupAnswer(("slave",))
    answer.take("slave", PIECE, {"begin": 0, "end": 1_000, "apart": True, "due_bytes": 1_000})
    fake.damaged.append(UNSEEN)
    conclude(Audit(group, result, answer=answer), Options())
    assert result.found == {FindingKind.DAMAGED: 1}


def test_restarted_or_absent_broker_has_met_nothing(broker: tuple[Broker, str]) -> None:
    fake, address = broker
    group, result = began(address)
    fake.damaged = []
    add_reported_damage(group, result)
    add_reported_damage(Group("g1", {"slave": place_options("127.0.0.1:1", "")}), result)
    assert result.findings == []


@pytest.mark.parametrize("is_repaired", [True, False])
def test_damage_repaired_by_reading_is_repaired(tmp_path: Path, is_repaired: bool) -> None:
    for name in ("master", "slave"):
        log = LogWriter.begun(tmp_path / name)
        frame = log.batch("order.changed", 3)
        log.close()
    if not is_repaired:
        flip(tmp_path / "slave", frame.end - 9)
    result = Result("g1", {}, logs={"slave": Description(0, log.end, 0, None, (0,))})
    result.add(FindingKind.DAMAGED, copy="slave", offset=frame.offset, end=frame.end, text="body CRC")
    result.add(FindingKind.DAMAGED, copy="slave", offset=log.end + 800, end=log.end + 808, text="no frame")
    places = {name: place_options(str(tmp_path / name), "") for name in ("master", "slave")}
    describe_findings("g1", places, result.logs, result.findings)
    count_repaired(result)
    assert result.found == (
        {FindingKind.REPAIRED: 1, FindingKind.DAMAGED: 1} if is_repaired else {FindingKind.DAMAGED: 2}
    )
    row = result.findings[0]
    assert (row["subject"], row["segment"], row["epoch"]) == ("order.changed", 0, "1.1")
    assert ("taken it from the other copy since" in row["text"]) == is_repaired
    assert ("the copies first differ at byte" in row["text"]) != is_repaired
