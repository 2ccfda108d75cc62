# One command for each habit; each installs what it needs as root on Debian, and otherwise says what is missing.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/sbin:/sbin

TARGET := x86_64-unknown-linux-gnu
OUT := $(or $(CARGO_TARGET_DIR),target)/$(TARGET)/release
MIRRORBALL := $(OUT)/mirrorball

.PHONY: help build program demo demo-span demo-cluster demo-hosts demo-net test campaign mutants sanitize lint sim sim-million bench bench-sharing bench-channels bench-hosts bench-span bench-paging bench-dsm bench-coherent bench-compile bench-model bench-before bench-cells bench-cluster bench-borrowing bench-gates bench-gangs bench-moves bench-scheduling bench-net bench-folders bench-firecracker results fuzz clean

help:
	@echo "make build   compile (2 to 4 min)           make demo   four Debian VMs compile a C program (first time 6 min)"
	@echo "make demo-span   one Debian VM over two cells; a vCPU moves while it compiles (first time 6 min)"
	@echo "make demo-cluster   two cells lend each other memory and CPUs, in the view of top (2 min after the build)"
	@echo "make demo-net   a web server, a database and four clients on a network of two cells (3 min after the build)"
	@echo "make demo-hosts  one Debian VM over two hosts, emulated; a C program built on both (5 to 20 min)"
	@echo "make test    all tests (an hour on 2 cores without usable KVM; with it not timed)"
	@echo "make lint    formatting, clippy, of the fuzz targets too, and other people's crates (3 to 5 min on 2 cores)"
	@echo "make campaign NAME=moves   one test program with its full number of repetitions, its result in docs/results"
	@echo "make mutants CRATE=apic   60 changes to one crate, and which its tests don't notice (5 to 30 min)"
	@echo "make sanitize   unit tests of the crates with unsafe code, under the address sanitizer (15 min on 2 busy cores)"
	@echo "make bench   timings against QEMU (8 min)   make fuzz   each fuzz target for a minute"
	@echo "make sim     clusters, and adoptions of VMs, in virtual time (2 min)"
	@echo "make sim-million   10^6 stories of the table that all cells have (7 to 10 min)"
	@echo "make bench-channels   message channels and what cells make of them, beside others (a minute)"
	@echo "make bench-hosts      time until a host whose processes are killed is taken for dead, and places between cells (a minute)"
	@echo "make bench-dsm        one memory for two processes, beside what a fault is made of, and beside MPI (five minutes)"
	@echo "make bench-model      what programs on it would gain on several hosts, by a model of what bench-dsm and bench-compile counted"
	@echo "make bench-compile    what a build waits for in a VM over two nodes, for the model (7 min without usable KVM)"
	@echo "make bench-coherent   starts of a VM over two nodes with a copy of the memory each, beside a plain one's (6 min without usable KVM)"
	@echo "make bench-net        TCP between two VMs on a subnet, beside QEMU's on a bridge with vhost (4 min without usable KVM)"
	@echo "make bench-scheduling   gangs of vCPUs in simulation, and the time that balancing of CPUs takes (1 min)"
	@echo "make bench-cells      adoption of 50 VMs by a cell, its memory for each, and starts in a cell (4 min)"
	@echo "make bench-cluster    two programs in one VM, in two cells that lend each other memory and CPUs, and in two that don't (10 min without usable KVM)"
	@echo "make bench-borrowing  random reads and updates in a VM with three quarters of its memory borrowed (10 min without usable KVM)"
	@echo "make bench-gangs      two VMs on two CPUs whose threads wait for one another, by Linux and with gangs (15 min a run on busy CPUs without usable KVM)"
	@echo "make bench-moves      moves of a vCPU between CPUs of a cell, and of two (a minute)"
	@echo "make bench-folders    a guest's accesses to a shared folder, beside QEMU with virtiofsd (not timed yet)"
	@echo "make bench-gates      ways to choose which vCPU of a CPU runs (a minute)"
	@echo "make bench-firecracker FIRECRACKER=PATH JAILER=PATH   start and memory of a VM beside Firecracker's, bare and jailed (2 min)"
	@echo "make bench-before     start and memory of a VM, beside those of commit 88dc2d3 (5 min the first time)"
	@echo "make bench-span       a VM in one shard and in two (half an hour without usable KVM)"
	@echo "make bench-paging     a guest that uses twice the memory which the host gives it, beside the host's swap (an hour without usable KVM)"
	@echo "make results   the pages of docs/results/tables from the files in bench/results (after the build, a second)"
	@echo "make bench-sharing   memory of guests that share a disk, beside QEMU (half an hour without usable KVM)"

build:
	@scripts/setup.sh build
	cargo build --release --locked

# What a demo runs and no more. The whole workspace decides the features of crates, so that `build` compiles none of them again.
program:
	@scripts/setup.sh build
	cargo build --release --locked --workspace --bin mirrorball --bin mirrorball-shard --bin mirrorball-keeper --bin mirrorball-agent

demo: program
	@scripts/setup.sh run
	scripts/demo.sh $(MIRRORBALL)

demo-span: program
	@scripts/setup.sh run
	scripts/demo-span.sh $(MIRRORBALL)

demo-cluster: program
	@scripts/setup.sh run
	scripts/demo-cluster.sh $(MIRRORBALL)

