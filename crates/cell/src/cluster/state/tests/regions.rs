//! Regions of a cell's memory that VMs share.

use config::Size;
use protocol::region::Found;
use registry::cluster::interface::{RegionGrant, RegionMember, RegionStatus};

use super::*;

pub(super) const LIMITS: Limits = Limits::of_chunk(16 << 20);

pub(super) fn spec(name: &str, mib: u64) -> RegionSpec {
    RegionSpec {
        name: name.to_owned(),
        size: Size(mib << 20),
        cell: 0,
        readers: vec!["r*".to_owned()],
        writers: vec!["w*".to_owned()],
    }
}

pub(super) fn grant(mib: u64, access: RegionAccess) -> RegionGrant {
    RegionGrant {
        name: "table".to_owned(),
        home: 0,
        bytes: mib << 20,
        access,
        borrowed: Vec::new(),
    }
}

/// A VM of 64 MiB in a cell that writes the region, or reads it if its name begins with `r`.
pub(super) fn member(cell: u16, name: &str) -> AdmitVm {
    let access = match name.starts_with('r') {
        true => RegionAccess::Read,
        false => RegionAccess::Write,
    };
    AdmitVm {
        regions: vec![grant(64, access)],
        ..in_cell(cell, name, 64)
    }
}

pub(super) fn runs(host: &AdmitVm, borrowed: &[LentMemory]) -> RunningVm {
    let mut regions = host.regions.clone();
    regions
        .iter_mut()
        .for_each(|grant| grant.borrowed = borrowed.to_vec());
    RunningVm {
        name: host.name.clone(),
        cell: host.only.expect("a cell"),
        share: host.share,
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions,
    }
}

impl World {
    pub(super) fn sharing(mib: u64) -> Self {
        let mut world = Self::new(0);
        world.specs = vec![spec("table", mib)];
        (0..2).for_each(|number| world.start(id(number, 1)));
        world
    }

    #[track_caller]
    pub(super) fn host_member(&mut self, client: Client, host: AdmitVm) {
        let answer = self.host(client, host);
        assert!(matches!(answer, CellResponse::Hosted(_)), "{answer:?}");
    }

    /// Requests the region of its home for a VM; returns the actions and the answer, if there is one.
    pub(super) fn take(&mut self, home: CellId, vm: &str) -> (Vec<Action>, Option<CellResponse>) {
        let request = CellRequest::TakeRegion {
            vm: vm.to_owned(),
            region: "table".to_owned(),
        };
        self.act(home, |state| state.handle_request(50, request));
        self.settle();
        let answer = self.answers.remove(&(home.number, 50));
        (std::mem::take(&mut self.region_acts), answer)
    }

    #[track_caller]
    fn region_refused(&mut self, vm: &str) -> String {
        match self.take(id(0, 1), vm) {
            (acts, Some(CellResponse::Refused { why })) if acts.is_empty() => why,
            other => panic!("not refused: {other:?}"),
        }
    }

    pub(super) fn leave(&mut self, at: CellId, name: &str) {
        let name = name.to_owned();
        assert_eq!(self.ask(at, 9, CellRequest::Leave { name }), CellResponse::Done);
    }

    /// The probes of the home that are due.
    pub(super) fn probes(&mut self, home: CellId) -> Vec<Action> {
        self.act(home, State::region_probes);
        std::mem::take(&mut self.region_acts)
    }

    /// Reports the result of a probe; returns whether it is to be repeated, and the actions.
    pub(super) fn probed(&mut self, home: CellId, is_used: bool) -> (bool, Vec<Action>) {
        let mut again = false;
        self.act(home, |state| {
            let (is_to_repeat, acts) = state.region_probed("table", is_used);
            again = is_to_repeat;
            acts
        });
        self.settle();
        (again, std::mem::take(&mut self.region_acts))
    }

    pub(super) fn given_mib(&mut self, at: CellId) -> u64 {
        self.status(at).cells[0].given_bytes >> 20
    }
}

fn created() -> Action {
    Action::CreateRegion {
        name: "table".to_owned(),
        bytes: 64 << 20,
        nodes: vec![0],
    }
}

fn sent(access: RegionAccess) -> Action {
    Action::SendRegion {
        client: 50,
        name: "table".to_owned(),
        access,
        borrowed: Vec::new(),
    }
}

fn probe(is_held: bool) -> Action {
    let name = "table".to_owned();
    Action::ProbeRegion { name, is_held }
}

fn closed() -> Action {
    Action::CloseRegion("table".to_owned())
}

