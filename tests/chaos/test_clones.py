"""Shell. Copies of data directories against real processes; `make clones` runs for longer."""

from __future__ import annotations

from tests.chaos.clones import run_trial


def test_copied_directory_gives_one_master_and_loses_nothing(tmp_path):
    lines = []
    findings = run_trial(tmp_path, rounds=2, groups=2, seed=1, say=lines.append)
    assert not findings.lost and not findings.accused, [findings, *lines]
    assert findings.acknowledged > 10 and findings.refused > 0, [findings, *lines]
