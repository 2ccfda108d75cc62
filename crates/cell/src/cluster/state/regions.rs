//! Shared regions of this cell's memory ([`protocol::region`]): requests of VMs, and the memory.
//!
//! A VM is a member of a region as long as the table has it: its entry has its grants. The region's memory is
//! given as a VM's is, under a name that no VM has.

use std::collections::{BTreeMap, BTreeSet};

use config::cluster::RegionSpec;
use policy::memory::borrowing::allows;
use protocol::grant::{Amounts, Ledger};
use protocol::region::{Found, Outcome, Regions, Request};
use registry::cluster::interface::{
    AdmitVm, CellResponse, LentMemory, RegionGrant, RegionMember, RegionStatus, RunningVm, VmShare,
};

use super::view::{KnownCell, KnownVm, list};
use super::{Action, Client, RegionEntry, State, loans};

/// A reason why a VM has no shared region, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum RegionError {
    #[error(
        "shared region {region} is memory of cell {home}, which is no cell of this host; start the VM on \
         that host, or leave the region out"
    )]
    OtherHost { region: String, home: u16 },
    #[error("shared region {region} is memory of cell {home}, which has failed; leave the region out")]
    Failed { region: String, home: u16 },
    #[error(
        "shared region {region} is memory of cell {home}, on which the VM may not depend; add {home} to \
         `cells`, or leave the region out"
    )]
    NotAllowed { region: String, home: u16 },
    #[error("cell {home} has no shared region {region}; see `[[shared]]` in the cluster file")]
    Unknown { region: String, home: u16 },
    #[error(
        "VM {vm} may not {what} shared region {region}; add it to `{list}` of that region in the cluster \
         file, or leave the region out"
    )]
    Access {
        vm: String,
        region: String,
        what: &'static str,
        list: &'static str,
    },
    #[error(
        "shared region {region} has {has_mib} MiB as long as its members run, and {wanted_mib} MiB in the \
         cluster file; end them first"
    )]
    OtherSize {
        region: String,
        has_mib: u64,
        wanted_mib: u64,
    },
    #[error(
        "cell {home} has {free_mib} MiB for shared region {region} of {wanted_mib} MiB; end a VM there, or \
         make the region smaller"
    )]
    TooLarge {
        region: String,
        home: u16,
        free_mib: u64,
        wanted_mib: u64,
    },
}

/// A reason why a VM receives a shared region later.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
enum NotYet {
    #[error("cell {0} is only starting")]
    Starting(u16),
    #[error("cell {cell} has no VM {vm} with the shared region {region}")]
    NotAdmitted { cell: u16, vm: String, region: String },
    #[error(
        "no VM that has the shared region {0} sends it, after its cell has started again; end the VMs that \
         have it, or try again"
    )]
    Sought(String),
}

/// Request of a client that waits for memory of other cells.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Waiting {
    /// A region for a VM.
    Take {
        /// Name of the VM.
        vm: String,
        /// Name of the region.
        region: String,
    },
    /// A move of a region's memory.
    Move {
        /// Name of the region.
        region: String,
        /// The cell whose memory it takes.
        to: u16,
    },
}

/// The shared regions of this cell.
#[derive(Debug, Default)]
pub(super) struct SharedRegions {
    /// All regions of the cluster.
    specs: Vec<RegionSpec>,
    regions: Regions,
    /// Clients that wait for memory of other cells.
    waiting: BTreeMap<Client, Waiting>,
    /// VMs that requested a region, by region, and have not got it from this process.
    without: BTreeMap<String, BTreeSet<String>>,
    /// Regions that are probed.
    probed: BTreeSet<String>,
}

/// Name under which a region has its memory. No VM's name has these characters.
pub(super) fn ledger_name(region: &str) -> String {
    format!("region/{region}/")
}

