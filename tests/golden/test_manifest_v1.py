"""Shell. The manifest of a copy's segments, version 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qmq.log.manifest import decode_manifest, encode_manifest

GOLDEN = json.loads((Path(__file__).parent / "manifest_v1" / "lists.json").read_text())


@pytest.mark.parametrize("row", GOLDEN["lists"], ids=[row["name"] for row in GOLDEN["lists"]])
def test_manifest_has_golden_bytes(row):
    assert encode_manifest(row["segments"]).decode() == row["bytes"]
    assert decode_manifest(row["bytes"].encode()) == row["segments"]


@pytest.mark.parametrize("row", GOLDEN["refused"], ids=[row["name"] for row in GOLDEN["refused"]])
def test_malformed_manifest_is_refused(row):
    with pytest.raises(ValueError):
        decode_manifest(row["bytes"].encode())
