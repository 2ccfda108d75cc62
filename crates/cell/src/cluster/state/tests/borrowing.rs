//! Loans that begin and end without a command.

use registry::cluster::interface::{CellStatus, VmPlacement};

use super::*;

/// Chunk 16 MiB, low water 64 MiB, floor and high water 128 MiB.
const LIMITS: Limits = Limits::of_chunk(16 << 20);
/// More rounds than any of these tests needs.
const ROUNDS_MAX: usize = 40;

/// Memory of a VM in the cells of its list.
fn only(cells: &[u16], host: AdmitVm) -> AdmitVm {
    AdmitVm {
        cells: cells.to_vec(),
        ..host
    }
}

impl World {
    /// Cells that borrow by themselves.
    fn borrowing(count: u16) -> Self {
        let mut world = Self::new(0);
        world.limits = Some(LIMITS);
        (0..count).for_each(|number| world.start(id(number, 1)));
        world
    }

    /// Has cells make the passes that they need, until none needs one. Returns their number.
    #[track_caller]
    fn passes(&mut self) -> usize {
        self.settle();
        for round in 0..ROUNDS_MAX {
            let mut due = self.cells.iter().filter(|(_, state)| state.needs_pass());
            let Some(at) = due.next().map(|(cell, _)| *cell) else {
                return round;
            };
            self.act(at, State::pass);
            self.settle();
        }
        panic!("passes have no end");
    }

    #[track_caller]
    fn hosted(&mut self, client: Client, host: AdmitVm) -> VmPlacement {
        match self.host(client, host) {
            CellResponse::Hosted(place) => place,
            other => panic!("not hosted: {other:?}"),
        }
    }

    #[track_caller]
    fn not_hosted(&mut self, client: Client, host: AdmitVm) -> String {
        match self.host(client, host) {
            CellResponse::Refused { why } => why,
            other => panic!("not refused: {other:?}"),
        }
    }

    fn end(&mut self, at: CellId, client: Client) {
        self.act(at, |state| state.handle_disconnect(client));
        self.settle();
    }

    /// Loans as all cells know them: home, holder, MiB, of which on request.
    #[track_caller]
    fn loans(&mut self) -> Vec<(u16, u16, u64, u64)> {
        let cells: Vec<CellId> = self.cells.keys().copied().collect();
        let mut known: Vec<Vec<(u16, u16, u64, u64)>> = Vec::new();
        for at in cells {
            let cells = self.status(at).cells;
            known.push(cells.iter().flat_map(loans_of).collect());
        }
        known.dedup();
        assert_eq!(known.len(), 1, "cells differ: {known:?}");
        known.remove(0)
    }
}

fn loans_of(home: &CellStatus) -> Vec<(u16, u16, u64, u64)> {
    let requested = |holder| {
        let mut parts = home.lent_on_request.iter();
        parts
            .find(|part| part.cell == holder)
            .map_or(0, |part| part.bytes >> 20)
    };
    let lent = home.lent.iter();
    lent.map(|part| {
        (
            home.plan.number,
            part.cell,
            part.bytes >> 20,
            requested(part.cell),
        )
    })
    .collect()
}

#[test]
fn vm_that_does_not_fit_is_admitted_with_a_loan_on_request() {
    let mut world = World::borrowing(3);
    let place = world.hosted(1, in_cell(1, "a", 1200));
    assert_eq!(place.plan.nodes, [0, 1]);
    assert_eq!(place.borrowed, [part(0, 176)]);
    assert_eq!(world.loans(), [(0, 1, 176, 176)]);
    // The loan ends with the VM, without a command.
    world.end(id(1, 1), 1);
    world.passes();
    assert_eq!(world.loans(), []);
    let place = world.hosted(2, in_cell(0, "b", 1024));
    assert_eq!(place.borrowed, []);
}

#[test]
fn vm_without_a_cell_goes_where_it_fits_by_borrowing_least() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(0, "a", 200));
    let place = world.hosted(2, vm("b", 1100));
    assert_eq!(place.plan.number, 1);
    assert_eq!(place.borrowed, [part(0, 76)]);
}

#[test]
fn cell_below_its_low_water_borrows_a_chunk_of_each_home_and_returns_it_later() {
    let mut world = World::borrowing(3);
    assert_eq!(world.passes(), 0, "idle cells make no pass");
    world.hosted(1, in_cell(1, "a", 960));
    world.passes();
    assert_eq!(world.loans(), [], "64 MiB are free");
    world.hosted(2, in_cell(1, "b", 64));
    let passes = world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16), (2, 1, 16, 16)]);
    assert!(passes < 10, "{passes}");
    world.end(id(1, 1), 2);
    world.passes();
    assert_eq!(world.loans().len(), 2, "hysteresis: 64 MiB are free");
    world.end(id(1, 1), 1);
    world.passes();
    assert_eq!(world.loans(), []);
}

