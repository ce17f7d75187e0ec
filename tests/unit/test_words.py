"""Shell. Words that the glossary replaced are gone: from all texts, or only from names if they are ordinary English."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REFUSED = {
    "topic": r"topics?(?! ::)",
    "pair": r"pairsettings|paircontrol|paircollector|a_pair|delay_pair",
    "reign": r"reign(s|ed|ing)?",
    "office": r"office",
    "appoint": r"appoint(s|ed|ment|ments)?",
    "resign": r"resign(s|ed)?",
    "take over": r"(take|takes|taken|took|taking)[ _-]over|takeovers?",
    "in step": r"in step(?! \d)",
    "matched": r"(is|are)_matched",
    "give back": r"(give|gives|gave|given|giving)[ _]back",
    "giver": r"givers?",
    "hand out": r"hand(s|ed|ing)?[ _]out",
    "hand over": r"hand(s|ed|ing)?[ _]over",
    "buried": r"bury|buries|buried|burials?",
    "in doubt": r"in[ _]doubt",
    "sight": r"sights?",
    "mend": r"mend(s|ed|ing)?",
    "door": r"doors?",
}
"""Word -> refused pattern, between non-letters, in lower case, in every text that a person writes.

The name `in_step` stays: it is stored and sent.
"""

REFUSED_NAMES = {
    "level": "qmq/log qmq/replication broker delayserver",
    "alone": "qmq/log qmq/replication broker delayserver",
    "held": "qmq/log qmq/replication qmq/server qmq/client broker tools",
    "feed": "qmq metaserver broker delayserver watchdog tools audit deploy benchmarks",
    "walk": "qmq metaserver broker delayserver watchdog tools",
    "turn": "qmq metaserver broker delayserver watchdog tools audit deploy benchmarks",
    "line": "qmq/outbox qmq/replication broker delayserver watchdog",
}
"""Word -> folders in which no name has it, as singular or plural.

These are ordinary English, too: a text file has lines, a scan of stored bytes is a walk, loggers have levels.
"""

NAMED = {
    "log_level": "level of Python's loggers",
    "held_end": "field of SUBSCRIBE and of the gRPC answers",
    "held_bytes": "the metric qmq_broker_held_bytes",
    "_held": "route versions of a watcher: the field `held` of the watch request",
    "_held_end": "log end that enough copies hold",
    "_note_held": "the metric qmq_broker_held_bytes",
    "_check_held_end": "field of SUBSCRIBE",
    "is_held": "a role change waits: the state HELD",
    "has_its_turn": "exclusive consumers of a group take turns",
    "_take_turn": "consumers of a group take turns",
    "_turn": "one iteration of the event loop",
    "_turn_off": "verb",
}
"""Names that contain a refused word all the same -> reason."""

EXEMPT = {
    "docs/migrating.md",  # the words of other brokers, beside ours
    "docs/glossary.md",
    "tests/unit/test_words.py",
    "CHANGELOG.md",
    "LICENSE",
    "tests/unit/test_states.py",
    "qmq/states.py",
}
"""Files that name old words on purpose: the glossary, released versions, and examples of doors that open and shut."""

SUFFIXES = {".py", ".md", ".proto", ".sh", ".toml", ".service", ".conf"}


@cache
def texts() -> list[tuple[str, str]]:
    """Return path and text of each file in the repo that a person writes."""
    return list(_texts())


def _texts() -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        path = ROOT / name
        if name in EXEMPT or name.startswith(("tests/golden/", "requirements")) or "_pb2" in name:
            continue
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink():
            yield name, path.read_text()


@cache
def defined_names() -> list[tuple[str, str]]:
    """Return path and name of each module, class, function and attribute that a source file defines."""
    return [(path, name) for path, text in texts() if path.endswith(".py") for name in _defined(path, text)]


def _defined(path: str, text: str) -> set[str]:
    names = {Path(path).stem}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.ClassDef | ast.Module):
            fields = (field.target for field in node.body if isinstance(field, ast.AnnAssign))
            names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return names


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake or camel case, in lower case, without a plural s."""
    return {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


@pytest.mark.parametrize("word", REFUSED)
def test_old_word_is_gone(word):
    pattern = re.compile(rf"(?<![a-z])({REFUSED[word]})(?![a-z])")
    assert [f"{path}: {match.group()}" for path, text in texts() for match in pattern.finditer(text.lower())] == []


@pytest.mark.parametrize("word", REFUSED_NAMES)
def test_no_name_has_old_word(word):
    folders = tuple(f"{folder}/" for folder in REFUSED_NAMES[word].split())
    names = [(path, name) for path, name in defined_names() if path.startswith(folders) and name not in NAMED]
    assert [f"{path}: {name}" for path, name in names if word in words_of(name)] == []


def test_every_word_of_the_glossary_is_refused():
    table = (ROOT / "docs" / "glossary.md").read_text()
    last = [row.rsplit("|", 2)[1] for row in table.splitlines() if row.startswith("| ") and row.count("|") == 4]
    words = {word.strip() for cell in last[1:] for word in cell.split(",") if word.strip()}
    assert words == {*REFUSED, *REFUSED_NAMES}
