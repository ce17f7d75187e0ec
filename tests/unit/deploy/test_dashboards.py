"""Shell. The pages for Grafana: valid for Grafana's import, with PromQL valid for Prometheus."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml

from qmq.deploy.dashboards import PAGES, PanelKind, Unit, main, to_json
from tests.unit.deploy.clusters import crossings

SHAPE = {
    "uid": str,
    "title": str,
    "tags": list,
    "schemaVersion": int,
    "version": int,
    "editable": bool,
    "graphTooltip": int,
    "refresh": str,
    "time": dict,
    "timezone": str,
    "links": list,
    "templating": dict,
    "panels": list,
}
PANEL_SHAPE = {
    "id": int,
    "type": str,
    "title": str,
    "description": str,
    "datasource": dict,
    "gridPos": dict,
    "fieldConfig": dict,
    "targets": list,
}
TARGET_SHAPE = {
    "refId": str,
    "expr": str,
    "legendFormat": str,
    "datasource": dict,
    "instant": bool,
    "range": bool,
    "format": str,
}
"""Written members of Grafana's dashboard schema 39, with their types."""


def shape_of(value):
    return {name: type(member) for name, member in value.items()}


def filled(expr):
    return expr.replace("$broker_group", ".+").replace("$subject", ".+").replace("$cluster", "prod")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_a_page_has_the_shape_that_grafana_imports(page):
    written = json.loads(json.dumps(to_json(page)))
    assert shape_of(written) == SHAPE and re.fullmatch(r"[a-z0-9-]{1,40}", written["uid"])
    panels = written["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        assert shape_of(panel) == PANEL_SHAPE and panel["type"] in list(PanelKind)
        assert panel["fieldConfig"]["defaults"]["unit"] in list(Unit)
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])]) != []
        assert all(shape_of(target) == TARGET_SHAPE for target in panel["targets"])
        assert all(target["instant"] is not target["range"] for target in panel["targets"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_panels_fill_the_grid_without_overlap(page):
    squares = [
        (x, y)
        for place in (panel["gridPos"] for panel in to_json(page)["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(squares) == len(set(squares)) and all(x < 24 for x, _ in squares)


def test_pages_and_panels_have_names_of_their_own():
    assert len({page.uid for page in PAGES}) == len({page.title for page in PAGES}) == len(PAGES) == 7
    for page in PAGES:
        assert len({panel.title for panel in page.panels}) == len(page.panels)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_variables_of_queries_stand_above_the_page(page):
    used = {name for panel in page.panels for query in panel.queries for name in re.findall(r"\$(\w+)", query.expr)}
    assert used <= {variable["name"] for variable in to_json(page)["templating"]["list"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_every_panel_shows_the_chosen_cluster(page):
    for expr in (query.expr for panel in page.panels for query in panel.queries):
        assert crossings(expr) == [], expr
        selectors = re.findall(r"(?:\b(?:qmq|process)_\w+|\bup\b|\bALERTS\b)(?!\|)\{?|\{__name__", expr)
        assert len(selectors) == len(re.findall(r'cluster=~"\$cluster"', expr)) > 0, expr
    cluster, *others = to_json(page)["templating"]["list"][1:]
    assert cluster["name"] == "cluster" and not cluster["multi"]
    assert all('cluster=~"$cluster"' in variable["definition"] for variable in others)


def test_prometheus_takes_every_query(tmp_path):
    """promtool parses them as rules."""
    queries = [query.expr for page in PAGES for panel in page.panels for query in panel.queries]
    rules = [{"record": f"query_{number}", "expr": filled(expr)} for number, expr in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    ended = subprocess.run(["promtool", "check", "rules", tmp_path / "queries.yml"], capture_output=True, text=True)
    assert ended.returncode == 0 and f"{len(queries)} rules found" in ended.stdout, ended.stdout + ended.stderr


def test_the_command_writes_a_file_for_each_page(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "pages")]) == 0
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "pages").iterdir()}
    assert written == {f"{page.uid}.json": to_json(page) for page in PAGES}
    assert len(capsys.readouterr().out.splitlines()) == len(PAGES)
