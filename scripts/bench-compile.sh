#!/usr/bin/env bash
# Records what a build waits for in a VM over several nodes, each with a copy of the memory, for `make bench-model`: here where KVM runs guests, in a lab host with a CPU for each node elsewhere.
# Usage: scripts/bench-compile.sh FOLDER [NODES ...], with what cargo built in FOLDER; 2 nodes if none are named. Four in a lab on two
# CPUs did not end their first build in 20 minutes.
set -euo pipefail
built=$(realpath "$1")
shift
counts=${*:-2}
mirrorball=$built/mirrorball
here=$(cd "$(dirname "$0")/.." && pwd)
results=$here/bench/results
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball
vm=bench-compile lab=bench-compile
# The lab's host sees this directory at the same place.
shared=$cache/bench-compile
machine="$(nproc) CPUs, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r)"
grep -q '^flags.* hypervisor' /proc/cpuinfo && machine="virtual machine with $machine"
flags='-O2 -D_FILE_OFFSET_BITS=64'

fail() { echo "bench: $*" >&2; exit 1; }
now() { date +%s.%N; }
since() { echo "$1 $(now)" | awk '{ printf "%.2f", $2 - $1 }'; }

"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing
timeout -k 5 300 "$here/scripts/fetch-source.sh" bzip2 "$cache/bzip2.tar"
mkdir -p "$shared" "$results"
cp "$mirrorball" "$shared/mirrorball"
for beside in mirrorball-shard mirrorball-keeper; do
    cp "$(dirname "$mirrorball")/$beside" "$shared/$beside"
done
work=$(mktemp -d)
inside=()
if ! "$mirrorball" probe >/dev/null 2>&1; then
    inside=("$mirrorball" lab exec --lab "$lab" host --)
    where=", its guests in a lab host (QEMU's emulation)"
fi
# LIMIT in seconds, and what `mirrorball` is told there.
on() {
    timeout --foreground -k 5 "$1" ${inside[@]+"${inside[@]}"} env "MIRRORBALL_RUNTIME=/run/bench-compile" "$shared/mirrorball" "${@:2}" </dev/null
}
in_guest() {
    for _ in 1 2 3; do
        on "$1" exec "$vm" -T -- /bin/sh -c "$2" 2>"$work/said" && return
        grep -q 'no agent answers' "$work/said" || break
    done
    fail "in the guest: $(tail -n 1 "$work/said")"
}

up=''
clean() {
    if [[ $up ]]; then
        on 60 kill "$vm" >/dev/null 2>&1 || true
        on 60 cluster down >/dev/null 2>&1 || true
        if [[ ${inside[*]-} ]]; then timeout -k 5 60 "$mirrorball" lab down --name "$lab" >/dev/null 2>&1; fi
    fi
    up=''
}
trap 'status=$?; set +e; clean; rm -rf "$work"; exit $status' EXIT

# What it takes without waits, on CPUs of this machine and in no VM: the fastest of five.
mkdir "$work/alone"
tar xf "$cache/bzip2.tar" -C "$work/alone" --strip-components=1
natively() {
    for _ in 1 2 3 4 5; do
        make -s -C "$work/alone" clean >/dev/null 2>&1
        start=$(now)
        taskset -c "$1" make -s -j "$2" -C "$work/alone" CFLAGS="$flags" bzip2 >/dev/null 2>&1 || fail "bzip2 does not build here"
        since "$start"
        echo
    done | sort -n | head -n 1
}
(($(nproc) > 1)) || fail "two CPUs are needed, to see what part of the build they do together"
alone=$(natively 0 1) both=$(natively 0,1 2)
parallel=$(echo "$alone $both" | awk '{
    part = 2 * (1 - $2 / $1)
    if (part < 0) part = 0
    if (part > 1) part = 1
    printf "%.2f", part
}')
echo "bench: bzip2 is built in $alone s by one CPU of this machine, and in $both s by two: they do $parallel of it together"

build="cd /dev/shm/b && make -s clean >/dev/null 2>&1; make -s CFLAGS='$flags' bzip2 >log 2>&1 || { tail log >&2; exit 1; }"
record() {
    local nodes=$1 start boot seconds
    echo "bench: a VM over $nodes nodes, each with a copy of the memory"
    up=yes
    if [[ ${inside[*]-} ]]; then
        { printf '[[hosts]]\nname = "host"\n' && for ((node = 0; node < nodes; node++)); do
            printf '[[hosts.nodes]]\ncpus = 1\nmemory = "1536M"\n'
        done; } >"$shared/lab.toml"
        timeout -k 5 300 "$mirrorball" lab up --name "$lab" "$shared/lab.toml"
    fi
    on 120 cluster up --lab never --cells "$nodes" >/dev/null
    start=$(now)
    on 240 run --lab never -d --name "$vm" --image debian-12 --cpus "$nodes" --memory 640M --net none --disk "$cache/bzip2.tar" \
        --span "$(seq -s, 0 $((nodes - 1)))" --span-memory coherent >/dev/null
    until on 120 exec "$vm" -T -- nproc 2>"$work/said" | grep -qx "$nodes"; do
        (($(date +%s) - ${start%.*} < 600)) || fail "$nodes CPUs are not online after 600 s: $(tail -n 1 "$work/said")"
        sleep 2
    done
    boot=$(since "$start")
    in_guest 240 'mkdir /dev/shm/b && tar xf /dev/vdb -C /dev/shm/b --strip-components=1'
    echo "bench: $nodes CPUs are online after $boot s; it builds once, by as many processes as there are CPUs, and then what counts"
    in_guest 1200 "${build/-s CFLAGS/-s -j$nodes CFLAGS}"
    on 120 heat "$vm" --json >"$work/before"
    start=$(now)
    in_guest 1200 "${build/-s CFLAGS/-s -j$nodes CFLAGS}"
    seconds=$(since "$start")
    on 120 heat "$vm" --json >"$work/after"
    in_guest 240 'cd /dev/shm/b && ./bzip2 -1 <sample1.ref | cmp - sample1.bz2 && ./bzip2 -d <sample2.bz2 | cmp - sample2.ref'
    printf '{"nodes": %s, "cpus": 1, "boot_s": %s, "seconds": %s, "before":\n' "$nodes" "$boot" "$seconds"  >"$work/build-$nodes"
    { cat "$work/before" && echo ', "after":' && cat "$work/after" && echo '}'; } >>"$work/build-$nodes"
    echo "bench: built in $seconds s, and what it built works"
    clean
}
for nodes in $counts; do record "$nodes"; done
{
    printf '{"machine": "%s", "load": %s, "alone_s": %s, "parallel": %s, "builds": [\n' \
        "$machine${where-}" "$(cut -d' ' -f1 /proc/loadavg)" "$alone" "$parallel"
    first=yes
    for nodes in $counts; do
        [[ $first ]] || echo ,
        first=''
        cat "$work/build-$nodes"
    done
    echo ']}'
} >"$work/whole"
"$here/scripts/stamp.sh" "$work/whole"
mv "$work/whole" "$results/dsm-compile.json"
