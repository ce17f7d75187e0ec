"""Core. Places of a PromQL expression where series of two clusters meet."""

from __future__ import annotations

import re

_AGGREGATION = re.compile(
    r"\b(sum|min|max|avg|group|stddev|stdvar|count|count_values|bottomk|topk|quantile)\b(?!\s*=)(?:\s+by\s*\(([^)]*)\))?\s*\("
)
_MATCHING = re.compile(
    r"\b(on|ignoring|without|group_left|group_right|absent|absent_over_time|scalar|vector)\s*\(([^)]*)"
)


def crossings(expr: str) -> list[str]:
    """Return the aggregations, matchings and functions that drop the label `cluster`."""
    text = re.sub(r"\"[^\"]*\"", '""', expr)
    found = [match[0] for match in _AGGREGATION.finditer(text) if "cluster" not in re.findall(r"\w+", match[2] or "")]
    for match in _MATCHING.finditer(text):
        if match[1] != "on" or "cluster" not in re.findall(r"\w+", match[2]):
            found.append(match[0])
    return found