/// The memory of a region by cell, as its members have recorded it. During a move they may differ: then it is
/// all that any of them has.
fn parts_of_grants(me: u16, grants: &[&RegionGrant]) -> Amounts {
    let parts = |grant: &RegionGrant| {
        let share = VmShare {
            memory_bytes: grant.bytes,
            ..VmShare::default()
        };
        loans::parts(me, share, &grant.borrowed)
    };
    // A VM that has not got the region yet does not know the lenders.
    let know = grants.iter().filter(|grant| !grant.borrowed.is_empty());
    let mut all = Amounts::new();
    for (cell, bytes) in know.flat_map(|grant| parts(grant)) {
        let most = all.entry(cell).or_default();
        *most = bytes.max(*most);
    }
    all.retain(|_, bytes| *bytes > 0);
    match grants.first().filter(|_| all.is_empty()) {
        Some(grant) => parts(grant),
        None => all,
    }
}

impl SharedRegions {
    /// The regions of a cell's VMs that outlived its last process. Their memory is counted in `ledger`.
    pub(super) fn find(me: u16, running: &[RunningVm], ledger: &mut Ledger) -> Self {
        let grants = running.iter().flat_map(|vm| &vm.regions);
        let mut found: BTreeMap<&str, Vec<&RegionGrant>> = BTreeMap::new();
        for grant in grants.filter(|grant| grant.home == me) {
            found.entry(&grant.name).or_default().push(grant);
        }
        for (name, grants) in &found {
            ledger.find(ledger_name(name), parts_of_grants(me, grants));
        }
        let sizes = found.iter().filter_map(|(name, grants)| {
            let first = grants.first()?;
            Some(((*name).to_owned(), first.bytes))
        });
        Self {
            regions: Regions::new(sizes),
            ..Self::default()
        }
    }

    /// The regions that have a file, as the cell publishes them.
    pub(super) fn entries(&self, ledger: &Ledger, me: u16) -> Vec<RegionEntry> {
        let entry = |(name, bytes): (&str, u64)| {
            let mut borrowed = ledger.parts(&ledger_name(name)).cloned().unwrap_or_default();
            borrowed.remove(&me);
            RegionEntry {
                name: name.to_owned(),
                bytes,
                borrowed: list(&borrowed),
            }
        };
        self.regions.iter().map(entry).collect()
    }

    /// Size of a region that has a file.
    pub(super) fn bytes_of(&self, name: &str) -> Option<u64> {
        let mut regions = self.regions.iter();
        regions.find(|(known, _)| *known == name).map(|(_, bytes)| bytes)
    }

    /// Records that the request of a client waits for memory.
    pub(super) fn wait(&mut self, client: Client, request: Waiting) {
        self.waiting.insert(client, request);
    }

    /// Ends the wait of a client for memory; returns its request.
    pub(super) fn take_waiting(&mut self, client: Client) -> Option<Waiting> {
        self.waiting.remove(&client)
    }
}

impl State {
    /// The cell of a cluster with these shared regions.
    #[must_use]
    pub fn with_regions(mut self, specs: Vec<RegionSpec>) -> Self {
        self.shared.specs = specs;
        self
    }

    /// Checks that a VM can have its shared regions in this host.
    pub(super) fn check_grants(&self, host: &AdmitVm) -> Result<(), RegionError> {
        for grant in &host.regions {
            let (region, home) = (grant.name.clone(), grant.home);
            let known = self.cells().find(|cell| cell.number == home);
            if known.is_some_and(|cell| cell.plan.host != self.plan.host) {
                return Err(RegionError::OtherHost { region, home });
            }
            if self.has_failed(home) {
                return Err(RegionError::Failed { region, home });
            }
            if !allows(&host.cells, home) {
                return Err(RegionError::NotAllowed { region, home });
            }
        }
        Ok(())
    }

