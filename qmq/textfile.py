"""Core. Gauges in Prometheus' text format, for node_exporter's textfile collector: of jobs that run and end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def gauge(name: str, help_text: str, readings: Iterable[tuple[Mapping[str, str], object]]) -> str:
    """Return one gauge with its readings, each a value with its labels."""
    lines = [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
    for labels, value in readings:
        named = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{named}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