#[test]
fn memory_of_a_region_is_given_once_and_freed_after_its_last_member() {
    use RegionAccess::{Read, Write};
    let mut world = World::sharing(64);
    let home = id(0, 1);
    world.host_member(1, member(0, "w"));
    world.host_member(2, member(1, "r"));
    assert_eq!(world.given_mib(home), 64, "no member has it yet");
    assert_eq!(world.take(home, "w"), (vec![created(), sent(Write)], None));
    assert_eq!(world.take(home, "r"), (vec![sent(Read)], None));
    for at in [home, id(1, 1)] {
        assert_eq!(world.given_mib(at), 128);
        let member = |vm: &str, cell, access| RegionMember {
            vm: vm.to_owned(),
            cell,
            access,
        };
        let region = RegionStatus {
            name: "table".to_owned(),
            bytes: 64 << 20,
            borrowed: Vec::new(),
            members: vec![member("r", 1, Read), member("w", 0, Write)],
        };
        assert_eq!(world.status(at).cells[0].regions, [region]);
    }
    assert_eq!(world.probes(home), []);
    world.leave(home, "w");
    assert_eq!(world.probes(home), [], "a member is left");
    world.leave(id(1, 1), "r");
    assert_eq!(world.probes(home), [probe(true)]);
    assert_eq!(world.probes(home), [], "one probe at a time");
    assert_eq!(world.probed(home, true), (true, vec![]), "a process still has it");
    assert_eq!(world.given_mib(home), 64);
    assert_eq!(world.probed(home, false), (false, vec![closed()]));
    assert_eq!(world.given_mib(home), 0);
    assert_eq!(world.status(id(1, 1)).cells[0].regions, []);
    world.host_member(3, member(0, "w2"));
    assert_eq!(world.take(home, "w2"), (vec![created(), sent(Write)], None));
}

#[test]
fn other_cells_count_the_memory_of_a_region_as_given() {
    let mut world = World::sharing(64);
    world.host_member(1, member(0, "w"));
    world.take(id(0, 1), "w");
    let large = in_cell(0, "large", 900);
    // 1024 MiB, of which VM and region have 128.
    let why = match world.ask(id(1, 1), 2, CellRequest::AdmitVm(large)) {
        CellResponse::Refused { why } => why,
        other => panic!("{other:?}"),
    };
    assert!(why.contains("896"), "{why}");
}

#[test]
fn vm_without_the_right_the_cell_or_the_room_is_refused() {
    let mut world = World::sharing(64);
    let mut reader_that_writes = member(0, "r");
    reader_that_writes.regions = vec![grant(64, RegionAccess::Write)];
    world.host_member(1, reader_that_writes);
    world.host_member(2, member(1, "stranger"));
    assert!(
        world
            .region_refused("r")
            .contains("VM r may not write shared region table; add it to `writers`")
    );
    assert!(world.region_refused("stranger").contains("may not write"));
    let mut other = member(0, "w");
    other.regions[0].name = "other".to_owned();
    world.host_member(3, other);
    let (_, answer) = world.take(id(0, 1), "w");
    assert!(
        matches!(answer, Some(CellResponse::Later { .. })),
        "it was not admitted with it: {answer:?}"
    );
    let (_, answer) = world.take(id(0, 1), "nobody");
    assert!(matches!(answer, Some(CellResponse::Later { .. })), "{answer:?}");
    let away = AdmitVm {
        cells: vec![1],
        ..member(1, "w2")
    };
    match world.ask(id(1, 1), 4, CellRequest::AdmitVm(away)) {
        CellResponse::Refused { why } => assert!(why.contains("add 0 to `cells`"), "{why}"),
        other => panic!("{other:?}"),
    }
    let mut world = World::sharing(2048);
    world.host_member(1, member(0, "w"));
    assert!(
        world
            .region_refused("w")
            .contains("cell 0 has 960 MiB for shared region table of 2048 MiB")
    );
    assert_eq!(world.given_mib(id(0, 1)), 64, "nothing is given");
}

