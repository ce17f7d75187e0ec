#!/bin/sh
# Store a message and handle it, with curl alone. GATEWAY, for instance http://127.0.0.1:8070, and TOKEN are set.
set -eu

call() {
    path=$1
    shift
    curl --silent --show-error --fail-with-body -H "Authorization: Bearer $TOKEN" "$@" "$GATEWAY/v1/subjects/order.paid$path"
}

# A key of its own per message: repeated with it, the request stores nothing twice, whatever became of the first answer.
key=$(cat /proc/sys/kernel/random/uuid)
call /messages -H "Idempotency-Key: $key" --retry 5 --retry-all-errors \
    --json '{"properties": {"orderNo": "17", "cents": 4200}, "tags": ["paid"]}'
echo

while :; do
    pulled=$(call '/groups/billing/pull?start=earliest&client=curl&max=1&wait_s=20' -X POST)
    handle=$(echo "$pulled" | sed -n 's/.*"handle":"\([^"]*\)".*/\1/p')
    [ -n "$handle" ] || continue
    echo "$pulled"
    # Here comes the work. Then:
    call '/groups/billing/ack?client=curl' --json "{\"handles\": [\"$handle\"]}"
    echo
    break
done