    /// Handles the request of a VM for a region, which has waited for memory of other cells `round` times.
    pub(super) fn take_region_in_round(
        &mut self,
        client: Client,
        vm: String,
        region: String,
        round: u8,
    ) -> Vec<Action> {
        let later = |why: NotYet| {
            let why = why.to_string();
            vec![Action::Answer(client, CellResponse::Later { why })]
        };
        let refused = |why: RegionError| {
            let why = why.to_string();
            vec![Action::Answer(client, CellResponse::Refused { why })]
        };
        if self.early.is_some() {
            return later(NotYet::Starting(self.me.number));
        }
        let Some(grant) = self.grant_of(&vm, &region) else {
            let cell = self.me.number;
            return later(NotYet::NotAdmitted { cell, vm, region });
        };
        let bytes = match self.check_access(&vm, &grant) {
            Ok(bytes) => bytes,
            Err(why) => return refused(why),
        };
        match self.shared.regions.request(&region, bytes) {
            Request::Create => return self.create_region(client, vm, &grant, bytes, round),
            Request::Send => {}
            Request::OtherSize(has) => {
                return refused(RegionError::OtherSize {
                    region,
                    has_mib: has >> 20,
                    wanted_mib: bytes >> 20,
                });
            }
            found @ (Request::Search | Request::Wait) => {
                let without = self.shared.without.entry(region.clone()).or_default();
                without.insert(vm);
                let without = without.iter().cloned().collect();
                let mut acts = later(NotYet::Sought(region.clone()));
                if found == Request::Search {
                    acts.push(Action::SearchRegion {
                        name: region,
                        bytes,
                        without,
                    });
                }
                return acts;
            }
        }
        vec![self.send_region(client, &grant)]
    }

    /// A VM's grant of a region of this cell, by the table.
    fn grant_of(&self, vm: &str, region: &str) -> Option<RegionGrant> {
        let vm = self.vms().find(|known| known.name == vm)?;
        let mut grants = vm.regions.iter();
        let grant = grants.find(|grant| grant.name == region && grant.home == self.me.number)?;
        Some(grant.clone())
    }

    /// Checks a grant by the cluster file; returns the region's size.
    fn check_access(&self, vm: &str, grant: &RegionGrant) -> Result<u64, RegionError> {
        use config::cluster::RegionAccess::{Read, Write};
        let (region, home) = (grant.name.clone(), self.me.number);
        let mut specs = self.shared.specs.iter();
        let Some(spec) = specs.find(|spec| spec.name == region && spec.cell == home) else {
            return Err(RegionError::Unknown { region, home });
        };
        if spec.allows(vm, grant.access) {
            return Ok(spec.size.0);
        }
        let (what, list) = match grant.access {
            Read => ("read", "readers"),
            Write => ("write", "writers"),
        };
        Err(RegionError::Access {
            vm: vm.to_owned(),
            region,
            what,
            list,
        })
    }

    /// Gives a region its memory, and has its file created for the first member.
    fn create_region(
        &mut self,
        client: Client,
        vm: String,
        grant: &RegionGrant,
        bytes: u64,
        round: u8,
    ) -> Vec<Action> {
        let (me, name) = (self.me.number, grant.name.clone());
        let memory = AdmitVm {
            only: Some(me),
            ..AdmitVm::new(
                ledger_name(&name),
                VmShare {
                    memory_bytes: bytes,
                    ..VmShare::default()
                },
            )
        };
        if self.free_for(&memory) < bytes || !self.occupy(&memory) {
            if let Some(asked) = self.begin_to_borrow(client, &memory, round) {
                let region = name;
                self.shared.wait(client, Waiting::Take { vm, region });
                return asked;
            }
            let why = RegionError::TooLarge {
                region: name,
                home: me,
                free_mib: self.free_for(&memory) >> 20,
                wanted_mib: bytes >> 20,
            };
            let why = why.to_string();
            return vec![Action::Answer(client, CellResponse::Refused { why })];
        }
        self.shared.regions.create(&name, bytes);
        let nodes = self.place(&memory.name).plan.nodes;
        let mut acts = self.publish_regions();
        acts.push(Action::CreateRegion { name, bytes, nodes });
        acts.push(self.send_region(client, grant));
        acts
    }

