"""Shell. Start Spark so that the audit runs on it: locally, or on a cluster that has pyarrow and not our code."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import qmq
from qmq.audit.source import LogSource

_ROOT = Path(qmq.__file__).resolve().parents[1]


def start_spark(master: str, name: str, **config: str) -> SparkSession:
    """Return a session with the data source `qmq` registered; `config` has dots written as double underscores.

    On `local[...]` everything stays on loopback. Elsewhere Spark's own settings (spark-submit, spark-defaults.conf)
    decide what they name; our code is shipped to the executors.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # The process that plans a Python data source is started by the JVM and must find our modules too.
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # What is shuffled is a few rows per piece, not the log; more partitions would only cost time to start them.
        "spark.sql.shuffle.partitions": "4" if master.startswith("local") else "16",
        "spark.sql.session.timeZone": "UTC",
        # Between the JVM and its Python workers; measured: 290 MB/s per core instead of 240 over loopback TCP.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if master.startswith("local") or "127.0.0.1" in master or "localhost" in master:
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings |= {key.replace("__", "."): value for key, value in config.items()}
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if not master.startswith("local"):
        _ship(spark)
    spark.dataSource.register(LogSource)
    return spark


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
    spark.sparkContext.addPyFile(str(archive))


def read_copy(spark: SparkSession, place: dict[str, str], **options: object) -> DataFrame:
    """Read one copy with the data source's options; `place` is `audit.copies.place_options`."""
    given = place | {key: str(value) for key, value in options.items()}
    return spark.read.format("qmq").options(**given).load()
