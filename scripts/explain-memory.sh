#!/usr/bin/env bash
# Shows where the memory of idle VMs goes: starts COUNT VMs of an image, and prints `mem` of each and the pages of all together when
# the sum has settled; here where KVM runs guests, in a lab host of 4 GiB elsewhere. With `scan` it starts the host's scanner (KSM).
# Usage: scripts/explain-memory.sh MIRRORBALL [IMAGE [COUNT [MEMORY [SHARE]]]]
set -euo pipefail
mirrorball=$(realpath "$1") image=${2:-tiny} count=${3:-1} memory=${4:-256M} share=${5:-adaptive}
if [[ -z ${MIRRORBALL_IN_LAB:-} ]] && ! "$mirrorball" probe >/dev/null 2>&1; then
    "$mirrorball" image build "$image" --if-missing
    shape=$(mktemp)
    trap 'rm -f "$shape"' EXIT
    printf '[[hosts]]\nname = "host"\nmemory = "4G"\n' >"$shape"
    "$mirrorball" lab run "$shape" -- env TMPDIR=/run XDG_RUNTIME_DIR=/run "$(realpath "$0")" "$mirrorball" "$image" "$count" "$memory" "$share"
    exit
fi
host=$(mktemp)
vms=()
end() {
    for vm in "${vms[@]}"; do "$mirrorball" kill "$vm" >/dev/null || true; done
    rm -f "$host"
}
trap end EXIT
echo 'share_between = "all"' >"$host"
if [[ $share == scan ]]; then
    echo 2000 >/sys/kernel/mm/ksm/pages_to_scan
    echo 1 >/sys/kernel/mm/ksm/run
fi
for number in $(seq "$count"); do
    vms+=("idle-$number")
    MIRRORBALL_HOST_FILE=$host "$mirrorball" run -d --image "$image" --memory "$memory" --share "$share" --name "idle-$number"
    # A start at a time: the host's CPUs are few.
    for _ in $(seq 120); do
        "$mirrorball" exec "idle-$number" -- true >/dev/null 2>&1 && break
        sleep 1
    done
done
# The background and the scanner share pages for some time.
total() { "$mirrorball" mem | awk '$1 == "total" { print int($4) }'; }
last=-1
for _ in $(seq 60); do
    now=$(total)
    [[ $now == "$last" ]] && break
    last=$now
    sleep 10
done
echo "== $count x $image, $memory, share = \"$share\", $("$mirrorball" --version), $(date -u +%F)"
"$mirrorball" mem
"$mirrorball" mem "${vms[@]}" --explain
