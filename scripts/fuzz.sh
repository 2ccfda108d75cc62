#!/usr/bin/env bash
# Runs each fuzz target for FUZZ_SECONDS (60 when unset) and fails on the first crash of any, naming its input.
# Usage: scripts/fuzz.sh [TARGET...]
#
# Uses cargo-fuzz on the toolchain that is there: what needs nightly is allowed by RUSTC_BOOTSTRAP. The address
# sanitizer is used if the toolchain has its runtime (Debian's has not); without it the bounds checks of Rust, integer
# overflow and debug assertions are still on.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
tools=${XDG_CACHE_HOME:-$HOME/.cache}/mirrorball/tools
version=0.13.2
export RUSTC_BOOTSTRAP=1
# What libFuzzer takes for a hang and for too much memory; inputs grow at once.
# The sanitizer keeps freed memory for a while, by default half of that limit.
export ASAN_OPTIONS=quarantine_size_mb=16:detect_odr_violation=0
limits=(-len_control=0 -timeout=5 -rss_limit_mb=512 -malloc_limit_mb=64)

if [ "$("$tools/bin/cargo-fuzz" fuzz --version 2>/dev/null)" != "cargo-fuzz $version" ]; then
    echo "fuzz: installing cargo-fuzz $version to $tools (a minute, once)"
    cargo install cargo-fuzz --version "$version" --locked --quiet --root "$tools" --target-dir "$tools/build"
    rm -rf "$tools/build"
fi

host=$(rustc -vV | sed -n 's/^host: //p')
if compgen -G "$(rustc --print sysroot)/lib/rustlib/$host/lib/librustc-*_rt.asan.a" >/dev/null; then
    sanitizer=address
else
    sanitizer=none
    echo "fuzz: this Rust has no address sanitizer; fuzzing without"
fi
fuzz() { "$tools/bin/cargo-fuzz" fuzz "$@"; }

if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(fuzz list --fuzz-dir fuzz); fi
echo "fuzz: building ${#targets[@]} targets (4 min the first time), then $((${#targets[@]} * seconds)) s of fuzzing"
fuzz build --fuzz-dir fuzz --sanitizer "$sanitizer" 2>fuzz/build.log || { tail -n 40 fuzz/build.log >&2; exit 1; }
out=${CARGO_TARGET_DIR:-fuzz/target}/$host/release

failed=()
for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target artifacts=fuzz/artifacts/$target log=fuzz/artifacts/$target.log
    mkdir -p "$corpus" "$artifacts"
    folders=("$corpus")
    [ -d "fuzz/seeds/$target" ] && folders+=("fuzz/seeds/$target")
    if "$out/$target" "${folders[@]}" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix="$artifacts/" >"$log" 2>&1; then
        rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
        inputs=$(find "$corpus" -type f | wc -l)
        printf 'fuzz: %-16s ok, %s executions/s, %s inputs kept\n' "$target" "${rate:-?}" "$inputs"
    else
        printf 'fuzz: %-16s FAILED\n' "$target"
        grep -E -A 3 'panicked at|ERROR: |SUMMARY|Test unit written' "$log" | tail -n 30 || tail -n 30 "$log"
        echo "fuzz: again with: $out/$target $(find "$artifacts" -type f -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2)"
        failed+=("$target")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "fuzz: failed: ${failed[*]} (logs in fuzz/artifacts)" >&2
    exit 1
fi