    /// Seeks the file of a region whose memory is to move, if this process does not have it. The client tries
    /// again later.
    pub(super) fn seek_region_to_move(
        &mut self,
        client: Client,
        region: &str,
        bytes: u64,
    ) -> Option<Vec<Action>> {
        let found = self.shared.regions.request(region, bytes);
        if !matches!(found, Request::Search | Request::Wait) {
            return None;
        }
        let name = region.to_owned();
        let why = NotYet::Sought(name.clone()).to_string();
        let later = Action::Answer(client, CellResponse::Later { why });
        let without = self.shared.without.get(region);
        let without = without.map_or_else(Vec::new, |vms| vms.iter().cloned().collect());
        let search = Action::SearchRegion { name, bytes, without };
        Some(match found {
            Request::Search => vec![later, search],
            _ => vec![later],
        })
    }

    fn send_region(&self, client: Client, grant: &RegionGrant) -> Action {
        let (name, access) = (grant.name.clone(), grant.access);
        Action::SendRegion {
            client,
            borrowed: self.region_lenders(&name, grant.bytes),
            name,
            access,
        }
    }

    /// Handles the result of [`Action::SearchRegion`]. Returns whether the caller keeps the file, if there is
    /// one.
    pub fn region_sought(&mut self, name: &str, found: Found) -> (bool, Vec<Action>) {
        match self.shared.regions.sought(name, found) {
            Outcome::Keep => (true, Vec::new()),
            Outcome::None => (false, Vec::new()),
            Outcome::Free => (false, self.free_region(name)),
        }
    }

    /// The probes that are due: of regions that have no member.
    pub fn region_probes(&mut self) -> Vec<Action> {
        if self.shared.regions.iter().next().is_none() {
            return Vec::new();
        }
        let members: BTreeSet<&str> = self.members().map(|(grant, _)| &grant.name[..]).collect();
        let unused = self.shared.regions.without_members(|name| members.contains(name));
        let due = unused
            .into_iter()
            .filter(|name| !self.shared.probed.contains(name));
        let due: Vec<String> = due.collect();
        self.shared.probed.extend(due.iter().cloned());
        due.into_iter().map(|name| self.probe(name)).collect()
    }

    /// Repeats the probe of a region that a VM still had.
    pub fn probe_region_again(&self, name: String) -> Action {
        self.probe(name)
    }

    fn probe(&self, name: String) -> Action {
        let is_held = self.shared.regions.is_held(&name);
        Action::ProbeRegion { name, is_held }
    }

    /// Handles the result of [`Action::ProbeRegion`]. Returns whether the probe is to be repeated after a
    /// while.
    pub fn region_probed(&mut self, name: &str, is_used: bool) -> (bool, Vec<Action>) {
        if !self.shared.regions.is_known(name) {
            // A search has found that no VM has it.
            self.shared.probed.remove(name);
            return (false, Vec::new());
        }
        let has_member = self.members().any(|(grant, _)| grant.name == name);
        if self.shared.regions.probed(name, is_used, has_member) {
            return (false, self.free_region(name));
        }
        if has_member {
            self.shared.probed.remove(name);
        }
        (!has_member, Vec::new())
    }

    /// Handles the failure to create a region's file.
    pub fn region_not_created(&mut self, name: &str) -> Vec<Action> {
        match self.shared.regions.not_created(name) {
            true => self.free_region(name),
            false => Vec::new(),
        }
    }

    /// Frees the memory of a region that was given up.
    fn free_region(&mut self, name: &str) -> Vec<Action> {
        self.shared.probed.remove(name);
        self.shared.without.remove(name);
        self.ledger.vacate(&ledger_name(name));
        self.pass_is_due();
        let mut acts = self.publish_regions();
        acts.extend(self.region_moves.end(name));
        acts.push(Action::CloseRegion(name.to_owned()));
        acts
    }

