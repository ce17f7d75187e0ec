"""Core. Columns that the audit's rules take and give; what the words in them mean.

    facts      copy string, piece long, records long, messages long, bytes long, digest long, then FACT's fields.
               A row without `kind` is what Spark counted and hashed of a piece; the others are what `audit.rows` says.
    findings   what string, copy string, offset long, end long, subject string, sequence long, id string, text string

`what` is an `audit.kinds.Kind`, `copy` is "master", "slave", or "both" where both copies are wrong alike. To what is
reported, `audit.naming` adds group, host, segment and epoch.
"""

from __future__ import annotations

from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType


def _struct(**fields: type[LongType] | type[StringType] | type[BooleanType]) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in fields.items()])


FACT = _struct(
    kind=StringType, offset=LongType, end=LongType, subject=StringType, first=LongType, last=LongType,
    judged=BooleanType, text=StringType, value=LongType, header=StringType, body=StringType, chain=StringType,
    frames=LongType, total=LongType, size=LongType, what=StringType, id=StringType,
)  # fmt: skip
FINDINGS = _struct(
    what=StringType, copy=StringType, offset=LongType, end=LongType, subject=StringType, sequence=LongType,
    id=StringType, text=StringType,
)  # fmt: skip
JOURNAL = _struct(subject=StringType, group=StringType, sequence=LongType, id=StringType)

MASTER, SLAVE = "master", "slave"
COPIES = (MASTER, SLAVE)
BOTH = "both"
