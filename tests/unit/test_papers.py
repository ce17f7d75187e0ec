"""Shell. What the papers say is there: numbers that are cited, tests and files that are named, decisions' states."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from textwrap import indent

import pytest

from qmq.states import draw
from tests import drawings

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "qmq",
    "broker",
    "delayserver",
    "metaserver",
    "watchdog",
    "tools",
    "audit",
    "deploy",
    "benchmarks",
    "tests",
    "docs",
)
PAPERS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/promises.md", "docs/glossary.md"]
NUMBER = re.compile(r"\b[PWI]\d{1,2}\b")


def sources(*suffixes):
    """All files of ours with these suffixes; links below `qmq` are not followed."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    return [path for path in [*paths, *ROOT.glob("*.md")] if "_pb2" not in path.name and path.suffix in suffixes]


def defined():
    """The numbers that have a row of a table: `| W2, W13 | …`."""
    rows = (ROOT / "docs" / "promises.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    return {number for cell in re.findall(r"(?m)^\| ([PWI]\d[^|]*)\|", rows) for number in NUMBER.findall(cell)}


def test_every_number_that_is_cited_is_defined():
    known = defined()
    assert len(known) > 50
    cited = {
        (path.relative_to(ROOT), number)
        for path in sources(".py", ".md")
        for number in NUMBER.findall(path.read_text())
    }
    assert sorted(str(one) for one in cited if one[1] not in known) == []


def test_every_invariant_is_cited_where_product_code_keeps_it():
    product = "".join(path.read_text() for path in sources(".py") if "tests" not in path.relative_to(ROOT).parts)
    cited = set(NUMBER.findall(product))
    assert sorted({number for number in defined() if number.startswith("I")} - cited) == []


def test_every_weakness_names_tests_that_exist():
    rows = [row for row in (ROOT / "docs" / "promises.md").read_text().splitlines() if row.startswith("| W")]
    place = re.compile(r"`([a-z_0-9/]+(?:\.txt|\.py(?:::\w+)?)?)`")
    named = [(row.split("|")[1], name) for row in rows for name in place.findall(row)]
    assert {number for cell, _ in named for number in NUMBER.findall(cell)} == {f"W{n}" for n in range(1, 23)}
    for _, name in named:
        file, _, test = name.partition("::")
        assert (ROOT / "tests" / file).exists(), name
        assert not test or f"def {test}(" in (ROOT / "tests" / file).read_text(), name


@pytest.mark.parametrize("paper", PAPERS)
def test_every_file_that_a_paper_names_exists(paper):
    text = (ROOT / paper).read_text()
    named = re.findall(r"`([a-z_]+(?:/[A-Za-z_0-9.]+)+/?)`", text)
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    wrong = [name for name in named if name.split("/")[0] in FOLDERS and not (ROOT / name).exists()]
    assert wrong + [target for target in targets if not (ROOT / paper).parent.joinpath(target).exists()] == []


def test_every_decision_has_a_status():
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        status = re.search(r"(?m)^\*\*Status:\*\* (accepted|superseded by)\b", path.read_text())
        assert status, f"{path.name}: no **Status:** accepted, or superseded by another"


def test_no_paper_outside_the_repo_is_cited():
    wrong = [
        path.relative_to(ROOT) for path in sources(".py") if re.search(r"\b[Dd]esign,? (section )?\d", path.read_text())
    ]
    assert wrong == []


def test_the_drawings_of_states_are_their_tables():
    text = drawings.PAPER.read_text()
    assert drawings.drawn(text) == text, "make drawings"
    assert len(drawings.tables(text)) == 6
    for module, name in drawings.tables(text):
        drawing = indent(draw(drawings.table(module, name)), "    ")
        assert drawing in (import_module(module).__doc__ or ""), f"{module} does not show its table as it is"


def test_the_formatter_formats_all_of_it():
    """One form of code that nobody has to think about: what reads badly then is to be said otherwise."""
    exempt = "# fmt" + ":"
    assert [path for path in sources(".py") if exempt in path.read_text()] == []
