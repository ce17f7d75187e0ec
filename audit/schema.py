"""Core. Columns that the audit's rules take and give; what the words in them mean.

    facts      copy string, piece long, records long, messages long, bytes long, digest long, then FACT's fields.
               A row without `kind` is what Spark counted and hashed of a piece; the others are what `audit.rows` says.
    findings   what string, copy string, offset long, end long, subject string, sequence long, id string, text string

    what            means
    damaged         bytes that are no frame, or a frame whose body does not match its CRC
    chain           a frame does not continue the history before it
    sequence        a subject's sequences have a gap, or come twice or in another order
    epoch           an older epoch after a newer one
    progress        a pull, ack or position that does not follow from the log
    early           a delayed message that was planned before it was due, by its master's clock
    twice           a delayed message that broker groups stored in more than one batch
    recalled        a delayed message that was planned after it was cancelled or rescheduled
    missing, extra  a frame that only the master has, only the slave has
    different       a frame that differs
    reordered       the same messages at another offset
    history         equal frames behind a difference: only their chain differs
    unread          bytes below the high watermark that a copy did not give, without a word of damage
    lost            acknowledged to a producer and not in the log
    count           Spark saw another number of messages than the frames' headers promise
"""

from __future__ import annotations

from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType


def _struct(**fields: type[LongType] | type[StringType] | type[BooleanType]) -> StructType:
    return StructType([StructField(name, kind()) for name, kind in fields.items()])


FACT = _struct(
    kind=StringType, offset=LongType, end=LongType, subject=StringType, first=LongType, last=LongType,
    judged=BooleanType, text=StringType, value=LongType, header=StringType, body=StringType, chain=StringType,
    frames=LongType, total=LongType, size=LongType,
)  # fmt: skip
FINDINGS = _struct(
    what=StringType, copy=StringType, offset=LongType, end=LongType, subject=StringType, sequence=LongType,
    id=StringType, text=StringType,
)  # fmt: skip
JOURNAL = _struct(subject=StringType, group=StringType, sequence=LongType, id=StringType)

MASTER, SLAVE = "master", "slave"
COPIES = (MASTER, SLAVE)
