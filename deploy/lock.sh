#!/usr/bin/env bash
# Pin every dependency, with hashes, for Python 3.11 and newer on Linux: deploy/lock.sh VENV
# requirements.lock has the dependencies of every extra; requirements-server.lock has those of a server, in the same versions.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-.venv}/bin/uv
if [ ! -x "$uv" ]; then
    echo "no $uv yet: run 'make venv' first" >&2
    exit 1
fi
compile() {
    "$uv" pip compile pyproject.toml "$@" --universal --python-version 3.11 --quiet \
        --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate
}
compile --all-extras --upgrade --output-file requirements.lock
# With the build tool of qmq itself: the environment is made from the lock file alone.
echo 'setuptools>=77' | compile - --extra server --extra console-oidc --extra mariadb --extra postgresql --extra tools \
    --constraint requirements.lock --output-file requirements-server.lock
sed -i '1i # Made by `make lock` from pyproject.toml. Do not edit.' requirements.lock requirements-server.lock
if grep -nE '://|--(index|extra-index|find-links|trusted)' requirements.lock requirements-server.lock; then
    echo "a lock file names a host" >&2
    exit 1
fi