#[test]
fn lender_keeps_its_floor() {
    let mut world = World::borrowing(2);
    let why = world.not_hosted(1, in_cell(1, "a", 1024 + 897));
    assert!(why.contains("cell 1 has 1024 MiB"), "{why}");
    assert_eq!(world.loans(), []);
    world.hosted(2, in_cell(1, "a", 1024 + 896));
    // It is at its floor, and lends nothing in advance.
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 896, 896)]);
}

#[test]
fn vm_has_memory_of_the_cells_of_its_list_only_in_their_order() {
    let mut world = World::borrowing(4);
    let place = world.hosted(1, only(&[1, 3, 2], in_cell(1, "a", 1100)));
    assert_eq!(place.borrowed, [part(3, 76)]);
    world.passes();
    let lenders: Vec<u16> = world.loans().iter().map(|loan| loan.0).collect();
    assert_eq!(lenders, [2, 3], "no VM of cell 1 may use cell 0");
    // The chunks that cell 1 has are no memory for this one.
    let why = world.not_hosted(2, only(&[1], in_cell(1, "b", 64)));
    assert!(why.contains("cell 1 has 0 MiB"), "{why}");
    let place = world.hosted(3, only(&[0, 2], vm("c", 64)));
    assert!([0, 2].contains(&place.plan.number), "{place:?}");
    let why = world.not_hosted(4, only(&[7], vm("d", 64)));
    assert!(
        why.contains("none of the cells that it may depend on runs (7)"),
        "{why}"
    );
}

#[test]
fn lender_that_runs_short_recalls_what_is_unused() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1024));
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16)]);
    world.hosted(2, in_cell(0, "b", 980));
    world.passes();
    assert_eq!(world.loans(), [], "cell 0 has 44 MiB, and cell 1 none to lend");
}

#[test]
fn memory_is_recalled_for_a_vm_of_the_lender() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1024));
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16)]);
    let place = world.hosted(2, in_cell(0, "b", 1024));
    assert_eq!(place.borrowed, []);
    assert_eq!(world.loans(), []);
    // The same for a part of a VM that spans cells.
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1024));
    world.passes();
    let own = AdmitVm {
        own: true,
        ..in_cell(0, "c/1", 1024)
    };
    assert_eq!(world.hosted(2, own).borrowed, []);
}

#[test]
fn memory_that_a_vm_uses_is_not_recalled_without_a_command() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1224));
    world.passes();
    let why = world.not_hosted(2, in_cell(0, "b", 1000));
    assert!(why.contains("cell 0 has 808 MiB"), "{why}");
    assert_eq!(world.loans(), [(0, 1, 216, 216)]);
    assert_eq!(world.hosted(3, in_cell(0, "b", 824)).borrowed, []);
    assert_eq!(world.loans(), [(0, 1, 200, 200)], "the chunk is back");
}

#[test]
fn large_vm_uses_borrowed_memory_first_and_a_small_one_its_cells() {
    let mut world = World::borrowing(2);
    assert_eq!(world.ask(id(0, 1), 1, lend(1, 300)), CellResponse::Done);
    world.hosted(2, in_cell(1, "a", 400));
    let place = world.hosted(3, in_cell(1, "b", 600));
    assert_eq!(place.borrowed, [part(0, 40)], "64 MiB stay free in cell 1");
    let place = world.hosted(4, in_cell(1, "c", 64));
    assert_eq!(place.borrowed, []);
}

#[test]
fn loan_by_command_is_returned_by_command_only() {
    let mut world = World::borrowing(2);
    assert_eq!(world.ask(id(0, 1), 1, lend(1, 512)), CellResponse::Done);
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 512, 0)]);
    world.hosted(2, in_cell(1, "a", 1024 + 600));
    assert_eq!(world.loans(), [(0, 1, 600, 88)]);
    world.end(id(1, 1), 2);
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 512, 0)]);
    let reclaim = CellRequest::Reclaim {
        from: 1,
        bytes: 512 << 20,
    };
    assert_eq!(world.ask(id(0, 1), 3, reclaim), CellResponse::Done);
}

