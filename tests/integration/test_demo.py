"""Shell. `make demo` on a small file: all rows sent, consumed and proven through a kill and swaps; failures are
reported.
"""

from __future__ import annotations

import json
import subprocess
import sys

from qmq.deploy.processes import ROOT
from qmq.deploy.proof import file_input, prove
from tests.integration.cluster_world import running

ROWS = 4_000


def run_demo(tmp_path, text):
    (tmp_path / "rows.csv").write_text(text)
    command = [sys.executable, "-m", "qmq.deploy.demo", "--input", tmp_path / "rows.csv", "--dir", tmp_path / "run"]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)


def test_demo_proves_every_message(tmp_path):
    lines = [f"{('Wien', 'Ulm', 'O’Hare', '')[n % 4]},{n}" for n in range(ROWS)]
    demo = run_demo(tmp_path, "\n".join(["city o'name,n", *lines]))
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "SIGKILL to g1-a" in demo.stdout and "proven: " in demo.stdout
    result = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result[name] for name in ("sent", "acknowledged", "consumed", "lost", "findings")] == [ROWS] * 3 + [0, 0]
    assert result["counts_agree"] and result["complaints"] == []
    assert {"swap of g1", "swap of g2", "g1 without a writable master"} <= set(result["times_s"])
    assert len((tmp_path / "run" / "acknowledged.ndjson").read_text().splitlines()) == ROWS
    assert "read_log_bytes_per_s" in (tmp_path / "run" / "g1-a" / "broker.toml").read_text(), "no client waits for it"


def test_proof_finds_missing_messages(tmp_path):
    """Nothing was sent, though the file has rows and the journal has one receipt."""
    (tmp_path / "rows.csv").write_text("city\nUlm\nUlm\n")
    source = file_input(tmp_path / "rows.csv")
    run_dir = tmp_path / "run"
    with running(run_dir) as cluster:
        line = {"subject": "demo.row", "group": "g1", "sequence": 0, "id": "row-0000000"}
        (run_dir / "acknowledged.ndjson").write_text(json.dumps(line) + "\n")
        proof = prove(cluster, source, source.counts(), run_dir)
    assert proof.findings > 0 and not proof.counts_agree
    assert any("city Ulm: 0 messages logged, 2 rows in the file" in complaint for complaint in proof.complaints)
