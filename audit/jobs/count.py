"""Shell. Count the messages of a subject by a property, in this process: `qmq query` without SQL, Spark and Java.

python -m qmq.audit.jobs.count --source /data/b1 --subject order.changed --property carrier
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

import pyarrow.compute as pc

from qmq.access import find_token
from qmq.audit.copies import CannotRead
from qmq.audit.data_source import TableReader
from qmq.audit.jobs.query import Place, add_source_options, places_of
from qmq.errors import QmqError


def count_by(places: Sequence[Place], subject: str, name: str) -> Counter[str | None]:
    """Return the number of messages by value of a property; None for messages without it.

    Raises:
        CannotRead: a log cannot be read.
        CorruptFrame: a range is damaged, or a message does not decode.
    """
    counts: Counter[str | None] = Counter()
    for place in places:
        options = {**place, "rows": "messages", "subject": f"{subject}\n", "properties": f"{name}\n", "damage": "fail"}
        reader = TableReader(options, ["properties"])
        for part in reader.partitions():
            for batch in reader.read(part):
                values = pc.map_lookup(batch.column("properties"), name, "first")
                counts.update({row["values"]: row["counts"] for row in values.value_counts().to_pylist()})
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m qmq.audit.jobs.count",
        description="Count the messages of a subject by a property, without Spark and Java.",
    )
    add_source_options(parser, spark=False)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--property", required=True, help="name of the property")
    options = parser.parse_args(arguments)
    try:
        token = find_token(options.token, token_file=options.token_file)
        places = places_of(options.source, options.metaserver, token)
        counts = count_by(places, options.subject, options.property)
    except (CannotRead, OSError, QmqError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [{"value": value, "messages": number} for value, number in counts.most_common()]
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print("\t".join("" if value is None else str(value) for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