#[test]
fn borrowed_memory_is_not_lent_on() {
    let mut world = World::borrowing(3);
    assert_eq!(world.ask(id(0, 1), 1, lend(1, 1024)), CellResponse::Done);
    world.hosted(2, in_cell(1, "a", 1000));
    // Cell 1 has 1024 MiB of cell 0's memory and 24 of its own.
    let why = world.not_hosted(3, in_cell(2, "b", 1100));
    assert!(why.contains("cell 2 has 1024 MiB"), "{why}");
}

#[test]
fn cordoned_cell_neither_lends_nor_borrows_by_itself() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1000));
    let cordon = |cordoned| CellRequest::Cordon { cordoned };
    assert_eq!(world.ask(id(0, 1), 2, cordon(true)), CellResponse::Done);
    world.passes();
    world.not_hosted(3, in_cell(1, "b", 100));
    assert_eq!(world.loans(), []);
    assert_eq!(world.ask(id(0, 1), 4, cordon(false)), CellResponse::Done);
    assert_eq!(world.ask(id(1, 1), 5, cordon(true)), CellResponse::Done);
    world.passes();
    assert_eq!(world.loans(), []);
    assert_eq!(world.ask(id(1, 1), 6, cordon(false)), CellResponse::Done);
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16)]);
}

#[test]
fn cells_without_automatic_borrowing_lend_by_command_only() {
    let mut world = World::borrowing(1);
    world.limits = None;
    world.start(id(1, 1));
    world.not_hosted(1, in_cell(1, "a", 1200));
    // Cell 0 would lend, and cell 1 does not.
    world.not_hosted(2, in_cell(0, "a", 1200));
    world.hosted(3, in_cell(0, "a", 1000));
    world.passes();
    assert_eq!(world.loans(), []);
}

#[test]
fn cell_of_an_older_version_is_not_asked() {
    let mut world = World::borrowing(2);
    world.die(id(1, 1));
    let old = State::new(id(1, 2), 1, plan(1), None, []);
    world.cells.insert(id(1, 2), old);
    world.act(id(0, 1), |state| state.linked(id(1, 2), false));
    world.act(id(1, 2), |state| state.linked(id(0, 1), false));
    world.settle();
    let why = world.not_hosted(1, in_cell(0, "a", 1200));
    assert!(why.contains("cell 0 has 1024 MiB"), "{why}");
}

/// The lender dies before it has replied: the VM takes another lender, or is refused.
#[test]
fn vm_that_waits_for_a_lender_that_dies_gets_an_answer() {
    for count in [2, 3] {
        let mut world = World::borrowing(count);
        world.act(id(1, 1), |state| {
            state.handle_request(1, CellRequest::AdmitVm(in_cell(1, "a", 1200)))
        });
        let awaited = world.cells[&id(1, 1)].awaited(1);
        assert_eq!(awaited.keys().collect::<Vec<_>>(), [&id(0, 1)]);
        world.links.clear();
        world.die(id(0, 1));
        world.settle();
        match world.answers.remove(&(1, 1)).expect("an answer") {
            CellResponse::Hosted(place) => assert_eq!((count, place.borrowed), (3, vec![part(2, 176)])),
            CellResponse::Refused { why } => assert!(count == 2 && why.contains("cell 1 has 1024 MiB")),
            other => panic!("{other:?}"),
        }
    }
}

/// A client that leaves while its VM waits takes no memory; the loan is returned.
#[test]
fn loan_for_a_client_that_has_gone_is_returned() {
    let mut world = World::borrowing(2);
    world.act(id(1, 1), |state| {
        state.handle_request(1, CellRequest::AdmitVm(in_cell(1, "a", 1200)))
    });
    world.act(id(1, 1), |state| state.handle_disconnect(1));
    world.passes();
    assert_eq!(world.loans(), []);
    world.hosted(2, in_cell(1, "a", 1024));
}

