"""Shell. The audit on a standalone Spark cluster: one master and two workers, as processes on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pyspark
import pytest

from tests.support.ports import free_ports
from tests.support.spark import QUICK, run_job, submit_arguments
from tests.support.waiting import until
from tests.unit.audit.logs import LogWriter
from tests.unit.audit.test_walk import flip

ROOT = Path(__file__).resolve().parents[2]
SPARK = Path(pyspark.__file__).parent
START_S = 180.0
JOB_S = 480.0
# A job waits for both workers; else the first one does all the work while a busy machine starts the second.
CONFS = QUICK | {
    # The comparison has many small shuffles; 16 tasks each, or adaptive plans, would take most of the time.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_S:.0f}s",
}


@contextmanager
def running(log: Path, *arguments: str, **more: str) -> Iterator[None]:
    """Run one of Spark's own processes with `more` in its environment; end its process group, which has the
    executors.
    """
    environment = os.environ | {
        "SPARK_HOME": str(SPARK),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_WORKER_DIR": str(log.parent / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": QUICK["spark.executor.extraJavaOptions"],
    }
    with log.open("wb") as output:
        command = [str(SPARK / "bin" / "spark-class"), *arguments]
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | more,
            start_new_session=True,
            cwd=log.parent,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(START_S)


def wait_for(log: Path, text: str, times: int = 1) -> None:
    """Wait until a process has logged a text, the only sign that it is ready."""
    until(lambda: log.read_text(errors="replace").count(text) >= times, f"{log} says {text}", START_S)


class Cluster(NamedTuple):
    url: str
    work: Path
    """A folder per job and executor."""

    def executors(self) -> set[Path]:
        """Return the folders of all executors that received our code."""
        return {path.parent for path in self.work.rglob("qmq-audit.zip")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    [port], master = free_ports(1), folder / "master.out"
    url = f"spark://127.0.0.1:{port}"
    address = ("--host", "127.0.0.1", "--webui-port", "0")
    with ExitStack() as stack:
        master_class = "org.apache.spark.deploy.master.Master"
        stack.enter_context(running(master, master_class, *address, "--port", str(port)))
        wait_for(master, "I have been elected leader")
        for number in range(2):
            worker = ("org.apache.spark.deploy.worker.Worker", *address, "--cores", "1", "--memory", "600m", url)
            stack.enter_context(running(folder / f"worker{number}.out", *worker))
        wait_for(master, "Registering worker 127.0.0.1", times=2)
        yield Cluster(url, folder / "work")


def write(data: Path) -> LogWriter:
    log = LogWriter.begun(data)
    for _ in range(40):
        log.batch("order.changed", 10)
    log.close()
    return log


def test_standalone_cluster_job_finds_differences(cluster: Cluster, tmp_path: Path) -> None:
    """The executors run outside this checkout, so they import the code that the job ships."""
    good, bad = write(tmp_path / "master"), write(tmp_path / "slave")
    write(tmp_path / "copy")
    flip(tmp_path / "slave", bad.frames[20].end - 50)
    arguments = [
        sys.executable,
        "-m",
        "qmq.audit.jobs.consistency",
        "--spark-master",
        cluster.url,
        "--piece-bytes",
        "20000",
    ]
    for group, slave in (("g1", "copy"), ("g2", "slave")):
        arguments += ["--group", group, "--master", str(tmp_path / "master"), "--slave", str(tmp_path / slave)]
    result = tmp_path / "result.json"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    environment["PYSPARK_SUBMIT_ARGS"] = submit_arguments(CONFS)
    before = cluster.executors()
    job = subprocess.run(
        [*arguments, "--result", str(result)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=JOB_S
    )
    assert job.returncode == 1, job.stdout + job.stderr
    equal, different = json.loads(result.read_text())["groups"]
    assert (equal["status"], equal["read"]["slave"]["messages"], equal["high_watermark"]) == (
        0,
        400,
        good.frames[-1].offset,
    )
    assert [(f["what"], f["copy"], f["offset"]) for f in different["findings"]] == [
        ("damaged", "slave", bad.frames[20].offset)
    ]
    assert len(cluster.executors() - before) == 2, "both workers took part"


SUBMITTED = """
import json, sys
from qmq.audit.data_source import start_spark
spark = start_spark(None, "submitted")
prefixes = spark.sparkContext.parallelize(range(2), 2).map(lambda _: __import__("sys").prefix).distinct().collect()
messages = spark.read.format("qmq").option("path", sys.argv[1]).option("piece_bytes", "20000").load().count()
settings = [spark.sparkContext.master, spark.conf.get("spark.sql.shuffle.partitions")]
print(json.dumps([settings, prefixes, messages]))
"""


def environment_archive(folder: Path) -> Path:
    """Make an archive as `venv-pack` does: a small environment that uses this Python's packages through a `.pth`
    file.
    """
    env, packages = folder / "env", Path(pyspark.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(env)], check=True)
    [site] = env.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return Path(shutil.make_archive(str(folder / "environment"), "gztar", env))


def test_submitted_job_keeps_settings_and_environment(cluster: Cluster, tmp_path: Path) -> None:
    """As in docs/spark.md, with `--archives` of an environment without our code. The JVM starts before our program,
    without its PYTHONPATH and session settings.
    """
    write(tmp_path / "master")
    archive = environment_archive(tmp_path)
    alone = [tmp_path / "env/bin/python", "-c", "import pyarrow, grpc, numpy, qmq"]
    without = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert "No module named 'qmq'" in without.stderr
    script = tmp_path / "job.py"
    # Only the program imports from the checkout; JVM and executors must receive their code.
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})" + SUBMITTED)
    command = [str(SPARK / "bin" / "spark-submit"), "--master", cluster.url, "--archives", f"{archive}#env"]
    for name, value in (CONFS | {"spark.sql.shuffle.partitions": "7"}).items():
        command += ["--conf", f"{name}={value}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    environment |= {"PYSPARK_DRIVER_PYTHON": sys.executable, "PYSPARK_PYTHON": "./env/bin/python"}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1"}
    # `env` is in `tmp_path`, as Spark runs plans of the driver's machine by the same relative path.
    command += [str(script), str(tmp_path / "master")]
    settings, prefixes, messages = run_job(command, tmp_path, environment, timeout_s=JOB_S)
    assert settings == [cluster.url, "7"]
    folders = {Path(prefix) for prefix in prefixes}
    assert messages == 400 and len(folders) == 2, "one for each executor"
    assert all(path.name == "env" and path.is_relative_to(cluster.work.resolve()) for path in folders), folders
