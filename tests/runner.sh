#!/bin/sh
# Runs a test program where guests run: here when this machine's KVM can, else in a lab host.
# A lab that died (exit status 125) is started again, twice at most, and that is told.
# Usage: runner.sh PROGRAM [ARGUMENTS]
set -u
program=$1
shift
mirrorball=${MIRRORBALL_BIN:-$(dirname "$program")/../mirrorball}
case $(basename "$program") in
# These start labs themselves, one after another.
auto-* | hosts-* | lab-*) exec "$program" --test-threads=1 "$@" ;;
esac
# Four cells want four CPUs.
needed=1
case $(basename "$program") in wide-*) needed=4 ;; esac
if "$mirrorball" probe >/dev/null 2>&1 && [ "$(nproc)" -ge "$needed" ]; then
    exec "$program" --test-threads=1 "$@"
fi
limit=${GUEST_TEST_LIMIT:-900}
# Clusters, and memory bound to a node, want a host with nodes.
lab=
case $(basename "$program") in
cluster-* | composition-* | coherent-* | span-* | shards-* | deaths-* | moves-* | underway-*) lab=$(dirname "$0")/labs/two-nodes.toml ;;
wide-*) lab=$(dirname "$0")/labs/four-nodes.toml ;;
esac
in_lab() {
    # Runtime files belong in memory, not on the lab host's shared file system.
    "$mirrorball" lab run ${lab:+"$lab"} --limit "$limit" -- env TMPDIR=/run XDG_RUNTIME_DIR=/run MIRRORBALL_BIN="$mirrorball" \
        "$program" --test-threads=1 "$@"
}
for attempt in 1 2 3; do
    in_lab "$@"
    status=$?
    [ "$status" -eq 125 ] || break
    echo "runner.sh: THE LAB DIED under $(basename "$program") (attempt $attempt of 3)" >&2
done
exit "$status"
