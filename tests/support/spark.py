"""Shell. Spark for tests of the audit: small logs, of which each run is planned anew."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from pyspark.sql import SparkSession

from qmq.audit.data_source import start_spark

QUICK = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}
"""Compiled plans do not pay for a few hundred rows. `make demo` and its first test use the defaults."""


def submit_arguments(confs: Mapping[str, str] = QUICK) -> str:
    """Return PYSPARK_SUBMIT_ARGS for a job in its own process."""
    return " ".join(f"--conf {name}={value}" for name, value in confs.items()) + " pyspark-shell"


def run_job(command: Sequence[str], folder: Path, environment: Mapping[str, str], *, timeout_s: float) -> Any:
    """Run a job in its own process, in `folder`; return its last line, parsed as JSON."""
    job = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert job.returncode == 0, job.stdout + job.stderr
    return json.loads(job.stdout.splitlines()[-1])


@contextmanager
def local_spark(name: str) -> Iterator[SparkSession]:
    """Run Spark on two threads of this machine, without adaptive and compiled plans: with these, three audits took 110
    s of processor time instead of 30.
    """
    more = {"spark.sql.shuffle.partitions": "1"}
    session = start_spark("local[2]", name, **{key.replace(".", "__"): value for key, value in (QUICK | more).items()})
    try:
        yield session
    finally:
        session.stop()


def actions(session: SparkSession) -> int:
    """Return the number of jobs of this session's context; without adaptive plans, an action is one."""
    context = session.sparkContext
    group = f"marker {uuid4()}"
    context.setJobGroup(group, "")
    context.parallelize([0], 1).count()
    context.setLocalProperty("spark.jobGroup.id", cast("str", None))  # as its documentation removes a property
    tracker = context.statusTracker()
    while not tracker.getJobIdsForGroup(group):  # Spark records jobs in their order, a moment later
        time.sleep(0.01)
    return len(tracker.getJobIdsForGroup())
