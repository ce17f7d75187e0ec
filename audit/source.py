"""Shell. The Spark data source `qmq`: message logs as tables, from data directories or running brokers.

    qmq.audit.register(spark)
    spark.read.format("qmq").option("path", "/data/b1").load()

    option             meaning
    path               data directory; every executor must see it
    broker, token      "ip:control_port" of a running broker and an API token; no shared disk is needed
    metaserver, token  all broker groups that it knows; of each, the slave's copy if it answers, else the master's
    rows               "messages" (default), "frames" or "progress" (audit.tables)
    columns            names with commas, all by default; of messages, properties are decoded only if they are named
    subject            only frames of these subjects, names with commas
    since, until       only frames that were stored in `[since, until)`: 2026-01-31T12:00:00Z, or ms since 1970
    contains           only frames of messages in which these texts, in lines, stand as id, tag, or part of a property
    damage             "rows" (default): a range that does not parse is a row whose `problem` says why, and the read
                       goes on behind it; "fail": then the query fails
    begin, end         offsets, half-open; by default the whole log
    ranges             "begin-end,begin-end" instead: only these
    piece_bytes        bytes of log per task (default 64 MiB), on a grid that is the same for both copies

`spark.readStream.format("qmq")` takes the same options but `begin`, `end` and `ranges`.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from qmq.audit.table import TableReader, TableStream
from qmq.audit.tables import SCHEMAS


class LogSource(DataSource):
    """What `spark.read.format("qmq")` makes. See the module's text for the options."""

    @classmethod
    def name(cls) -> str:
        return "qmq"

    def schema(self) -> StructType:
        kind = self.options.get("rows", "messages")
        if kind not in SCHEMAS:
            raise ValueError(f"option 'rows' is {kind!r}, not one of {', '.join(SCHEMAS)}")
        schema: pa.Schema = SCHEMAS[kind]
        names = [name.strip() for name in self.options.get("columns", "").split(",") if name.strip()]
        if unknown := [name for name in names if name not in schema.names]:
            raise ValueError(f"option 'columns' names {', '.join(unknown)}; {kind} have {', '.join(schema.names)}")
        return from_arrow_schema(pa.schema([schema.field(name) for name in names or schema.names]))

    def reader(self, schema: StructType) -> DataSourceReader:
        return TableReader(dict(self.options), schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return TableStream(dict(self.options), schema.fieldNames())
