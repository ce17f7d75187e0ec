"""Shell. Names in the papers exist: numbers that are cited, tests and files that are named, decisions' states."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

import qmq
from qmq.cli import PROGRAMS
from qmq.tools.command import Kind
from qmq.tools.commands import COMMANDS
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


def anchors(page):
    """Anchors of a page, as GitHub makes them of the headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sources(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"(?ms)^```.*?^```", "", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            wrong.append(link)
    assert wrong == []


OF_EVERY_COMMAND = {"metaserver", "token-file", "token", "json", "dry-run", "yes", "help"}
TYPED = re.compile(r"(?:\bqmq|tools\.sh) ([A-Za-z][A-Za-z-]+)((?:(?! qmq )[^`|;#])*)|`([A-Z][A-Za-z]+) (--[^`]*)`")


@pytest.mark.parametrize("page", sources(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_types_exists_with_its_options(page):
    """A typed command begins a line of code or stands between backticks; `qmq` in a sentence is no command."""
    wrong = []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        for typed in TYPED.finditer(line):
            before = line[: typed.start()].strip()
            if before and not before.endswith(("`", "(", "&&", "--", '-c "')):
                continue
            name, options = (typed[1], typed[2]) if typed[1] else (typed[3], typed[4])
            if command := COMMANDS.get(name):
                known = {option.name for option in command.options} | OF_EVERY_COMMAND
                known |= {f"{option.name}-file" for option in command.options if option.kind is Kind.SECRET}
                wrong += [f"{name} --{one}" for one in re.findall(r"--([A-Za-z-]+)", options) if one not in known]
            elif name not in PROGRAMS and name not in ("completion", "COMMAND", "NAME"):
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("page", sources(".md"), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_target_of_make_that_a_page_names_exists(page):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = [word for text in re.findall(r"`make ([^`]+)`", page.read_text()) for word in text.split()]
    named = [one for one in named if re.fullmatch(r"[a-z][a-z-]*", one)]
    assert sorted(set(named) - targets) == []


def test_every_test_that_a_page_names_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = {name for page in sources(".md") for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(named) > 40
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


def test_every_decision_has_a_status():
    for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        status = re.search(r"(?m)^\*\*Status:\*\* (accepted|superseded by)\b", path.read_text())
        assert status, f"{path.name}: no **Status:** accepted, or superseded by another"


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_index_lists_every_page(folder):
    index = (ROOT / folder / "README.md").read_text()
    names = [page.name for page in (ROOT / folder).glob("*.md") if page.name != "README.md"]
    assert [name for name in names if f"({name})" not in index] == []


def test_no_paper_outside_the_repo_is_cited():
    wrong = [
        path.relative_to(ROOT) for path in sources(".py") if re.search(r"\b[Dd]esign,? (section )?\d", path.read_text())
    ]
    assert wrong == []


def test_the_drawings_of_states_are_their_tables():
    text = drawings.PAPER.read_text()
    assert drawings.drawn(text) == text, "make drawings"
    assert len(drawings.tables(text)) >= 7


def test_the_formatter_formats_all_of_it():
    """One form of code for all pages: rewrite a sentence that reads badly then."""
    exempt = "# fmt" + ":"
    assert [path for path in sources(".py") if exempt in path.read_text()] == []


BLOCK = re.compile(r"^ *```python[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks():
    """Python of the pages: (file and line, parsed)."""
    for path in [path for path in sources(".md") if "decisions" not in path.parts]:
        text = path.read_text()
        for block in BLOCK.finditer(text):
            where = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 2}"
            flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            yield where, compile(dedent(block[1]), where, "exec", flags)


def strange(where, node):
    """Wrong claims of a block about `qmq`."""
    if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "qmq":
        module = import_module(str(node.module))
        yield from (
            f"{where}: no {name.name} in {node.module}" for name in node.names if not hasattr(module, name.name)
        )
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "qmq" and not _is_there(node.attr):
        yield f"{where}: no qmq.{node.attr}"
    elif isinstance(node, ast.Call) and (called := _named(node.func)) is not None:
        words = [keyword.arg for keyword in node.keywords if keyword.arg]
        known = inspect.signature(called).parameters if words else {}
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            yield from (f"{where}: {ast.unparse(node.func)} has no {word}" for word in words if word not in known)


def _is_there(name):
    return hasattr(qmq, name) or find_spec(f"qmq.{name}") is not None


def _named(node):
    """Targets of `qmq.…` names; None: it is something else, or there is none."""
    is_ours = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "qmq"
    return getattr(qmq, node.attr, None) if is_ours else None


def test_python_of_the_pages_names_existing_things():
    found = list(blocks())
    assert len(found) > 25
    assert [text for where, tree in found for node in ast.walk(tree) for text in strange(where, node)] == []
