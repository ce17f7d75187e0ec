"""Shell. Many divergences at once, on one copy and on both: the audit reports the frame and message of each, and
nothing else. Each alone: tests/unit/audit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from qmq.audit.copies import PathCopy, place_options
from qmq.audit.group import audit_groups
from qmq.audit.results import Group, Result
from qmq.audit.wave import Options
from qmq.ledger import Ledger
from tests.integration.real_logs import SUBJECT, Lived, Places, copied
from tests.support.spark import actions, local_spark
from tests.unit.audit.beside import WRONG, bases_of
from tests.unit.audit.divergences import (
    DELAYED,
    LIVED,
    RIGHT_BUT_OTHER,
    TWO_SIDED,
    Expected,
    Plant,
    frame_of,
    other_payload,
)
from tests.unit.audit.forged import A, B, C, forged, read_frames, write_world
from tests.unit.audit.test_walk import change, flip
from tests.unit.audit.without_spark import audit_places

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

PIECE_BYTES = 65_536
Found = set[tuple[str, str, int | None, int | None, str | None]]
"""(kind, copy, offset, sequence, message id)"""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark("divergences") as session:
        yield session


def places_of(folder: Path) -> dict[str, dict[str, str]]:
    return {copy.name: place_options(str(copy), "") for copy in sorted(folder.iterdir())}


def found(result: Result) -> Found:
    assert sum(result.found.values()) == len(result.findings)
    return {(row["what"], row["copy"], row["offset"], row["sequence"], row["id"]) for row in result.findings}


def due(expected: Expected, copy: str) -> Found:
    rows: Found = set()
    for what, frame, sequence in expected:
        # Findings are about one message, except of `history` and of frames without messages.
        sequence = frame.first_sequence if sequence is None and frame.count else sequence
        identity = None if sequence is None or not frame.count else f"{frame.subject}-{sequence}"
        rows.add((what, copy, frame.at, sequence, identity))
    return rows


def without_id(rows: Found, whats: set[str]) -> Found:
    """Leave out ids of kinds with a message that does not decode, or has the id of another one."""
    return {(what, *rest[:3], None if what in whats else rest[3]) for what, *rest in rows}  # type: ignore[misc]


def without_message(rows: Found, whats: set[str]) -> Found:
    return {(what, copy, at, *((None, None) if what in whats else rest)) for what, copy, at, *rest in rows}  # type: ignore[misc]


def plant_on_both(folder: Path, plants: Iterable[Plant]) -> Found:
    expected: Found = set()
    for copy in ("master", "slave"):
        write_world(folder / copy)
        with forged(folder / copy) as frames:
            planted = [row for plant in plants for row in plant(frames)]
        expected |= due(planted, "both")
    return expected


def plant_beside(folder: Path) -> Found:
    """An index is wrong on both copies, a snapshot on the slave alone."""
    bases = bases_of(folder / "master")
    index = [WRONG["a frame left out"](folder / copy, bases[1]) for copy in ("master", "slave")]
    snapshot = WRONG["another position"](folder / "slave", bases[2])
    return {(index[0], "both", bases[1], None, None), (snapshot, "slave", bases[2], None, None)}


OTHER_IDS = {"undecodable", "batch_twice", "id_twice", "sequence", "dead_altered", "dead_unfounded", "dead_twice"}


MANY = (
    "a message that is no UTF-8",
    "of another subject",
    "labels that are zero",
    "a batch twice",
    "an id twice",
    "a watermark of 2^40",
    "a time in ten years",
    "passed though it gets such",
    "a dead letter with another content",
    "a dead letter twice",
)


def many(folder: Path) -> Found:
    return plant_on_both(folder, [TWO_SIDED[name] for name in MANY]) | plant_beside(folder)


def plant_on_slave(folder: Path, plants: Iterable[Plant]) -> Found:
    write_world(folder / "master")
    write_world(folder / "slave")
    with forged(folder / "slave") as frames:
        planted = [row for plant in plants for row in plant(frames)]
    return due(planted, "slave")


def others(folder: Path) -> Found:
    return plant_on_slave(folder, RIGHT_BUT_OTHER.values())


def eight(folder: Path) -> Found:
    """Plant ten divergences: four other messages on the slave with valid CRCs, two damaged frames on each copy, and one
    wrong derived file on each."""
    master, slave = folder / "master", folder / "slave"
    rows = plant_on_slave(folder, [other_payload(*message) for message in ((A, 26), (B, 153), (C, 114), (A, 475))])
    with forged(slave) as frames:
        body, header, gone, swapped = (
            frame_of(frames, subject, at) for subject, at in ((B, 85), (A, 325), (C, 154), (B, 525))
        )
    bases = bases_of(master)
    rows.add((WRONG["a frame left out"](master, bases[6]), "master", bases[6], None, None))
    rows.add((WRONG["another position"](slave, bases[7]), "slave", bases[7], None, None))
    flip(master, body.at + 400)
    flip(master, header.at + 40)
    change(slave, gone.at + 200, bytes(150))
    with closing(PathCopy(slave)) as copy:
        pair = copy.window(swapped.at + 300, 400)
    assert pair[:200] != pair[200:]
    change(slave, swapped.at + 300, pair[200:] + pair[:200])
    rows |= due([("damaged", frame, None) for frame in (body, header)], "master")
    rows |= due([("damaged", frame, None) for frame in (gone, swapped)], "slave")
    return rows


PLANTED: tuple[Callable[[Path], Any], ...] = (many, others, eight)
Cases = dict[Callable[[Path], Any], tuple[Any, Result]]


@pytest.fixture(scope="module", params=["in this process", "on Spark"])
def run(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Cases, int]:
    """Return planted divergences and result of each group, all audited in one run; and the number of its actions."""
    root = tmp_path_factory.mktemp("planted")
    planted = {plant: plant(root / plant.__name__) for plant in PLANTED}
    groups = [Group(plant.__name__, places_of(root / plant.__name__)) for plant in PLANTED]
    before = actions(spark)
    executor = spark if request.param == "on Spark" else None
    results = audit_groups(executor, groups, Options(piece_bytes=PIECE_BYTES, ledger=Ledger(root / "ledger")))
    return {plant: (planted[plant], result) for plant, result in zip(PLANTED, results)}, actions(spark) - before


@pytest.fixture(scope="module")
def cases(run: tuple[Cases, int]) -> Cases:
    return run[0]


def test_diverged_groups_are_audited_by_two_actions(run: tuple[Cases, int], request: pytest.FixtureRequest) -> None:
    """One reads and judges all groups, one compares the differing pieces frame by frame."""
    assert run[1] == (2 if "on Spark" in request.node.name else 0)


def test_differences_of_both_copies_are_all_found(cases: Cases) -> None:
    expected, result = cases[many]
    assert without_id(found(result), OTHER_IDS) == without_id(expected, OTHER_IDS)


def test_all_differences_of_a_copy_are_found(cases: Cases) -> None:
    expected, result = cases[others]
    assert found(result) == expected


def test_eight_scattered_differences_are_all_found(cases: Cases) -> None:
    """They lie in several pieces, segments, subjects and copies."""
    expected, result = cases[eight]
    about = {"damaged"}  # the damaged byte's message is not checked here
    assert without_message(found(result), about) == without_message(expected, about)
    assert len(result.findings) == 10
    for what, pieces in (("different", 4), ("damaged", 4)):
        rows = [row for row in result.findings if row["what"] == what]
        assert len({row["offset"] // PIECE_BYTES for row in rows}) == len({row["segment"] for row in rows}) == pieces
        assert {row["subject"] for row in rows} == {A, B, C}
    assert {row["copy"] for row in result.findings if row["what"] == "damaged"} == {"master", "slave"}


def audit_directories(spark: SparkSession, places: Places, **options: Any) -> list[Result]:
    groups = [
        Group(name, {copy: place_options(str(path), "") for copy, path in of.items()}) for name, of in places.items()
    ]
    return audit_groups(spark, groups, Options(piece_bytes=PIECE_BYTES, **options))


def test_real_directories_have_no_findings(spark: SparkSession, lived: Lived) -> None:
    """An operator moved a consumer group: without its command in the trail, that is one."""
    results = audit_directories(spark, lived.places, trail=lambda: lived.trail)
    assert [(result.group, result.unreadable, result.findings) for result in results] == [
        ("d1", None, []),
        ("g1", None, []),
    ]
    sums = {
        row["subject"]: (row["taken"], row["stored"], row["cancelled"], row["pending"]) for row in results[0].delayed
    }
    assert sums == {"order.unpaid": (9, 6, 1, 1), "order.unseen": (5, 5, 0, 0), "order.lost": (5, 5, 0, 0)}
    brokers = {"g1": lived.places["g1"]}
    (unrecorded,) = audit_directories(spark, brokers, trail=list)[0].findings
    assert (unrecorded["what"], unrecorded["copy"], unrecorded["subject"]) == ("unrecorded", "both", SUBJECT)


def test_delay_faults_of_real_directories_are_named(spark: SparkSession, lived: Lived, tmp_path: Path) -> None:
    """Each fault lies in both copies of the delay group."""
    delays, planted, _ = plant_delays(spark, lived, tmp_path, ["master", "slave"])
    assert {delayed_row(row) for row in delays.findings} == {("both", *row) for row in planted}


def test_delay_faults_of_one_real_directory_are_differences(spark: SparkSession, lived: Lived, tmp_path: Path) -> None:
    """A message that one copy shows as sent was sent, so not every fault has a finding of its own."""
    delays, planted, places = plant_delays(spark, lived, tmp_path, ["slave"])
    rows = {delayed_row(row) for row in delays.findings if row["what"] != "different"}
    assert rows and rows <= {("slave", *row) for row in planted}
    different = {(row["copy"], row["offset"]) for row in delays.findings if row["what"] == "different"}
    assert different == {("slave", at) for at in changed_frames(places["d1"], delays.watermark)}


def plant_delays(
    spark: SparkSession, lived: Lived, folder: Path, copies: Iterable[str]
) -> tuple[Result, set[tuple[Any, ...]], Places]:
    places = copied(lived.places, folder)
    for copy in copies:
        with forged(places["d1"][copy]) as frames:
            planted = [row for plant in DELAYED.values() for row in plant(frames)]
    delays, _ = audit_directories(spark, places)
    assert delays.unreadable is None
    return delays, {(what, frame.at, sequence) for what, frame, sequence in planted}, places


def delayed_row(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["copy"], row["what"], row["offset"], row["sequence"]


def changed_frames(copies: dict[str, Path], end: int) -> set[int]:
    """Return the offsets below `end` of frames that differ between two copies by more than the chain."""
    ours, theirs = (
        {frame.offset: (frame._replace(chain=0), body) for _, frame, body in read_frames(copies[copy])}
        for copy in ("master", "slave")
    )
    return {at for at in ours if ours[at] != theirs[at] and at < end}


TWO_DAYS_MS = 2 * 86_400_000
MOVES = {"a batch twice", "unacked for days"}
"""Later frames move, or are older: other frames of the copy differ, too."""
IN_PLACE = [name for name in LIVED if name not in MOVES]


def plant_in(lived: Lived, folder: Path, names: Iterable[str], copies: Iterable[str]) -> tuple[Result, Found, Places]:
    """Plant faults in real directories of a broker group; return its audit, and the due messages without ids."""
    places = copied({"g1": lived.places["g1"]}, folder)
    for copy in copies:
        with forged(places["g1"][copy]) as frames:
            planted = [row for name in names for row in LIVED[name](frames)]
    # Frames of two days ago are commands of that time.
    trail = [change._replace(at_ms=change.at_ms - ms) for change in lived.trail for ms in (0, TWO_DAYS_MS)]
    asked = {name: place_options(str(path), "") for name, path in places["g1"].items()}
    result = audit_places(asked, trail=lambda: trail)
    side = "both" if len([*copies]) > 1 else next(iter(copies))
    return result, {(what, side, frame.at, sequence, None) for what, frame, sequence in planted}, places


def without_any_id(result: Result) -> Found:
    assert result.unreadable is None
    return {(*row[:4], None) for row in found(result)}


@pytest.mark.parametrize("names", [*([name] for name in LIVED), [*LIVED]], ids=[*LIVED, "ten at once"])
def test_faults_of_real_directories_are_named(lived: Lived, tmp_path: Path, names: list[str]) -> None:
    result, planted, _ = plant_in(lived, tmp_path, names, ["master", "slave"])
    assert without_any_id(result) == planted


@pytest.mark.parametrize("names", [*([name] for name in IN_PLACE), IN_PLACE], ids=[*IN_PLACE, "all at once"])
def test_faults_of_one_real_directory_are_named(lived: Lived, tmp_path: Path, names: list[str]) -> None:
    """Each is a finding of the slave; and each acknowledged frame that was changed is a difference."""
    result, planted, places = plant_in(lived, tmp_path, names, ["slave"])
    changed = changed_frames(places["g1"], result.watermark)
    assert {row for row in without_any_id(result) if row[0] != "different"} == planted
    assert {(row["copy"], row["offset"]) for row in result.findings if row["what"] == "different"} == {
        ("slave", at) for at in changed
    }


def test_batch_twice_in_one_real_directory_moves_later_frames(lived: Lived, tmp_path: Path) -> None:
    result, planted, _ = plant_in(lived, tmp_path, ["a batch twice"], ["slave"])
    (again,) = planted
    assert without_any_id(result) == {again, ("shifted", *again[1:])}
