#!/usr/bin/env bash
# Measures a VM of four vCPUs in one shard with the kernel's interrupt chip, in one with our interrupt controllers, and in two:
# here where KVM runs guests, in a lab host of two nodes elsewhere. Usage: scripts/bench-span.sh MIRRORBALL [RUNS]
set -euo pipefail
mirrorball=$(realpath "$1") runs=${2:-3}
here=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing
"$here/scripts/fetch-source.sh" bzip2 "$cache/bzip2.tar"
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
work=$(mktemp -d)
folder=/dev/shm/bench-span-$$
clean() {
    # Here, if it was interrupted. What is left in a lab host is gone with it.
    if [ -d "$folder" ]; then
        MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" kill bench-span 2>/dev/null || true
        MIRRORBALL_RUNTIME=$folder/run timeout 60 "$mirrorball" cluster down 2>/dev/null || true
    fi
    rm -rf "$work" "$folder"
}
trap clean EXIT
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    half=$(($(nproc) > 1 ? $(nproc) / 2 : 1))
    for _ in 0 1; do printf '[[hosts.nodes]]\ncpus = %s\nmemory = "2G"\n' $half; done >"$work/nodes"
    { printf '[[hosts]]\nname = "host"\n' && cat "$work/nodes"; } >"$work/lab.toml"
    machine="lab host of two nodes with $half CPUs each (QEMU software emulation, Debian 6.1 kernel) on $machine"
    inside=("$mirrorball" lab run "$work/lab.toml" --limit 7200 --)
fi
echo "bench: VMs in one shard and in two; about ten minutes for each of $runs runs on 2 CPUs without usable KVM"
mkdir -p "$here/bench/results"
"${inside[@]}" "$(dirname "$mirrorball")/bench-span" --mirrorball "$mirrorball" --source "$cache/bzip2.tar" --folder "$folder" \
    --runs "$runs" --out "$here/bench/results/span.json" --machine "$machine"
"$here/scripts/stamp.sh" "$here/bench/results/span.json"