/// Whichever cell dies, and in whichever order: the VM keeps its loan, the loan is still one on request, and
/// it ends with the VM.
#[test]
fn loan_on_request_outlives_both_cells_and_ends_with_its_vm() {
    for dead in [vec![0], vec![1], vec![0, 1], vec![1, 0]] {
        let mut world = World::borrowing(2);
        let place = world.hosted(1, in_cell(1, "a", 1200));
        world.passes();
        assert_eq!(world.loans(), [(0, 1, 192, 192)], "with a chunk in advance");
        world.running = vec![RunningVm {
            name: "a".to_owned(),
            cell: 1,
            share: vm("a", 1200).share,
            borrowed: place.borrowed.clone(),
            cells: Vec::new(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
        }];
        dead.iter().for_each(|number| world.die(id(*number, 1)));
        dead.iter().for_each(|number| world.start(id(*number, 2)));
        world.passes();
        assert_eq!(world.loans(), [(0, 1, 192, 192)], "{dead:?}");
        let holder = id(1, 1 + u32::from(dead.contains(&1)));
        if holder.life == 2 {
            let back = AdmitVm {
                runs: true,
                borrowed: place.borrowed.clone(),
                ..vm("a", 1200)
            };
            let again = world.ask(holder, 1, CellRequest::AdmitVm(back));
            assert_eq!(again, CellResponse::Hosted(place));
        }
        world.end(holder, 1);
        world.passes();
        assert_eq!(world.loans(), [], "{dead:?}");
    }
}

/// Memory of a dead lender that no VM uses is given to no VM.
#[test]
fn unused_memory_of_a_dead_lender_is_not_used() {
    let mut world = World::borrowing(2);
    world.hosted(1, in_cell(1, "a", 1000));
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16)]);
    world.die(id(0, 1));
    let why = match world.ask(id(1, 1), 2, CellRequest::AdmitVm(in_cell(1, "b", 40))) {
        CellResponse::Refused { why } => why,
        other => panic!("{other:?}"),
    };
    assert!(why.contains("cell 1 has 24 MiB"), "{why}");
    assert_eq!(world.passes(), 1, "nobody can be asked");
    world.start(id(0, 2));
    world.passes();
    assert_eq!(world.loans(), [(0, 1, 16, 16)]);
    world.hosted(3, in_cell(1, "b", 40));
}

/// Many VMs come and go at random: however much is borrowed, no cell has promised more than it has, and in
/// the end all memory is at home.
#[test]
fn memory_is_promised_once_and_comes_home_whatever_vms_come_and_go() {
    for seed in 0..200_u64 {
        let mut world = World::borrowing(3);
        let mut rng = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: u64| {
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            rng % below
        };
        let mut running: Vec<(Client, VmPlacement, u64)> = Vec::new();
        for client in 1..40 {
            let cell = random(3) as u16;
            let mib = 64 * (1 + random(12));
            let ends = random(3) == 0 && !running.is_empty();
            if ends {
                let (client, place, _) = running.remove(random(running.len() as u64) as usize);
                world.end(id(place.plan.number, 1), client);
            } else if let CellResponse::Hosted(place) =
                world.host(client, in_cell(cell, &format!("vm{client}"), mib))
            {
                running.push((client, place, mib << 20));
            }
            if random(2) == 0 {
                world.passes();
            }
            let mut used = [0_u64; 3];
            for (_, place, bytes) in &running {
                let borrowed: u64 = place.borrowed.iter().map(|part| part.bytes).sum();
                used[usize::from(place.plan.number)] += bytes - borrowed;
                for part in &place.borrowed {
                    used[usize::from(part.cell)] += part.bytes;
                }
            }
            assert!(used.iter().all(|used| *used <= GIB), "seed {seed}: {used:?}");
        }
        for (client, place, _) in running {
            world.end(id(place.plan.number, 1), client);
        }
        world.passes();
        assert_eq!(world.loans(), [], "seed {seed}");
    }
}

#[test]
fn limits_follow_the_file_and_the_measurement_where_the_file_is_silent() {
    let spec = |text: &str| {
        let file = format!("[[cells]]\ncpus = \"1\"\n[borrowing]\n{text}");
        let spec = config::cluster::ClusterSpec::parse("cluster.toml", &file);
        spec.unwrap().borrowing.unwrap()
    };
    // 732 KiB in 10 ms, as in the paper.
    let limits = |text: &str| borrowing_limits(&spec(text), || 732 * 1024 * 100, 8, GIB);
    assert_eq!(limits(""), Some(Limits::of_chunk(4 << 20)));
    assert_eq!(limits("chunk = \"8M\"\n"), Some(Limits::of_chunk(8 << 20)));
    let set = limits("low_water = \"64M\"\n").unwrap();
    // The floor is never below the low water.
    assert_eq!((set.low_water_bytes, set.floor_bytes), (64 << 20, 64 << 20));
    let set = limits("floor = \"256M\"\n").unwrap();
    assert_eq!((set.chunk_bytes, set.floor_bytes), (4 << 20, 256 << 20));
    let off = borrowing_limits(&spec("automatic = false\n"), || panic!("measured"), 8, GIB);
    assert_eq!(off, None);
}
