"""Shell. Hooks of the documentation's build: pages made from papers beside docs/ and from docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAPERS = {
    "README.md": "readme.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Papers of the repository's top folder, and their pages."""
REFERENCE = {
    "client": (
        "Client",
        "qmq.Producer qmq.Consumer qmq.Message qmq.ReceivedMessage qmq.Puller qmq.Router qmq.Receipt qmq.Receipts "
        "qmq.Outcome qmq.DelayOutcome qmq.MasterChanged qmq.Journal",
    ),
    "payloads": ("Payloads", "qmq.payloads"),
    "blocking": ("Blocking client", "qmq.blocking"),
    "exactly-once": ("Exactly once, requests", "qmq.idempotence qmq.reply qmq.otel qmq.fastapi"),
    "outbox": ("Outbox", "qmq.outbox.sqlalchemy qmq.outbox.dbapi qmq.outbox.django"),
    "testing": ("Testing", "qmq.testing"),
    "errors": ("Errors", "qmq.errors"),
}
"""Page of the reference: its title, and the objects whose docstrings it shows."""
MERMAID = ROOT / ".run" / "mermaid" / "mermaid.min.js"
"""Draws diagrams in the browser; without it they are shown as text."""
FENCE = re.compile(r"^```(\w+) +([^\n]+)$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages; leave out the programs of docs/examples."""
    for paper, page in PAPERS.items():
        files.append(File.generated(config, page, content=(ROOT / paper).read_text()))
    for name, (title, objects) in REFERENCE.items():
        entries = "\n\n".join(f"::: {target}" for target in objects.split())
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {title}\n\n{entries}\n"))
    if MERMAID.exists():
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    for file in files:
        if file.src_uri.startswith("decisions/"):
            file.inclusion = InclusionLevel.NOT_IN_NAV
        if file.src_uri.startswith(("examples/", "site/")):
            file.inclusion = InclusionLevel.EXCLUDED
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages; a link to a file that is no page becomes its name."""
    is_paper = page.file.src_uri in PAPERS.values()
    place = "" if is_paper else dirname(f"docs/{page.file.src_uri}")

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target:
            return found[0]
        path = normpath(f"{place}/{target}" if place else target)
        if path not in PAPERS and (not path.startswith("docs/") or path.startswith("docs/examples/")):
            return text
        shown = PAPERS.get(path) or path.removeprefix("docs/")
        return f"[{text}]({relpath(shown, dirname(page.file.src_uri) or '.')}{anchor})"

    return LINK.sub(replaced, FENCE.sub(_fence, markdown))


def _fence(found: re.Match[str]) -> str:
    """Return a fence with a file's name as its title; other words behind the language are for tests."""
    title = f' title="{found[2]}"' if "." in found[2] else ""
    return f"```{found[1]}{title}"
