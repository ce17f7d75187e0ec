#!/usr/bin/env bash
# Operators' commands: tools.sh <Command> --option=value …   (tools.sh --help lists them)
# Runs on $QMQ_PYTHON, else on the checkout's .venv, else on python3.
set -euo pipefail

root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)"
python="${QMQ_PYTHON:-}"
if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "tools.sh: $python is no Python 3.11 or newer; set QMQ_PYTHON to one" >&2
    exit 2
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m qmq.tools "$@"
