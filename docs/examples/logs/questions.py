# %% [markdown] # Questions to the logs
#
# A notebook in cells, for jupytext, VS Code and PyCharm. It needs `pip install 'qmq[audit]'` and either a broker's data
# directory, `QMQ_LOG=/data/b1`, or a metaserver, `QMQ_METASERVER=http://127.0.0.1:8080` and `QMQ_TOKEN`. A test runs
# every cell.

# %%
import os
import sys

from pyspark.sql import SparkSession

import qmq.audit

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # workers run the Python of this notebook
spark = SparkSession.builder.getOrCreate()
qmq.audit.register(spark)

if "QMQ_LOG" in os.environ:
    where = {"path": os.environ["QMQ_LOG"]}
else:
    where = {"metaserver": os.environ["QMQ_METASERVER"], "token": os.environ["QMQ_TOKEN"]}


def view(name: str, **options: str) -> None:
    """Create a view of a table. Queries of a damaged range fail, because they would return part of the answer."""
    spark.read.format("qmq").options(**where, rows=name, damage="fail", **options).load().createOrReplaceTempView(name)


view("messages")
view("progress")

# %% [markdown] Size and age of each subject. The query needs headers only: naming the columns avoids decoding messages.

# %%
stored = spark.read.format("qmq").options(**where, columns="subject,sequence,stored_at").load()
stored.createOrReplaceTempView("stored")
per_subject = spark.sql("""
    SELECT subject, count(*) AS messages, min(stored_at) AS since
    FROM stored GROUP BY subject ORDER BY messages DESC
""")
per_subject.show(truncate=False)

# %% [markdown] Messages of one order. The options make the reader skip other frames; the WHERE is exact.

# %%
orders = spark.read.format("qmq").options(**where, subject="order.changed", contains="orderNo\n42").load()
orders.createOrReplaceTempView("orders")
order = spark.sql("""
    SELECT stored_at, sequence, id, properties
    FROM orders WHERE properties['orderNo'] = '42' ORDER BY offset, sequence
""")
order.show(truncate=False)

# %% [markdown] Time between delivery and ack. A pull delivers `messages` with pull sequences that begin at `pull`; an
# ack lists such sequences.

# %%
waited = spark.sql("""
    SELECT d.consumer_group, count(*) AS acks,
           percentile(unix_millis(a.stored_at) - unix_millis(d.stored_at), 0.99) AS p99_ms
    FROM progress a JOIN progress d
      ON a.event = 'ack' AND d.event = 'pull' AND a.broker_group = d.broker_group AND a.subject = d.subject
     AND a.consumer_group = d.consumer_group AND a.consumer = d.consumer
     AND a.pull >= d.pull AND a.pull < d.pull + d.messages
    GROUP BY d.consumer_group
""")
waited.show()

# %% [markdown] Dead letters and their reasons.

# %%
dead = spark.sql("""
    SELECT subject, properties['qmq_deadReason'] AS reason, count(*) AS messages
    FROM messages WHERE subject LIKE '\\%DEAD_RETRY\\%%' GROUP BY ALL ORDER BY messages DESC
""")
dead.show(truncate=False)
