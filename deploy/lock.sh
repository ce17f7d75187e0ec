#!/usr/bin/env bash
# Pin every dependency of every extra, with hashes, for Python 3.11 and newer on Linux: deploy/lock.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-.venv}/bin/uv
if [ ! -x "$uv" ]; then
    echo "no $uv yet: run 'make venv' first" >&2
    exit 1
fi
"$uv" pip compile pyproject.toml --all-extras --universal --python-version 3.11 --upgrade --quiet \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
    --output-file requirements.lock
sed -i '1i # Made by `make lock` from pyproject.toml. Do not edit.' requirements.lock
if grep -nE '://|--(index|extra-index|find-links|trusted)' requirements.lock; then
    echo "requirements.lock names a host" >&2
    exit 1
fi
