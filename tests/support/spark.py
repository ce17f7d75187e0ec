"""Shell. Spark for tests of the audit: small logs, of which each run is planned anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from qmq.audit.spark import start_spark


@contextmanager
def local_spark(name: str) -> Iterator[SparkSession]:
    """Run Spark on two threads of this machine.

    A few hundred rows pay neither for compiled plans nor for plans that are made again while they run: with them, three
    audits took 110 s of processor time instead of 30. The demo and the test on a cluster run with Spark's defaults.
    """
    session = start_spark(
        "local[2]", name, spark__sql__shuffle__partitions="2", spark__sql__adaptive__enabled="false",
        spark__sql__codegen__wholeStage="false", spark__driver__extraJavaOptions="-XX:TieredStopAtLevel=1",
    )  # fmt: skip
    try:
        yield session
    finally:
        session.stop()