#[test]
fn region_keeps_its_size_as_long_as_its_members_run() {
    let mut world = World::sharing(64);
    world.running = vec![runs(&member(1, "r"), &[])];
    world.die(id(0, 1));
    world.specs = vec![spec("table", 128)];
    world.start(id(0, 2));
    world.host_member(1, member(1, "w"));
    let (_, answer) = world.take(id(0, 2), "w");
    match answer {
        Some(CellResponse::Refused { why }) => assert!(why.contains("64 MiB as long as"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn next_process_of_the_home_seeks_the_file_and_counts_the_memory() {
    let mut world = World::sharing(64);
    world.host_member(1, member(1, "w"));
    world.take(id(0, 1), "w");
    world.running = vec![runs(&member(1, "w"), &[])];
    world.die(id(0, 1));
    world.start(id(0, 2));
    let home = id(0, 2);
    assert_eq!(world.given_mib(home), 64, "of the region");
    world.host_member(2, member(0, "w2"));
    let search = Action::SearchRegion {
        name: "table".to_owned(),
        bytes: 64 << 20,
        without: vec!["w2".to_owned()],
    };
    let (acts, answer) = world.take(home, "w2");
    assert_eq!(acts, [search]);
    assert!(matches!(answer, Some(CellResponse::Later { .. })), "{answer:?}");
    let state = world.cells.get_mut(&home).unwrap();
    assert_eq!(state.region_sought("table", Found::File), (true, Vec::new()));
    assert_eq!(world.take(home, "w2"), (vec![sent(RegionAccess::Write)], None));
    assert_eq!(world.given_mib(home), 128, "the region is counted once");
}

/// The state of a region follows from the VMs that run alone.
#[test]
fn region_whose_last_member_ended_while_its_home_was_down_can_be_used_again() {
    let mut world = World::sharing(64);
    world.host_member(1, member(1, "w"));
    world.take(id(0, 1), "w");
    world.die(id(0, 1));
    world.leave(id(1, 1), "w");
    world.start(id(0, 2));
    assert_eq!(world.given_mib(id(0, 2)), 0);
    world.host_member(2, member(1, "w"));
    assert_eq!(
        world.take(id(0, 2), "w"),
        (vec![created(), sent(RegionAccess::Write)], None)
    );
    // The member ends during the restart, after its record was read.
    let mut world = World::sharing(64);
    world.running = vec![runs(&member(1, "w"), &[])];
    world.die(id(0, 1));
    world.start(id(0, 2));
    world.act(id(1, 1), State::give_up_orphans);
    world.settle();
    assert_eq!(world.probes(id(0, 2)), [probe(false)]);
    assert_eq!(world.probed(id(0, 2), false), (false, vec![closed()]));
    assert_eq!(world.given_mib(id(0, 2)), 0);
}

/// A VM that the table has lost is still a reason to keep the file.
#[test]
fn region_is_kept_while_a_vm_without_an_entry_has_it() {
    let mut world = World::sharing(64);
    let home = id(0, 1);
    world.host_member(1, member(1, "w"));
    world.take(home, "w");
    world.leave(id(1, 1), "w");
    assert_eq!(world.probes(home), [probe(true)]);
    assert_eq!(world.probed(home, true), (true, vec![]));
    world.host_member(2, member(0, "w2"));
    assert_eq!(
        world.take(home, "w2"),
        (vec![sent(RegionAccess::Write)], None),
        "the same file"
    );
    assert_eq!(world.probed(home, true), (false, vec![]), "it has a member");
    world.leave(home, "w2");
    assert_eq!(world.probes(home), [probe(true)]);
}

#[test]
fn failure_of_the_home_ends_members_of_other_cells() {
    let mut world = World::sharing(64);
    world.host_member(1, member(1, "w"));
    world.host_member(2, in_cell(1, "other", 64));
    world.take(id(0, 1), "w");
    world.die(id(0, 1));
    world.act(id(1, 1), |state| state.failed(0));
    assert_eq!(world.ended, [(1, "w".to_owned())]);
    match world.ask(id(1, 1), 3, CellRequest::AdmitVm(member(1, "w3"))) {
        CellResponse::Refused { why } => assert!(why.contains("cell 0, which has failed"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn region_borrows_as_a_vm_does_and_its_members_depend_on_the_lender() {
    let mut world = World::new(0);
    world.limits = Some(LIMITS);
    world.specs = vec![spec("table", 1200)];
    (0..2).for_each(|number| world.start(id(number, 1)));
    let mut host = member(1, "w");
    host.regions = vec![grant(1200, RegionAccess::Write)];
    world.host_member(1, host.clone());
    let (acts, answer) = world.take(id(0, 1), "w");
    assert_eq!(answer, None);
    let borrowed = vec![part(1, 176)];
    let [
        Action::CreateRegion { nodes, .. },
        Action::SendRegion {
            borrowed: lenders, ..
        },
    ] = &acts[..]
    else {
        panic!("{acts:?}");
    };
    assert_eq!((&nodes[..], lenders), (&[0, 1][..], &borrowed));
    assert_eq!(world.status(id(1, 1)).cells[0].regions[0].borrowed, borrowed);
    // The loan is in use: its lender does not recall it, in whichever life.
    world.running = vec![runs(&host, &borrowed)];
    world.lent.clear();
    let used = super::super::loans::used(&world.running, 1);
    assert_eq!(used, [(0, 176 << 20)].into());
    world.die(id(1, 1));
    world.act(id(0, 1), |state| state.failed(1));
    assert_eq!(world.ended, [(0, "w".to_owned())], "the heir ends the member");
}

#[test]
fn probe_of_a_region_that_a_search_has_given_up_ends() {
    let mut world = World::sharing(64);
    world.running = vec![runs(&member(1, "w"), &[])];
    world.die(id(0, 1));
    world.start(id(0, 2));
    let state = world.cells.get_mut(&id(0, 2)).unwrap();
    let (is_kept, acts) = state.region_sought("table", Found::Nowhere);
    assert!(!is_kept && acts.contains(&closed()), "{acts:?}");
    assert_eq!(world.probed(id(0, 2), true), (false, vec![]));
    assert_eq!(world.given_mib(id(0, 2)), 0);
}
