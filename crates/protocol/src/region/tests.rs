use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BYTES: u64 = 2 << 20;

#[test]
fn first_member_creates_the_file_and_later_ones_get_it() {
    let mut regions = Regions::default();
    assert_eq!(regions.request("a", BYTES), Request::Create);
    assert!(regions.create("a", BYTES));
    assert!(!regions.create("a", BYTES), "it has a file");
    assert_eq!(regions.request("a", BYTES), Request::Send);
    assert_eq!(regions.request("a", 2 * BYTES), Request::OtherSize(BYTES));
    assert_eq!(regions.request("b", BYTES), Request::Create);
}

#[test]
fn next_process_seeks_the_file_before_a_member_gets_it() {
    let mut regions = Regions::new([("a".to_owned(), BYTES)]);
    assert_eq!(regions.request("a", BYTES), Request::Search);
    assert_eq!(regions.request("a", BYTES), Request::Wait, "one search at a time");
    assert_eq!(regions.sought("a", Found::Unknown), Outcome::None);
    assert_eq!(
        regions.request("a", BYTES),
        Request::Search,
        "a failed search is repeated"
    );
    assert_eq!(regions.sought("a", Found::File), Outcome::Keep);
    for found in [Found::File, Found::Nowhere, Found::Unknown] {
        assert_eq!(regions.sought("a", found), Outcome::None, "the home has the file");
    }
    assert_eq!(regions.request("a", BYTES), Request::Send);
}

#[test]
fn region_whose_file_is_lost_can_be_created_when_its_members_have_ended() {
    let mut regions = Regions::new([("a".to_owned(), BYTES)]);
    assert_eq!(regions.request("a", BYTES), Request::Search);
    assert!(!regions.probed("a", true, false), "a VM has the file");
    assert!(regions.probed("a", false, false));
    assert_eq!(
        regions.sought("a", Found::File),
        Outcome::None,
        "it ends after the region"
    );
    assert_eq!(regions.request("a", 2 * BYTES), Request::Create);
}

#[test]
fn vms_that_start_while_the_home_is_down_get_a_new_file() {
    let mut regions = Regions::new([("a".to_owned(), BYTES)]);
    assert_eq!(regions.request("a", BYTES), Request::Search);
    assert_eq!(regions.sought("a", Found::Nowhere), Outcome::Free);
    assert_eq!(regions.request("a", BYTES), Request::Create);
}

#[test]
fn member_that_comes_during_a_probe_keeps_the_region() {
    let mut regions = Regions::default();
    regions.create("a", BYTES);
    assert_eq!(regions.without_members(|_| true), [""; 0]);
    assert_eq!(regions.without_members(|_| false), ["a"]);
    assert!(!regions.probed("a", false, true));
    assert_eq!(regions.request("a", BYTES), Request::Send);
}

/// A file of a region, by its number.
type File = u32;

/// A VM that runs.
#[derive(Clone, Debug)]
struct Vm {
    region: &'static str,
    /// Whether the table has it.
    is_listed: bool,
    file: Option<File>,
    /// Whether it has requested the file from this process of the home, and has none.
    has_requested: bool,
    /// Whether another process can get its descriptor.
    is_reachable: bool,
}

/// A home with VMs, as the host sees them.
#[derive(Default)]
struct World {
    regions: Regions,
    /// The files that the home's process has.
    held: BTreeMap<String, File>,
    vms: Vec<Vm>,
    files: File,
    /// Searches that are under way.
    searches: BTreeSet<String>,
}

#[derive(Clone, Debug)]
enum Step {
    Start(&'static str),
    /// A VM requests its region.
    Request(usize),
    End(usize),
    /// The table loses a VM that runs.
    Unlist(usize),
    /// The process that serves a VM dies, or the next one adopts it.
    Reach(usize, bool),
    Search,
    Probe,
    Restart,
}

impl World {
    fn at(&self, index: usize) -> Option<usize> {
        (!self.vms.is_empty()).then(|| index % self.vms.len())
    }

