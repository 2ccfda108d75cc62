#!/usr/bin/env bash
# Measures what 1, 2, 4 and 8 guests that read the same disk take of the host's memory, and how fast one reads it, beside
# QEMU; what clones take; and what eight compilations take in 1, 2, 4 and 8 VMs: here where KVM runs guests, in a lab host of 4 GiB elsewhere.
# Usage: scripts/bench-sharing.sh MIRRORBALL [memory|speed|clones|builds|all [KINDS [COUNTS [RUNS]]]]
set -euo pipefail
mirrorball=$(realpath "$1") part=${2:-all} counts=${4:-1,2,4,8} runs=${5:-}
here=$(cd "$(dirname "$0")/.." && pwd)
bench=$(dirname "$mirrorball")/bench-sharing
data=${MIRRORBALL_DATA:-${XDG_DATA_HOME:-$HOME/.local/share}/mirrorball}
"$mirrorball" image build tiny --if-missing
work=$(mktemp -d "${XDG_CACHE_HOME:-$HOME/.cache}/bench-sharing.XXXXXX")
trap 'rm -rf "$work"' EXIT
"$bench" stage "$work" --kernel "$data/images/tiny/vmlinux" --initrd "$data/images/tiny/initrd"
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    machine="lab host of 4 GiB (QEMU software emulation, Debian 6.1 kernel) on $machine"
    printf '[[hosts]]\nname = "host"\nmemory = "4G"\n' >"$work/lab.toml"
    inside=("$mirrorball" lab run "$work/lab.toml" --)
fi
# The lab caches the files below the data directory as a host caches its disk's.
store=$work
run() {
    local task=$1 kinds=$2 runs=$3 out=$here/bench/results/$4.json
    MIRRORBALL_DATA=$store "${inside[@]}" "$bench" "$task" "$work" --mirrorball "$mirrorball" --kinds "$kinds" --counts "$counts" --runs "$runs" \
        --out "$out" --machine "$machine"
    "$here/scripts/stamp.sh" "$out"
}
if [[ $part == memory || $part == all ]]; then
    echo "bench: memory of guests that share a disk; about a minute for each kind and number on 2 CPUs without usable KVM"
    run measure "${3:-adaptive,deferred,at-read,never,mirrorball-pmem,mirrorball-clones,qemu-blk,qemu-ksm,qemu-pmem}" \
        "${runs:-1}" sharing
fi
if [[ $part == speed || $part == all ]]; then
    echo "bench: how fast a guest reads; about ten seconds for each kind and run on 2 CPUs without usable KVM"
    run speed "${3:-never,deferred,adaptive,at-read,mirrorball-huge,qemu-cached}" "${runs:-5}" sharing-speed
fi
if [[ $part == clones || $part == builds || $part == all ]]; then
    "$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing
    store=$data
fi
if [[ $part == clones || $part == all ]]; then
    echo "bench: clones; about a minute for each number on 2 CPUs without usable KVM"
    counts=${4:-1,10,50} run clones adaptive "${runs:-1}" sharing-clones
fi
if [[ $part == builds || $part == all ]]; then
    echo "bench: eight compilations at once; about three minutes for each policy and number on 2 CPUs without usable KVM"
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball
    "$here/scripts/fetch-source.sh" bzip2 "$cache/bzip2.tar"
    ln -s "$cache/bzip2.tar" "$data/images/debian-12/root.raw" "$work"
    run builds "${3:-adaptive,never}" "${runs:-1}" sharing-builds
fi
