#!/usr/bin/env bash
# Programs that the tests need outside Python: Java for Spark, and servers that they start themselves, each on a free port.
# As root or with sudo this script installs the missing ones from Debian's packages; else it prints the command.
set -euo pipefail

packages=()
java_version=$(java -version 2>&1 | sed -nE '1s/.*version "([0-9]+).*/\1/p' || true)
[ "${java_version:-0}" -ge 17 ] || packages+=(openjdk-17-jre-headless)
command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || packages+=(mariadb-server)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || packages+=(postgresql)
command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || packages+=(pgbouncer)
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || packages+=(nginx)
command -v redis-server >/dev/null || packages+=(redis-server)
command -v chromium >/dev/null || packages+=(chromium)
command -v promtool >/dev/null || packages+=(prometheus)
command -v nft >/dev/null || [ -x /usr/sbin/nft ] || packages+=(nftables)
compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || packages+=(faketime)
command -v zsh >/dev/null || packages+=(zsh)
command -v curl >/dev/null || packages+=(curl) # docs/install.md uses it, and a test runs those commands
command -v node >/dev/null || packages+=(nodejs) # runs the JavaScript example of docs/gateway.md
[ ${#packages[@]} -gt 0 ] || exit 0

install="apt-get install -y --no-install-recommends ${packages[*]}"
as_root=()
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "the tests need more programs; type this once:  sudo apt-get update && sudo $install" >&2
        exit 1
    fi
    as_root=(sudo -n)
fi
echo "$install"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive $install -qq >/dev/null
