//! Cells that exchange messages over links in order, and their clients.

use std::collections::{BTreeMap, VecDeque};

use config::cluster::{RegionAccess, RegionSpec};
use policy::memory::borrowing::Limits;
use registry::cluster::interface::{BorrowedCpu, LentMemory, Status};

use super::*;

mod borrowing;
mod cordons;
mod cpu_loans;
mod cpu_reservations;
mod failures;
mod forgetting;
mod loans;
mod places;
mod region_moves;
mod regions;

const GIB: u64 = 1 << 30;

pub(in crate::cluster) struct World {
    pub(in crate::cluster) cells: BTreeMap<CellId, State>,
    links: VecDeque<(CellId, CellId, CellMessage)>,
    answers: BTreeMap<(u16, Client), CellResponse>,
    /// The amounts that each cell has recorded as lent.
    lent: BTreeMap<u16, Amounts>,
    /// The part of them that each has recorded as requested.
    requested: BTreeMap<u16, Amounts>,
    /// Amounts at which cells borrow by themselves.
    limits: Option<Limits>,
    /// Cells that have recorded a cordon.
    cordoned: BTreeSet<u16>,
    /// VMs that a cell was to end.
    ended: Vec<(u16, String)>,
    /// Whether drivers choose what the cells' CPUs run.
    has_drivers: bool,
    /// Shared regions of the cluster.
    specs: Vec<RegionSpec>,
    /// Actions of cells for their shared regions, in order.
    region_acts: Vec<Action>,
    /// The VMs that the host's registry reports as running.
    pub(in crate::cluster) running: Vec<RunningVm>,
}

pub(in crate::cluster) fn id(number: u16, life: u32) -> CellId {
    CellId { number, life }
}

pub(in crate::cluster) fn plan(number: u16) -> CellPlan {
    CellPlan {
        number,
        host: None,
        cpus: vec![usize::from(number) * 2, usize::from(number) * 2 + 1],
        nodes: vec![u32::from(number)],
        memory_bytes: GIB,
    }
}

pub(in crate::cluster) fn vm(name: &str, mib: u64) -> AdmitVm {
    AdmitVm::new(
        name.to_owned(),
        VmShare {
            vcpus: 1,
            memory_bytes: mib << 20,
            ..VmShare::default()
        },
    )
}

fn lend(to: u16, mib: u64) -> CellRequest {
    CellRequest::Lend { to, bytes: mib << 20 }
}

fn part(cell: u16, mib: u64) -> LentMemory {
    LentMemory {
        cell,
        bytes: mib << 20,
    }
}

fn in_cell(cell: u16, name: &str, mib: u64) -> AdmitVm {
    AdmitVm {
        only: Some(cell),
        ..vm(name, mib)
    }
}

impl World {
    pub(in crate::cluster) fn new(count: u16) -> Self {
        let mut world = Self {
            cells: BTreeMap::new(),
            links: VecDeque::new(),
            answers: BTreeMap::new(),
            lent: BTreeMap::new(),
            requested: BTreeMap::new(),
            limits: None,
            cordoned: BTreeSet::new(),
            ended: Vec::new(),
            has_drivers: true,
            specs: Vec::new(),
            region_acts: Vec::new(),
            running: Vec::new(),
        };
        (0..count).for_each(|number| world.start(id(number, 1)));
        world
    }

    pub(in crate::cluster) fn start(&mut self, cell: CellId) {
        let others: Vec<CellId> = self.cells.keys().copied().collect();
        let lent = self.lent.remove(&cell.number);
        let requested = self.requested.remove(&cell.number).unwrap_or_default();
        let requested = lent.is_some().then_some(requested);
        self.cells.insert(
            cell,
            State::new(cell, 1, plan(cell.number), lent, self.running.clone())
                .with_borrowing(self.limits, requested)
                .with_cordon(self.cordoned.contains(&cell.number))
                .with_drivers(self.has_drivers)
                .with_regions(self.specs.clone()),
        );
        for other in others {
            self.act(cell, |state| state.linked(other, true));
            self.act(other, |state| state.linked(cell, true));
        }
        self.act(cell, State::handle_all_linked);
        self.settle();
    }