demo-net: program
	@scripts/setup.sh run
	scripts/demo-net.sh $(MIRRORBALL)

demo-hosts: program
	@scripts/setup.sh run test
	scripts/demo-hosts.sh $(MIRRORBALL)

test: build
	@scripts/setup.sh run test fuzz
	scripts/test.sh $(MIRRORBALL)

campaign: build
	@scripts/setup.sh run test
	scripts/campaign.sh $(MIRRORBALL) "$(NAME)"

mutants:
	@scripts/setup.sh build
	scripts/mutants.sh "$(CRATE)"

sanitize:
	@scripts/setup.sh build
	scripts/sanitize.sh

# With the profile of the tests, whose build takes over the procedural macros and what build scripts made.
lint:
	@scripts/setup.sh build fuzz lint
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	rustfmt --edition 2024 --check tests/guest/main.rs
	cargo clippy --release --workspace --all-targets --features bench/channels --locked -- -D warnings
	@! cargo tree --locked -p cell -p console -p sim -p shard_api -e normal --prefix none | grep -E '^(kvm-|vm-memory|linux-loader|shard v)' || { echo "lint: a cell, the API or the simulator links KVM or guest memory; see ARCHITECTURE.md" >&2; exit 1; }
	@! cargo tree --locked -p console -e normal --prefix none | grep -E '^cell v' || { echo "lint: the API links the monitor; see ARCHITECTURE.md" >&2; exit 1; }
	@! cargo tree --locked -p shard -e normal --prefix none | grep -E '^dsm_bench v' || { echo "lint: a shard links the benches of its memory; see ARCHITECTURE.md" >&2; exit 1; }
	RUSTFLAGS="--cfg fuzzing" cargo clippy --release --manifest-path fuzz/Cargo.toml --target-dir $${CARGO_TARGET_DIR:-target}/fuzz --all-targets --locked -- -D warnings
	cargo run --release --locked --quiet -p lint
	scripts/deny.sh

sim: build
	$(OUT)/mirrorball-sim --seconds 10 crates/knowledge/machines/*.facts
	$(OUT)/mirrorball-sim --seconds 10 --borrow crates/knowledge/machines/*.facts
	$(OUT)/mirrorball-sim --seconds 10 --hosts 2 crates/knowledge/machines/*.facts
	$(OUT)/mirrorball-sim --adoptions 5000

sim-million: build
	$(OUT)/mirrorball-sim --protocols 1000000

bench: build
	@scripts/setup.sh run bench
	scripts/bench.sh $(MIRRORBALL)

bench-net: build
	@scripts/setup.sh run bench
	scripts/bench-net.sh $(MIRRORBALL)

bench-sharing: build
	@scripts/setup.sh run bench
	scripts/bench-sharing.sh $(MIRRORBALL)

bench-channels:
	@scripts/setup.sh build
	cargo build --release --locked -p bench --features channels --bin bench-channels
	scripts/bench-channels.sh $(OUT)

bench-hosts: build
	@scripts/setup.sh test
	scripts/bench-hosts.sh $(MIRRORBALL)

bench-dsm: build
	@scripts/setup.sh mpi
	scripts/bench-dsm.sh $(OUT)

bench-model: build
	@$(OUT)/bench-model --faults bench/results/dsm.json --stalls bench/results/dsm-stalls.json \
		--builds bench/results/dsm-compile.json --out bench/results/dsm-model.json
	@scripts/stamp.sh bench/results/dsm-model.json

bench-coherent: build
	@scripts/setup.sh run
	scripts/bench-coherent.sh $(MIRRORBALL)

bench-compile: build
	@scripts/setup.sh run mpi
	scripts/bench-compile.sh $(OUT)

bench-span: build
	@scripts/setup.sh run bench
	scripts/bench-span.sh $(MIRRORBALL)

bench-paging: build
	@scripts/setup.sh run bench
	scripts/bench-paging.sh $(MIRRORBALL)

bench-cells: build
	scripts/bench-cells.sh $(MIRRORBALL)

bench-cluster: build
	@scripts/setup.sh run
	scripts/bench-cluster.sh $(MIRRORBALL) sharing

bench-borrowing: build
	@scripts/setup.sh run
	scripts/bench-cluster.sh $(MIRRORBALL) borrowing

bench-gangs: build
	@scripts/setup.sh run
	scripts/bench-gangs.sh $(MIRRORBALL)

bench-moves: build
	scripts/bench-moves.sh $(MIRRORBALL)

bench-folders: build
	@scripts/setup.sh run bench
	scripts/bench.sh $(MIRRORBALL) 5 folders folders.json

bench-gates: build
	scripts/bench-gates.sh $(OUT)

bench-scheduling: build
	scripts/bench-scheduling.sh $(OUT)/mirrorball-sim

bench-firecracker: build
	scripts/bench-firecracker.sh $(MIRRORBALL) $(FIRECRACKER) $(JAILER)

bench-before: build
	scripts/bench-before.sh $(MIRRORBALL)

# After each bench, and after a change of a file in bench/results.
results: build
	$(OUT)/bench-results

fuzz:
	@scripts/setup.sh build fuzz
	scripts/fuzz.sh

clean:
	cargo clean
