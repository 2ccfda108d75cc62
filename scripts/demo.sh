#!/usr/bin/env bash
# Four unmodified Debian VMs from one disk image; each compiles bzip2 from Debian's source and checks what it built.
# Usage: scripts/demo.sh MIRRORBALL
set -euo pipefail
mirrorball=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball
here=$(cd "$(dirname "$0")/.." && pwd)

# Without KVM the lab will do: what runs here is this demo's own. `auto` refuses it to root.
"$mirrorball" probe >/dev/null && lab=auto || lab=always
echo "demo: the image debian-12: Debian 12 with gcc and make (built once, in about a minute)"
"$mirrorball" image build debian-12 --packages gcc,libc6-dev,make --if-missing
"$here/scripts/fetch-source.sh" bzip2 "$cache/bzip2.tar"

cells=$(($(nproc) > 1 ? 2 : 1))
if ! "$mirrorball" cluster status >/dev/null 2>&1; then
    echo "demo: this host becomes a cluster of $cells cells"
    # Gone already if the lab died.
    trap '"$mirrorball" cluster down >/dev/null 2>&1 || true' EXIT
    "$mirrorball" cluster up --lab $lab --cells $cells
fi

echo "demo: four VMs boot from it, and each compiles bzip2 and checks the result"
"$mirrorball" run --lab $lab --count 4 --name demo --image debian-12 --cpus 1 \
    --memory 256M --net none --disk "$cache/bzip2.tar" -- \
    /bin/sh -c 'set -e; mkdir /root/b; cd /root/b; tar xf /dev/vdb --strip-components=1; make -s CFLAGS="-O0 -D_FILE_OFFSET_BITS=64" bzip2 >log 2>&1 || { tail log; exit 1; }; ./bzip2 -1 <sample1.ref | cmp - sample1.bz2; ./bzip2 -d <sample2.bz2 | cmp - sample2.ref; ./bzip2 --help 2>&1 | head -1; echo "compiled $(cat *.c | wc -l) lines of C; output compared"'
