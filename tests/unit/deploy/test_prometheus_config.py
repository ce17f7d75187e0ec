"""Shell. Output of `qmq prometheus`: targets, and a configuration valid for Prometheus."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from qmq.deploy.prometheus.config import find_targets, main, write_config

INSTALLATION = {
    "ListBrokers": [
        {"role": "MASTER", "ip": "10.0.0.1", "metricsPort": 20884, "hostname": "b1"},
        {"role": "DELAY_SLAVE", "ip": "10.0.0.2", "metricsPort": 20814, "hostname": "d2"},
        {"role": "SLAVE", "ip": "10.0.0.2", "metricsPort": 0, "hostname": "never started"},
    ],
    "ListMetaservers": [{"http": "10.0.0.1:8180", "cluster": "prod"}, {"http": "10.0.0.2:8280", "cluster": "prod"}],
    "ListWatchdogs": [{"address": "10.0.0.1:8090"}, {"address": ""}],
}


def ask(action, **words):
    assert words == ({"details": "true"} if action == "ListBrokers" else {})
    return INSTALLATION[action]


def test_every_registered_process_is_a_target():
    found = [
        (target["labels"]["kind"], target["labels"].get("hostname"), *target["targets"]) for target in find_targets(ask)
    ]
    assert found == [
        ("metaserver", None, "10.0.0.1:8180"),
        ("metaserver", None, "10.0.0.2:8280"),
        ("broker", "b1", "10.0.0.1:20884"),
        ("delayserver", "d2", "10.0.0.2:20814"),
        ("watchdog", None, "10.0.0.1:8090"),
    ]


def test_every_target_names_its_cluster():
    assert {target["labels"]["cluster"] for target in find_targets(ask, ["10.0.0.2:8090"])} == {"prod"}
    older = INSTALLATION | {"ListMetaservers": [{"http": "10.0.0.1:8180"}]}
    assert {target["labels"]["cluster"] for target in find_targets(lambda action, **_: older[action])} == {"qmq"}


def test_active_watchdog_is_listed_once():
    found = find_targets(ask, ["10.0.0.2:8090", "10.0.0.1:8090"])
    assert [target["targets"] for target in found if target["labels"]["kind"] == "watchdog"] == [
        ["10.0.0.1:8090"],
        ["10.0.0.2:8090"],
    ]


def test_each_named_gateway_is_a_target():
    found = find_targets(ask, gateways=["10.0.0.2:8070", "10.0.0.1:8070", "10.0.0.1:8070"])
    assert [target for target in found if target["labels"]["kind"] == "gateway"] == [
        {"targets": [f"10.0.0.{n}:8070"], "labels": {"kind": "gateway", "cluster": "prod"}} for n in (1, 2)
    ]


def test_prometheus_takes_the_configuration(tmp_path):
    (tmp_path / "a token").write_text("x")
    path = write_config(
        tmp_path / "out", find_targets(ask), token_file=tmp_path / "a token", node_exporters=["10.0.0.1:9100"]
    )
    ended = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
    assert ended.returncode == 0 and "1 rule files found" in ended.stdout, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "out" / "qmq.targets.json").read_text()) == find_targets(ask)
    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["prod", "prod-nightly"]
    assert jobs[1]["static_configs"] == [{"targets": ["10.0.0.1:9100"], "labels": {"cluster": "prod"}}]
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}, "Prometheus reads them"


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:x", ":80"])
def test_an_address_that_is_none_is_refused(tmp_path, address):
    with pytest.raises(ValueError):
        write_config(tmp_path, [], token_file=tmp_path, node_exporters=[address])
    assert list(tmp_path.iterdir()) == []


def test_a_metaserver_that_does_not_answer_changes_nothing(tmp_path, capsys):
    (tmp_path / "token").write_text("x")
    (tmp_path / "token").chmod(0o600)
    words = ["--metaserver", "127.0.0.1:1", "--token-file", str(tmp_path / "token"), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    assert "qmq prometheus: ListBrokers: no answer" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_a_file_prometheus_has_no_token(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("QMQ_TOKEN_FILE", raising=False)
    assert main(["--metaserver", "127.0.0.1:1", "--token", "x", "--out", str(tmp_path / "out")]) == 1
    assert "--scrape-token-file" in capsys.readouterr().err