    fn has_member(&self, name: &str) -> bool {
        self.vms.iter().any(|vm| vm.is_listed && vm.region == name)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Start(region) => self.vms.push(Vm {
                region,
                is_listed: true,
                file: None,
                has_requested: false,
                is_reachable: true,
            }),
            Step::Request(index) => self.request(index),
            Step::End(index) => {
                if let Some(at) = self.at(index) {
                    self.vms.remove(at);
                }
            }
            Step::Unlist(index) => {
                if let Some(at) = self.at(index) {
                    self.vms[at].is_listed = false;
                }
            }
            Step::Reach(index, is_reachable) => {
                if let Some(at) = self.at(index) {
                    self.vms[at].is_reachable = is_reachable;
                }
            }
            Step::Search => self.search(),
            Step::Probe => self.probe(),
            Step::Restart => {
                self.held.clear();
                self.searches.clear();
                self.vms.iter_mut().for_each(|vm| vm.has_requested = false);
                let running = self.vms.iter().map(|vm| (vm.region.to_owned(), BYTES));
                self.regions = Regions::new(running);
            }
        }
    }

    fn request(&mut self, index: usize) {
        let Some(at) = self.at(index) else { return };
        let (name, is_listed) = (self.vms[at].region, self.vms[at].is_listed);
        // The home sends files to VMs in the table only.
        if !is_listed || self.vms[at].file.is_some() {
            return;
        }
        self.vms[at].has_requested = true;
        match self.regions.request(name, BYTES) {
            Request::Create => {
                assert!(self.regions.create(name, BYTES));
                self.files += 1;
                assert_eq!(self.held.insert(name.to_owned(), self.files), None);
                self.vms[at].file = Some(self.files);
            }
            Request::Send => self.vms[at].file = Some(self.held[name]),
            Request::Search => assert!(self.searches.insert(name.to_owned()), "two searches"),
            Request::Wait => assert!(self.searches.contains(name), "no search ends the wait"),
            Request::OtherSize(_) => unreachable!("all sizes are the same"),
        }
    }

    fn search(&mut self) {
        for name in std::mem::take(&mut self.searches) {
            let members = || self.vms.iter().filter(|vm| vm.region == name);
            let file = members().filter(|vm| vm.is_reachable).find_map(|vm| vm.file);
            let found = match file {
                Some(_) => Found::File,
                None if members().all(|vm| vm.has_requested) => Found::Nowhere,
                None => Found::Unknown,
            };
            if self.regions.sought(&name, found) == Outcome::Keep {
                self.held.insert(name, file.unwrap());
            }
        }
    }

    fn probe(&mut self) {
        for name in self.regions.without_members(|name| self.has_member(name)) {
            // With the file, the home tries its lock. Without it, the host's registry has the VMs that run.
            let is_used = match self.regions.is_held(&name) {
                true => self.vms.iter().any(|vm| vm.file == Some(self.held[&name])),
                false => self.vms.iter().any(|vm| vm.region == name),
            };
            if self.regions.probed(&name, is_used, self.has_member(&name)) {
                self.held.remove(&name);
            }
        }
    }

    fn check(&self) {
        for name in ["a", "b"] {
            let of_vms = self.vms.iter().filter(|vm| vm.region == name);
            let files = of_vms
                .filter_map(|vm| vm.file)
                .chain(self.held.get(name).copied());
            let files: BTreeSet<File> = files.collect();
            assert!(files.len() <= 1, "two files of {name}: {files:?}");
            let counted = self.regions.iter().filter(|(known, _)| *known == name).count();
            assert!(counted == 1 || files.is_empty(), "{name} is not counted");
        }
        let held: Vec<&str> = self.held.keys().map(String::as_str).collect();
        let known = self.regions.iter().map(|(name, _)| name);
        let known: Vec<&str> = known.filter(|name| self.regions.is_held(name)).collect();
        assert_eq!(held, known);
    }
}

fn step() -> impl Strategy<Value = Step> {
    let name = prop_oneof![Just("a"), Just("b")];
    prop_oneof![
        2 => name.prop_map(Step::Start),
        4 => any::<usize>().prop_map(Step::Request),
        2 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::Unlist),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(vm, is)| Step::Reach(vm, is)),
        2 => Just(Step::Search),
        2 => Just(Step::Probe),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn region_never_has_two_files_and_is_given_up_after_its_last_member(
        steps in prop::collection::vec(step(), 1..60)
    ) {
        let mut world = World::default();
        for step in steps {
            world.step(step);
            world.check();
        }
        // The last members end: all memory is free, and the regions can be created again.
        world.vms.clear();
        world.step(Step::Search);
        world.step(Step::Probe);
        world.check();
        prop_assert_eq!(world.regions.iter().count(), 0);
        for name in ["a", "b"] {
            prop_assert_eq!(world.regions.request(name, BYTES), Request::Create);
        }
    }
}
