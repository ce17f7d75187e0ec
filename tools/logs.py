"""Shell. Trail and FindMessage: jobs of the audit that read the logs with Spark, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from qmq.access import TOKEN_VARIABLE
from qmq.tools.answer import Exit
from qmq.tools.session import Session
from qmq.tools.terminal import complain

JOBS = {"Trail": "qmq.audit.jobs.trail", "FindMessage": "qmq.audit.jobs.find"}


def run(session: Session) -> Exit:
    if find_spec("pyspark") is None:
        complain("Spark is not installed here: pip install 'qmq[audit]'")
        return Exit.USAGE
    command = [sys.executable, "-m", JOBS[session.command.name], *arguments(session)]
    environment = os.environ | ({TOKEN_VARIABLE: session.token} if session.token else {})
    ended = subprocess.run(command, env=environment, check=False).returncode
    return Exit.DONE if ended == 0 else Exit.UNREACHABLE


def arguments(session: Session) -> Iterator[str]:
    """Yield what the job is told; the token is not among it, as the process list shows that."""
    values = {name: value for name, value in session.values.items() if value}
    if "source" not in values and session.metaserver is not None:
        yield f"--metaserver={session.metaserver.url}"
    for source in values.pop("source", "").split(","):
        if source:
            yield f"--source={source}"
    for name, value in json.loads(values.pop("property", "{}")).items():
        yield f"--property={name}={value}"
    for tag in values.pop("tag", "").split(","):
        if tag:
            yield f"--tag={tag}"
    for name, value in values.items():
        yield f"--{'spark-master' if name == 'sparkMaster' else name}={value}"
    if session.as_json:
        yield "--json"
