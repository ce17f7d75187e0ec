"""Core. Columns that the audit's tables take and give; what the words in them mean.

    findings   what string, copy string, offset long, end long, subject string, sequence long, id string, text string

`what` is an `audit.kinds.Kind`, `copy` is "master", "slave", or "both" where both copies are wrong alike. To what is
reported, `audit.naming` adds group, host, segment and epoch.
"""

from __future__ import annotations

from pyspark.sql.types import LongType, StringType, StructField, StructType

from qmq.ledger import ALIKE


def _struct(**fields: type[LongType] | type[StringType]) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in fields.items()])


FINDINGS = _struct(
    what=StringType,
    copy=StringType,
    offset=LongType,
    end=LongType,
    subject=StringType,
    sequence=LongType,
    id=StringType,
    text=StringType,
)
JOURNAL = _struct(subject=StringType, group=StringType, sequence=LongType, id=StringType, hash=StringType)

MASTER, SLAVE = "master", "slave"
COPIES = (MASTER, SLAVE)
BOTH = ALIKE
COPIES_MIN = 2
"""So many copies acknowledge (`min_copies`), if nobody says otherwise; of a group with more, others may be behind."""
