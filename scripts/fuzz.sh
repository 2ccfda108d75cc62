#!/usr/bin/env bash
# Runs each fuzz target for FUZZ_SECONDS (60 when unset) and fails on the first crash of any, naming its input.
# Usage: scripts/fuzz.sh [TARGET...]
#        scripts/fuzz.sh --build   compiles the program that `make test` runs, without a sanitizer, and ends
#
# All targets are one program. Any toolchain compiles it with the counters that libFuzzer reads. The address sanitizer is
# used if the toolchain has its runtime (Debian's has not), and is allowed by RUSTC_BOOTSTRAP; without it the bounds checks
# of Rust, integer overflow and debug assertions are still on.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
target_dir=${CARGO_TARGET_DIR:-target}
host=x86_64-unknown-linux-gnu
flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0"

# Compiles into this directory, with these flags besides.
build() {
    RUSTFLAGS="$flags $2" cargo build --release --locked --manifest-path fuzz/Cargo.toml --target-dir "$1"
}

if [ "${1:-}" = --build ]; then
    build "$target_dir/fuzz" ""
    exit
fi

# What libFuzzer takes for a hang and for too much memory; inputs grow at once.
limits=(-len_control=0 -timeout=5 -rss_limit_mb=512 -malloc_limit_mb=64)
# The sanitizer keeps freed memory for a while, by default half of that limit.
export ASAN_OPTIONS=quarantine_size_mb=16:detect_odr_violation=0
if compgen -G "$(rustc --print sysroot)/lib/rustlib/$host/lib/librustc-*_rt.asan.a" >/dev/null; then
    out=$target_dir/fuzz-address sanitizer=-Zsanitizer=address
    export RUSTC_BOOTSTRAP=1
else
    out=$target_dir/fuzz sanitizer=
    echo "fuzz: this Rust has no address sanitizer; fuzzing without"
fi

if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(basename -s .rs fuzz/src/targets/*.rs | grep -vx mod); fi
echo "fuzz: compiling ${#targets[@]} targets (4 min the first time), then $((${#targets[@]} * seconds)) s of fuzzing"
mkdir -p fuzz/artifacts
build "$out" "$sanitizer" 2>fuzz/artifacts/build.log || { tail -n 40 fuzz/artifacts/build.log >&2; exit 1; }
program=$out/$host/release/mirrorball-fuzz

failed=()
for target in "${targets[@]}"; do
    corpus=fuzz/corpus/$target artifacts=fuzz/artifacts/$target log=fuzz/artifacts/$target.log
    mkdir -p "$corpus" "$artifacts"
    folders=("$corpus")
    [ -d "fuzz/seeds/$target" ] && folders+=("fuzz/seeds/$target")
    if "$program" "--target=$target" "${folders[@]}" "${limits[@]}" -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix="$artifacts/" >"$log" 2>&1; then
        rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
        inputs=$(find "$corpus" -type f | wc -l)
        printf 'fuzz: %-16s ok, %s executions/s, %s inputs kept\n' "$target" "${rate:-?}" "$inputs"
    else
        printf 'fuzz: %-16s FAILED\n' "$target"
        grep -E -A 3 'no target|panicked at|ERROR: |SUMMARY|Test unit written' "$log" | tail -n 30 || tail -n 30 "$log"
        echo "fuzz: again with: $program --target=$target $(find "$artifacts" -type f -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2)"
        failed+=("$target")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "fuzz: failed: ${failed[*]} (logs in fuzz/artifacts)" >&2
    exit 1
fi
