#!/usr/bin/env bash
# Set up a virtual environment with plain pip: deploy/venv.sh DIRECTORY [LOCK]
# LOCK is requirements.lock (everything, the default) or requirements-server.lock (brokers, metaservers and tools).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
lock=${2:-requirements.lock}

fits='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'
if [ ! -x "$venv/bin/python" ]; then
    chosen=
    for python in ${PYTHON:-} python3.13 python3.12 python3.11 python3; do
        if "$python" -c "$fits" >/dev/null 2>&1; then
            chosen=$python
            break
        fi
    done
    if [ -z "$chosen" ]; then
        echo "qmq needs Python 3.11 or newer with its venv module (Debian: apt-get install python3 python3-venv)." >&2
        echo "If it is installed under another name: make venv PYTHON=/path/to/python" >&2
        exit 1
    fi
    echo "setting up $venv with $("$chosen" --version); this happens once and takes a few minutes"
    "$chosen" -m venv "$venv"
fi
# An environment that was made by other means may have no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock"
# Editable, so that `git pull` is enough; without dependencies, because the lock file has named them all.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
