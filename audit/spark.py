"""Shell. Start Spark so that the audit runs on it: locally, or on a cluster that has pyarrow and not our code."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from pyspark import SparkConf, SparkContext
from pyspark.sql import DataFrame, SparkSession

import qmq
from qmq.audit.source import LogSource

_ROOT = Path(qmq.__file__).resolve().parents[1]
_QUICK_JVM = "-XX:TieredStopAtLevel=1"
"""Python does the work, and the JVM's second compiler took as much CPU as the reading: of 2 GiB of log in frames of 100
messages, 4.2 of 8.4 CPU seconds were the JVM's, and are 1.4 of 5.3 without it. To start takes 7 instead of 11."""


def start_spark(master: str | None, name: str, **config: str) -> SparkSession:
    """Return a session with the data source `qmq` registered; `config` has dots written as double underscores.

    Without a `master` it is the one that spark-submit or spark-defaults.conf names, `local[*]` if they name none. What
    they say of other settings stands, too. On `local[...]` everything stays on loopback. Elsewhere our code is shipped
    to the executors.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", _QUICK_JVM)  # of a JVM that we start; what spark-defaults.conf says wins
    # The process that plans a Python data source is started by the JVM and must find our modules too.
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if _is_here(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    asked = {key.replace("__", "."): value for key, value in config.items()}
    if master is not None:
        asked["spark.master"] = master
    conf = _submitted(asked)
    for key, value in _defaults(conf.get("spark.master")).items():
        conf.setIfMissing(key, value)
    conf.setAll([*asked.items(), ("spark.app.name", name)])
    spark: SparkSession = SparkSession.builder.config(conf=conf).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if _is_submitted() or not str(spark.sparkContext.master).startswith("local"):
        _ship(spark)
    _register(spark)
    return spark


def _submitted(asked: dict[str, str]) -> SparkConf:
    """Return what spark-submit, spark-defaults.conf and `asked` say. Only the JVM knows it, so it is started here."""
    # A JVM that is started for Python takes it for a shell, and draws bars.
    launched = {"spark.ui.showConsoleProgress": "false"} | asked
    SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(launched.items())))
    return SparkConf()


def _is_submitted() -> bool:
    """Return whether spark-submit started us: then its JVM was there before, and does not have our PYTHONPATH."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def _is_here(master: str | None) -> bool:
    return master is not None and (master.startswith("local") or "127.0.0.1" in master or "localhost" in master)


def _defaults(master: str | None) -> dict[str, str]:
    is_local = master is None or master.startswith("local")
    settings = {
        "spark.master": "local[*]",
        "spark.ui.enabled": "false",
        # What is shuffled is a few rows per piece, not the log; more partitions would only cost time to start them.
        "spark.sql.shuffle.partitions": "4" if is_local else "16",
        "spark.sql.session.timeZone": "UTC",
        # A row may be the ids of a piece, so that thousands of them are no batch for a worker.
        "spark.sql.execution.arrow.maxBytesPerBatch": "32m",
        "spark.executor.extraJavaOptions": _QUICK_JVM,
        # Between the JVM and its Python workers; measured: 290 MB/s per core instead of 240 over loopback TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if is_local or _is_here(master):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return settings


def register(spark: SparkSession) -> None:
    """Let a session read logs: `spark.read.format("qmq")` and `spark.readStream.format("qmq")`, as often as you like.

    The session is one of your own, also of Spark Connect. Our code is sent to its executors.
    """
    _ship(spark)
    _register(spark)


def _register(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(LogSource)


def _ship(spark: SparkSession) -> None:
    """Send our packages to every executor, as one archive that Python imports from."""
    folder = Path(tempfile.mkdtemp(prefix="qmq-audit-"))
    # The executors fetch it from there as they start, so it stays until this process ends.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = folder / "qmq-audit.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        # In a checkout `qmq/audit` is a link; `os.walk` is told to follow it, which `Path.rglob` does not.
        for folder_name, _, names in os.walk(_ROOT / "qmq", followlinks=True):
            for path in (Path(folder_name, name) for name in names if name.endswith(".py")):
                file.write(path, path.relative_to(_ROOT))
    if isinstance(spark, SparkSession):
        spark.sparkContext.addPyFile(str(archive))
    else:  # Spark Connect's, which has no SparkContext
        spark.addArtifacts(str(archive), pyfile=True)


def read_copy(spark: SparkSession, place: dict[str, str], **options: object) -> DataFrame:
    """Read one copy with the data source's options; `place` is `audit.copies.place_options`."""
    given = place | {key: str(value) for key, value in options.items()}
    return spark.read.format("qmq").options(**given).load()
