"""Shell. The words of the glossary are used, and those that they replaced are not."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REFUSED = {
    "reign": r"reign(s|ed|ing)?",
    "office": r"office",
    "appoint": r"appoint(s|ed|ment|ments)?",
    "resign": r"resign(s|ed)?",
    "pair": r"PairSettings|PairControl|PairCollector|a_pair|delay_pair",
    "door": r"doors?",
    "in doubt": r"in doubt",
    "hand out": r"hand(s|ed|ing)? out",
    "sight": r"sights?",
}
"""Word -> what is refused of it, between non-letters, in any case."""

EXEMPT = {
    "docs/glossary.md",
    "tests/unit/test_words.py",
    "CHANGELOG.md",
    "LICENSE",
    "tests/unit/test_states.py",
    "qmq/states.py",
}
"""They name old words on purpose: the glossary, what was released before, and examples of doors that open and shut."""


@cache
def texts():
    """Return path and text of each file in the repo that a person writes."""
    return list(_texts())


def _texts():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        path = ROOT / name
        if (
            name in EXEMPT
            or path.is_symlink()
            or not path.is_file()
            or name.startswith(("tests/golden/", "requirements"))
        ):
            continue
        if path.suffix in {".py", ".md", ".proto", ".sh", ".toml", ".service", ".conf"} and "_pb2" not in name:
            yield name, path.read_text()


@pytest.mark.parametrize("word", REFUSED)
def test_old_word_is_gone(word):
    pattern = re.compile(rf"(?<![A-Za-z])({REFUSED[word]})(?![a-z])", re.IGNORECASE)
    assert [f"{name}: {found.group()}" for name, text in texts() if (found := pattern.search(text))] == []


def test_every_refused_word_is_in_the_glossary():
    table = (ROOT / "docs" / "glossary.md").read_text()
    last = " ".join(row.rsplit("|", 2)[1] for row in table.splitlines() if row.startswith("| "))
    assert [word for word in REFUSED if word not in last] == []
