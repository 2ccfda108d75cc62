#!/usr/bin/env bash
# One unmodified Debian VM over two cells of this host: its nodes, a build, and a vCPU that moves to the other cell meanwhile.
# Usage: scripts/demo-span.sh MIRRORBALL
set -euo pipefail
mirrorball=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball
here=$(cd "$(dirname "$0")/.." && pwd)
image=debian-12-numactl vm=demo-span

# A step: LIMIT in seconds, then what `mirrorball` is told.
step() { timeout --foreground -k 5 "$1" "$mirrorball" "${@:2}" </dev/null; }
in_guest() { step "$1" exec "$vm" -T -- /bin/sh -c "$2"; }
# Without KVM the lab will do: what runs here is this demo's own. `auto` refuses it to root.
"$mirrorball" probe >/dev/null && lab=auto || lab=always
fail() { echo "demo: $*" >&2; exit 1; }
now() { date +%s.%N; }
since() { echo "$1 $(now)" | awk '{ printf "%.1f", $2 - $1 }'; }
# The cells of vCPU 0, 1, ...
where() {
    local cells
    cells=$(step 30 inspect "$vm" | tr -d ' \n' | sed -n 's/.*"vcpus":\[\([0-9,]*\)\].*/\1/p')
    [[ $cells ]] || fail "mirrorball inspect $vm does not tell where the vCPUs are"
    echo "vCPUs 0 to 3 are in cells ${cells//,/, }"
}

echo "demo: the image $image: Debian 12 with gcc, make and numactl (built once, in about a minute)"
step 900 image build debian-12 --packages gcc,libc6-dev,make,numactl --name "$image" --if-missing
timeout -k 5 300 "$here/scripts/fetch-source.sh" bzip2 "$cache/bzip2.tar"

started='' cluster='' build='' log=$(mktemp)
clean() {
    [[ $build ]] && kill "$build" 2>/dev/null
    [[ $started ]] && step 30 kill "$vm" 2>/dev/null
    # Gone already if the lab died.
    [[ $cluster ]] && step 30 cluster down >/dev/null 2>&1
    rm -f "$log"
}
trap 'status=$?; set +e; clean; exit $status' EXIT
if cells=$(step 60 cluster status --json 2>/dev/null); then
    [[ $(tr -d ' \n' <<<"$cells" | grep -o '"number":[01],' | sort -u | wc -l) == 2 ]] ||
        fail "a cluster without two cells is up; end it with \`mirrorball cluster down\`"
else
    echo "demo: this host becomes a cluster of two cells"
    cluster=up
    step 120 cluster up --lab $lab --cells 2
fi

echo "demo: one VM boots across both"
start=$(now)
step 120 run --lab $lab -d --name "$vm" --image "$image" --cpus 4 --memory 1G --net none --span 0,1 --disk "$cache/bzip2.tar" >/dev/null
started=yes
until in_guest 60 true 2>"$log"; do
    (($(date +%s) - ${start%.*} < 240)) || fail "no agent answers after 240 s: $(tail -n 1 "$log")"
    sleep 1
done
boot=$(since "$start")
echo "demo: $ numactl -H"
in_guest 60 'numactl -H' | sed 's/^/  | /'
echo "demo: $ nproc"
in_guest 60 nproc | sed 's/^/  | /'
where

echo "demo: it compiles bzip2 from Debian's source (make -j4), and vCPU 3 moves to cell 0 and back meanwhile"
in_guest 60 'mkdir /dev/shm/b && tar xf /dev/vdb -C /dev/shm/b --strip-components=1'
start=$(now)
in_guest 400 'cd /dev/shm/b && make -s -j4 CFLAGS="-O2 -D_FILE_OFFSET_BITS=64" bzip2 >log 2>&1 || { tail log; exit 1; }' &
build=$!
for ((try = 0; try < 50; try++)); do in_guest 60 'test -e /dev/shm/b/log' && break; done
for cell in 0 1; do
    step 60 move "$vm" --vcpu 3 --cell "$cell"
    running=$(kill -0 "$build" 2>/dev/null && echo "it still compiles" || echo "it has compiled by now")
    echo "$(where); $running"
done
wait "$build" || fail "the build failed"
build='' seconds=$(since "$start")
in_guest 120 'cd /dev/shm/b && ./bzip2 -1 <sample1.ref | cmp - sample1.bz2 && ./bzip2 -d <sample2.bz2 | cmp - sample2.ref' ||
    fail "what it compiled does not work"
echo "demo: booted in $boot s; compiled $(in_guest 60 'cat /dev/shm/b/*.c | wc -l') lines of C in $seconds s, output compared"

echo "demo: power off"
step 120 stop "$vm" --limit 60
started=''
if [[ $cluster ]]; then
    cluster=''
    step 60 cluster down
fi