    pub(in crate::cluster) fn act(&mut self, at: CellId, act: impl FnOnce(&mut State) -> Vec<Action>) {
        for act in act(self.cells.get_mut(&at).expect("lives")) {
            match act {
                Action::PersistLent(lent) => _ = self.lent.insert(at.number, lent),
                Action::PersistLentOnRequest(lent) => _ = self.requested.insert(at.number, lent),
                Action::Send(to, message) => self.links.push_back((at, to, message)),
                Action::Answer(client, answer) => _ = self.answers.insert((at.number, client), answer),
                Action::EndVm { name, .. } => self.ended.push((at.number, name)),
                act @ (Action::CreateRegion { .. }
                | Action::SendRegion { .. }
                | Action::SearchRegion { .. }
                | Action::ProbeRegion { .. }
                | Action::RecordLenders { .. }
                | Action::MoveRegionPages { .. }
                | Action::CloseRegion(_)) => self.region_acts.push(act),
                Action::AwaitEnd(_)
                | Action::AwaitLeft(..)
                | Action::Adopt(..)
                | Action::ReportVcpus(_)
                | Action::ReportCpuLending(_)
                | Action::ReturnCpu { .. }
                | Action::ArrangeWindows(..)
                | Action::ReportAdopted(_)
                | Action::ReportProtocols(_)
                | Action::End => {}
            }
        }
    }

    pub(in crate::cluster) fn settle(&mut self) {
        while let Some((from, to, message)) = self.links.pop_front() {
            if self.cells.contains_key(&to) {
                self.act(to, |state| state.handle_message(from, message));
            }
        }
    }

    pub(in crate::cluster) fn die(&mut self, cell: CellId) {
        self.cells.remove(&cell);
        let others: Vec<CellId> = self.cells.keys().copied().collect();
        others
            .into_iter()
            .for_each(|at| self.act(at, |state| state.dead(cell)));
        self.settle();
    }

    pub(in crate::cluster) fn ask(&mut self, at: CellId, client: Client, ask: CellRequest) -> CellResponse {
        self.act(at, |state| state.handle_request(client, ask));
        self.settle();
        self.answers.remove(&(at.number, client)).expect("an answer")
    }

    /// Sends a request to the first cell, and to the one that it names.
    fn host(&mut self, client: Client, host: AdmitVm) -> CellResponse {
        let first = *self.cells.keys().next().expect("a cell");
        match self.ask(first, client, CellRequest::AdmitVm(host.clone())) {
            CellResponse::Elsewhere { cell } => {
                let there = *self
                    .cells
                    .keys()
                    .find(|known| known.number == cell)
                    .expect("lives");
                self.ask(there, client, CellRequest::AdmitVm(host))
            }
            answer => answer,
        }
    }

