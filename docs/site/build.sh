#!/usr/bin/env bash
# Build the documentation as pages: docs/site/build.sh VENV
# The script that draws diagrams comes from npm's registry, once; without npm the pages show diagrams as text.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$(realpath "${1:-.venv}")
version=11.17.2
sum=581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8
script=.run/mermaid/mermaid.min.js
if [ ! -f "$script" ] && command -v npm >/dev/null; then
    folder=$(mktemp -d)
    if (cd "$folder" && npm pack --silent "mermaid@$version" >/dev/null); then
        tar xzf "$folder/mermaid-$version.tgz" -C "$folder" package/dist/mermaid.min.js
        echo "$sum  $folder/package/dist/mermaid.min.js" | sha256sum --check --quiet
        mkdir -p "$(dirname "$script")"
        mv "$folder/package/dist/mermaid.min.js" "$script"
    fi
    rm -r "$folder"
fi
[ -f "$script" ] || echo "diagrams are shown as text: $script is missing, and npm cannot fetch it" >&2
cd docs/site # beside the repository's folder `watchdog`, mkdocs would import that one
# Not --quiet: warnings that are not logged do not fail the build.
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --config-file mkdocs.yml 2>&1 | { grep -vE '^INFO' || true; }