    fn publish_regions(&mut self) -> Vec<Action> {
        let (_, effects) = self.publish().unwrap_or_default();
        self.acts(effects)
    }

    /// The grants of regions of this cell, each with its VM.
    pub(super) fn members(&self) -> impl Iterator<Item = (&RegionGrant, KnownVm<'_>)> {
        self.members_of(self.me.number)
    }

    fn members_of(&self, home: u16) -> impl Iterator<Item = (&RegionGrant, KnownVm<'_>)> {
        self.vms().flat_map(move |vm| {
            let of_home = vm.regions.iter().filter(move |grant| grant.home == home);
            of_home.map(move |grant| (grant, vm))
        })
    }

    /// Whether a VM has a region whose memory is in part of a cell: by the home's entry, as the memory may
    /// have moved since the VM's grant.
    pub(super) fn has_region_of(&self, vm: &KnownVm<'_>, cell: u16) -> bool {
        let depends = |grant: &RegionGrant| {
            let mut cells = self.cells();
            let home = cells.find(|home| home.number == grant.home);
            let mut regions = home.into_iter().flat_map(|home| home.regions);
            let entry = regions.find(|entry| entry.name == grant.name);
            match entry {
                Some(entry) => grant.home == cell || entry.borrowed.iter().any(|part| part.cell == cell),
                None => grant.depends_on(cell),
            }
        };
        vm.regions.iter().any(depends)
    }

    /// The regions of a cell with memory of a lender, and the bytes.
    pub(super) fn regions_with_memory_of(&self, holder: u16, lender: u16) -> Vec<(&str, u64)> {
        let cells = self.cells().filter(|cell| cell.number == holder);
        let regions = cells.flat_map(|cell| cell.regions);
        let parts = regions.flat_map(|region| region.borrowed.iter().map(|part| (&region.name[..], part)));
        parts
            .filter(|(_, part)| part.cell == lender)
            .map(|(name, part)| (name, part.bytes))
            .collect()
    }

    /// The memory of other cells that the VMs and regions of a cell have.
    pub(super) fn parts_of(&self, holder: u16) -> impl Iterator<Item = &LentMemory> {
        let vms = self.vms().filter(move |vm| vm.cell == holder);
        let regions = self.cells().filter(move |cell| cell.number == holder);
        let regions = regions.flat_map(|cell| cell.regions);
        vms.flat_map(|vm| vm.borrowed)
            .chain(regions.flat_map(|region| &region.borrowed))
    }

    /// Memory of a cell's VMs and regions.
    pub(super) fn given_by(&self, cell: &KnownCell<'_>) -> u64 {
        let vms = self.vms().filter(|vm| vm.cell == cell.number);
        let regions = cell.regions.iter().map(|region| region.bytes);
        let bytes = vms.map(|vm| vm.share.memory_bytes).chain(regions);
        bytes.fold(0, u64::saturating_add)
    }

    /// The regions of a cell with their members, for clients.
    pub(super) fn region_status(&self, cell: &KnownCell<'_>) -> Vec<RegionStatus> {
        if self.has_failed(cell.number) {
            return Vec::new();
        }
        let status = |region: &RegionEntry| {
            let members = self.members_of(cell.number);
            let members = members.filter(|(grant, _)| grant.name == region.name);
            RegionStatus {
                name: region.name.clone(),
                bytes: region.bytes,
                borrowed: region.borrowed.clone(),
                members: members
                    .map(|(grant, vm)| RegionMember {
                        vm: vm.name.to_owned(),
                        cell: vm.cell,
                        access: grant.access,
                    })
                    .collect(),
            }
        };
        cell.regions.iter().map(status).collect()
    }
}
