"""Core. Two tables of mutants, under version control: those that no check can notice, with the reason; and those that
must be noticed, with the fault that they are.

path:function: change
    reason
"""

from __future__ import annotations

from pathlib import Path

EXPLAINED = Path(__file__).with_name("explained.txt")
REQUIRED = Path(__file__).with_name("required.txt")


def read_table(path: Path) -> dict[str, str]:
    """Return name -> reason.

    Raises:
        ValueError: a mutant has no reason, or a reason no mutant.
    """
    explained: dict[str, str] = {}
    name = ""
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            if not name:
                raise ValueError(f"a reason without a mutant: {line.strip()}")
            explained[name] = f"{explained.get(name, '')} {line.strip()}".strip()
        else:
            if name and name not in explained:
                raise ValueError(f"no reason is given: {name}")
            name = line
    if name and name not in explained:
        raise ValueError(f"no reason is given: {name}")
    return explained
