"""Shell. Tables on a Spark Connect server. Skipped without `pip install 'pyspark[connect]'`, which the lock file
lacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_audit_cluster import JOB_S, ROOT, environment_archive, running, wait_for, write
from tests.support.ports import free_ports
from tests.support.spark import run_job

pytest.importorskip("grpc_status", reason="needs pyspark[connect]")

CLIENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import qmq.audit
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote(sys.argv[2]).getOrCreate()
qmq.audit.register(spark)
log = spark.read.format("qmq").option("path", sys.argv[3]).option("piece_bytes", "20000")
some = log.load().where("subject = 'order.changed' AND sequence >= 390").select("sequence").collect()
frames = log.option("rows", "frames").load().count()
print(json.dumps([type(spark).__module__, sorted(row.sequence for row in some), frames]))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("connect")
    [port], log = free_ports(1), folder / "server.out"
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    options = ("--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.ui.enabled=false")
    environment_archive(folder)
    environment = {"SPARK_DAEMON_MEMORY": "700m", "PYSPARK_PYTHON": str(folder / "env/bin/python")}
    submit = ("org.apache.spark.deploy.SparkSubmit", "--class", server_class, "--master", "local[2]")
    with running(log, *submit, *options, "spark-internal", **environment):
        wait_for(log, "Spark Connect server started")
        yield f"sc://127.0.0.1:{port}"


def test_tables_are_read_by_a_client_of_spark_connect(server: str, tmp_path: Path) -> None:
    """The server's Python has only the code that the client sends."""
    good = write(tmp_path / "master")
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    environment = {name: value for name, value in os.environ.items() if name not in ("SPARK_HOME", "SPARK_REMOTE")}
    command = [sys.executable, str(script), str(ROOT), server, str(tmp_path / "master")]
    module, some, frames = run_job(command, tmp_path, environment, timeout_s=JOB_S)
    assert module.startswith("pyspark.sql.connect")
    assert (some, frames) == (list(range(390, 400)), len(good.frames))