    fn status(&mut self, at: CellId) -> Status {
        match self.ask(at, 99, CellRequest::Status) {
            CellResponse::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    /// Requests places for four VMs at once from the first of two cells; returns how many it sends to the
    /// other.
    fn sent_of_four(&mut self) -> usize {
        for client in 0..4 {
            let host = vm(&format!("vm{client}"), 64);
            self.act(id(0, 1), |state| {
                state.handle_request(client, CellRequest::AdmitVm(host))
            });
        }
        let elsewhere = CellResponse::Elsewhere { cell: 1 };
        self.answers
            .values()
            .filter(|answer| **answer == elsewhere)
            .count()
    }

    #[track_caller]
    pub(in crate::cluster) fn vms(&mut self, expected: &[&[&str]]) {
        let cells: Vec<CellId> = self.cells.keys().copied().collect();
        for at in cells {
            let status = self.status(at);
            let vms: Vec<&[String]> = status.cells.iter().map(|cell| &cell.vms[..]).collect();
            assert_eq!(vms, expected, "as {at} knows it");
        }
    }
}

#[test]
fn vms_are_spread_and_every_cell_knows_them() {
    let mut world = World::new(2);
    for (client, name) in (0..).zip(["a", "b", "c"]) {
        assert!(matches!(
            world.host(client, vm(name, 300)),
            CellResponse::Hosted(_)
        ));
    }
    world.vms(&[&["a", "c"], &["b"]]);
    assert_eq!(world.status(id(1, 1)).cells[0].given_bytes, 600 << 20);
}

#[test]
fn vms_that_come_at_once_are_spread_too() {
    assert_eq!(World::new(2).sent_of_four(), 2);
}

#[test]
fn vms_that_have_ended_do_not_count_any_more() {
    let mut world = World::new(2);
    for round in 0..3 {
        for client in 0..2 {
            let host = vm(&format!("vm{round}-{client}"), 64);
            assert!(matches!(world.host(client, host), CellResponse::Hosted(_)));
        }
        for cell in [id(0, 1), id(1, 1)] {
            for client in 0..2 {
                world.act(cell, |state| state.handle_disconnect(client));
            }
        }
        world.settle();
        world.vms(&[&[], &[]]);
    }
    assert_eq!(world.sent_of_four(), 2);
}

#[test]
fn a_name_is_taken_in_the_whole_cluster_until_its_vm_has_ended() {
    let mut world = World::new(2);
    let there = AdmitVm {
        only: Some(1),
        ..vm("a", 64)
    };
    assert!(matches!(world.host(1, there), CellResponse::Hosted(place) if place.plan.number == 1));
    let CellResponse::Refused { why } = world.host(2, vm("a", 64)) else {
        panic!("two of one name");
    };
    assert!(why.contains("running already, in cell 1"), "{why}");
    world.act(id(1, 1), |state| state.handle_disconnect(1));
    world.settle();
    assert!(matches!(world.host(3, vm("a", 64)), CellResponse::Hosted(_)));
}

#[test]
fn vm_that_fits_nowhere_is_refused_with_the_free_memory_of_each_cell() {
    let mut world = World::new(2);
    assert!(matches!(world.host(1, vm("a", 700)), CellResponse::Hosted(_)));
    let CellResponse::Refused { why } = world.host(2, vm("b", 1100)) else {
        panic!("a VM got more memory than the cells have");
    };
    assert!(why.contains("cell 0 has 324 MiB, cell 1 has 1024 MiB"), "{why}");
    let nowhere = AdmitVm {
        only: Some(7),
        ..vm("b", 64)
    };
    let CellResponse::Refused { why } = world.host(3, nowhere) else {
        panic!("there is no such cell");
    };
    assert!(why.contains("no cell 7 that runs; there is 0, 1"), "{why}");
}

#[test]
fn leaving_is_answered_when_all_have_heard() {
    let mut world = World::new(3);
    assert!(matches!(world.host(1, vm("a", 64)), CellResponse::Hosted(_)));
    let leave = CellRequest::Leave { name: "a".to_owned() };
    world.act(id(0, 1), |state| state.handle_request(2, leave));
    assert!(world.answers.is_empty());
    world.settle();
    assert_eq!(world.answers[&(0, 2)], CellResponse::Done);
    world.vms(&[&[], &[], &[]]);
}

#[test]
fn a_dead_cell_gets_no_vm_and_its_next_process_finds_those_it_had() {
    let mut world = World::new(2);
    let there = AdmitVm {
        only: Some(1),
        ..vm("a", 64)
    };
    assert!(matches!(world.host(1, there.clone()), CellResponse::Hosted(_)));
    assert!(matches!(
        world.host(
            2,
            AdmitVm {
                name: "b".to_owned(),
                ..there.clone()
            }
        ),
        CellResponse::Hosted(_)
    ));
    world.die(id(1, 1));
    // Its VMs run on, and their names are taken.
    world.vms(&[&[], &["a", "b"]]);
    assert!(matches!(world.host(3, vm("a", 64)), CellResponse::Refused { .. }));
    assert!(matches!(world.host(4, vm("c", 64)), CellResponse::Hosted(place) if place.plan.number == 0));
    world.start(id(1, 2));
    world.vms(&[&["c"], &["a", "b"]]);
    let back = AdmitVm { runs: true, ..there };
    assert!(matches!(
        world.ask(id(1, 2), 5, CellRequest::AdmitVm(back)),
        CellResponse::Hosted(_)
    ));
    // The monitor of the other VM does not come: the VM has ended meanwhile.
    world.act(id(1, 2), State::give_up_orphans);
    world.settle();
    world.vms(&[&["c"], &["a"]]);
}

#[test]
fn cell_takes_only_running_vms_before_it_has_links_to_the_others() {
    let running = [RunningVm {
        name: "b".to_owned(),
        cell: 0,
        share: vm("b", 64).share,
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions: Vec::new(),
    }];
    let mut state = State::new(id(0, 1), 1, plan(0), None, running);
    assert!(
        state
            .handle_request(1, CellRequest::AdmitVm(vm("a", 64)))
            .is_empty()
    );
    let runs = AdmitVm {
        runs: true,
        ..vm("b", 64)
    };
    let acts = state.handle_request(2, CellRequest::AdmitVm(runs));
    assert!(
        matches!(acts[..], [Action::Answer(2, CellResponse::Hosted(_))]),
        "{acts:?}"
    );
    let acts = state.handle_all_linked();
    assert!(
        matches!(acts[..], [Action::Answer(1, CellResponse::Hosted(_))]),
        "{acts:?}"
    );
}

#[test]
fn a_client_that_goes_while_its_name_is_claimed_leaves_nothing() {
    let mut world = World::new(2);
    world.act(id(0, 1), |state| {
        state.handle_request(1, CellRequest::AdmitVm(vm("a", 64)))
    });
    world.act(id(0, 1), |state| state.handle_disconnect(1));
    world.settle();
    world.vms(&[&[], &[]]);
}

#[test]
fn the_first_to_start_again_knows_what_the_host_has() {
    let share = VmShare {
        vcpus: 1,
        memory_bytes: 700 << 20,
        ..VmShare::default()
    };
    let running = [("a", 0), ("b", 1)].map(|(name, cell)| RunningVm {
        name: name.to_owned(),
        cell,
        share,
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions: Vec::new(),
    });
    let mut state = State::new(id(0, 2), 1, plan(0), None, running);
    state.handle_all_linked();
    for (name, mib, why) in [
        ("a", 64, "in cell 0"),
        ("b", 64, "in cell 1"),
        ("c", 400, "has 324 MiB"),
    ] {
        let acts = state.handle_request(1, CellRequest::AdmitVm(vm(name, mib)));
        let [Action::Answer(1, CellResponse::Refused { why: said })] = &acts[..] else {
            panic!("{name}: {acts:?}");
        };
        assert!(said.contains(why), "{said}");
    }
    let back = AdmitVm {
        runs: true,
        ..vm("a", 700)
    };
    let acts = state.handle_request(2, CellRequest::AdmitVm(back));
    assert!(
        matches!(acts[..], [Action::Answer(2, CellResponse::Hosted(_))]),
        "{acts:?}"
    );
}

/// The process that serves a VM ends its connection, and the next one connects later.
#[test]
fn vm_that_is_handed_over_keeps_its_place_between_two_connections() {
    let mut world = World::new(2);
    let owner = id(1, 1);
    world.ask(owner, 1, CellRequest::AdmitVm(in_cell(1, "a", 64)));
    let adopt = |name: &str| CellRequest::Adopt {
        name: name.to_owned(),
        again: false,
    };
    world.refused(owner, adopt("b"), "VM b has no place in cell 1");
    let state = world.cells.get_mut(&owner).expect("lives");
    assert_eq!(
        state.handle_request(2, adopt("a")),
        [Action::Adopt(2, "a".to_owned(), false)]
    );
    assert_eq!(state.handle_disconnect(1), [Action::AwaitLeft("a".to_owned(), 1)]);
    let back = AdmitVm {
        runs: true,
        ..in_cell(1, "a", 64)
    };
    assert!(matches!(
        world.ask(owner, 3, CellRequest::AdmitVm(back)),
        CellResponse::Hosted(_)
    ));
    world.act(owner, give_up_left);
    world.vms(&[&[], &["a"]]);
    // The next process ends without handing it over, and the one after that does not come.
    world.act(owner, |state| state.handle_disconnect(3));
    world.settle();
    world.vms(&[&[], &[]]);
    world.ask(owner, 4, CellRequest::AdmitVm(in_cell(1, "c", 64)));
    world.act(owner, |state| state.handle_request(5, adopt("c")));
    world.act(owner, |state| state.handle_disconnect(4));
    world.act(owner, give_up_left);
    world.settle();
    world.vms(&[&[], &[]]);
}

/// Names are unique for each owner.
#[test]
fn one_name_of_three_owners_is_three_vms() {
    let mut world = World::new(2);
    for (client, name) in (1..).zip(["web", "1001:web", "1002:web"]) {
        assert!(
            matches!(world.host(client, vm(name, 64)), CellResponse::Hosted(_)),
            "{name}"
        );
    }
    let CellResponse::Refused { why } = world.host(9, vm("1001:web", 64)) else {
        panic!("two of one name of one owner");
    };
    assert!(why.contains("a VM named web is running already"), "{why}");
    assert!(!why.contains("1001"), "{why}");
}

/// Removes the VMs that were left, as when their time is over.
fn give_up_left(state: &mut State) -> Vec<Action> {
    let left = state.left.clone();
    left.iter()
        .flat_map(|(name, number)| state.give_up(name, *number))
        .collect()
}

#[test]
fn vm_that_is_left_has_its_whole_time_whatever_else_is_given_up_meanwhile() {
    let mut world = World::new(1);
    let cell = id(0, 1);
    let host = in_cell(0, "1001:web", 64);
    for client in [1, 2] {
        assert!(matches!(
            world.ask(cell, client, CellRequest::AdmitVm(host.clone())),
            CellResponse::Hosted(_)
        ));
        let state = world.cells.get_mut(&cell).expect("lives");
        assert_eq!(
            state.handle_disconnect(client),
            [Action::AwaitLeft("1001:web".to_owned(), client)]
        );
    }
    // The time of orphans of a start, and the time of the first departure.
    world.act(cell, State::give_up_orphans);
    world.act(cell, |state| state.give_up("1001:web", 1));
    world.vms(&[&["1001:web"]]);
    world.act(cell, |state| state.give_up("1001:web", 2));
    world.vms(&[&[]]);
}

/// The admission server ends, and its next process requests the place that the user claims.
#[test]
fn place_of_a_users_vm_outlives_the_connection_unless_it_is_given_back() {
    let mut world = World::new(1);
    let cell = id(0, 1);
    let host = in_cell(0, "1001:web", 600);
    assert!(matches!(
        world.ask(cell, 1, CellRequest::AdmitVm(host.clone())),
        CellResponse::Hosted(_)
    ));
    let state = world.cells.get_mut(&cell).expect("lives");
    assert_eq!(
        state.handle_disconnect(1),
        [Action::AwaitLeft("1001:web".to_owned(), 1)]
    );
    // Another VM does not get the memory meanwhile, and a request for more than it had is a new VM.
    assert!(matches!(
        world.ask(cell, 2, CellRequest::AdmitVm(in_cell(0, "1002:web", 600))),
        CellResponse::Refused { .. }
    ));
    let more = in_cell(0, "1001:web", 700);
    assert!(matches!(
        world.ask(cell, 3, CellRequest::AdmitVm(more)),
        CellResponse::Refused { .. }
    ));
    assert!(matches!(
        world.ask(cell, 4, CellRequest::AdmitVm(host.clone())),
        CellResponse::Hosted(_)
    ));
    world.act(cell, give_up_left);
    world.vms(&[&["1001:web"]]);
    // A second one of the name is refused while the first has its connection.
    assert!(matches!(
        world.ask(cell, 5, CellRequest::AdmitVm(host)),
        CellResponse::Refused { .. }
    ));
    let leave = CellRequest::Leave {
        name: "1001:web".to_owned(),
    };
    assert_eq!(world.ask(cell, 6, leave), CellResponse::Done);
    world.vms(&[&[]]);
}
