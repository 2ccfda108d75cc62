//! Placement of VMs.

use std::fmt::Display;

use policy::memory::borrowing::allows;
use policy::placement::{Assertions, CellCapacity, Want, place, refusals};
use registry::cluster::interface::{AdmitVm, CellResponse, SHARD_SEPARATOR, owner_of};

use super::cpu_reservations::CpuReservationError;
use super::regions::RegionError;
use super::{Action, Client, Key, SENT_ON_MAX, State, Value, cordons, loans};

/// A reason why a VM has no place, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum PlaceError {
    #[error("there is no cell {only} that runs; there is {known}")]
    NoCell { only: u16, known: String },
    #[error("none of the cells that it may depend on runs ({wanted}); there is {known}")]
    NoAllowedCell { wanted: String, known: String },
    #[error("{}", cordons::refusal(*cell, *by_command))]
    Cordoned { cell: u16, by_command: bool },
    #[error("a part of an earlier VM named {vm} is still in cell {cell}; try again in a moment")]
    Part { vm: String, cell: u16 },
    #[error(
        "a VM named {name} is running already, in cell {cell}; choose another name, or end it with \
         `mirrorball stop {name}`"
    )]
    Taken { name: String, cell: u16 },
    /// A part of a VM that has to be in this cell.
    #[error(
        "cell {cell} has {free_mib} MiB of its own memory, and {wanted_mib} MiB are needed there; \
         give the VM less, end another one, or span other cells"
    )]
    TooLargeForItsOwn {
        cell: u16,
        free_mib: u64,
        wanted_mib: u64,
    },
    #[error("{0}")]
    Region(RegionError),
    #[error("{0}")]
    CpuReservation(CpuReservationError),
    #[error("no cell has {wanted_mib} MiB for it: {refusals}; give it less, or end another VM")]
    TooLarge {
        wanted_mib: u64,
        /// The reason of each cell.
        refusals: String,
    },
}

impl State {
    /// Changes the entry of a VM of this cell, or refuses with the reason. The client gets its answer when
    /// all cells have the change.
    pub(super) fn change_entry(
        &mut self,
        client: Client,
        vm: &str,
        value: Result<Value, impl Display>,
    ) -> Vec<Action> {
        let value = match value {
            Ok(value) => value,
            Err(error) => {
                let why = error.to_string();
                return vec![Action::Answer(client, CellResponse::Refused { why })];
            }
        };
        match self.node.change(&Key::Vm(vm.to_owned()), Some(value)) {
            Some((change, effects)) => {
                self.leaving.insert(change, client);
                self.acts(effects)
            }
            None => vec![Action::Answer(client, CellResponse::Done)],
        }
    }

    /// Applies these assertions on cells' capacity from now on.
    pub fn assert(&mut self, assertions: Assertions) {
        self.assertions = assertions;
        self.pass_is_due();
    }

    /// Handles a client's request for a place for its VM.
    pub(super) fn host(&mut self, client: Client, host: AdmitVm) -> Vec<Action> {
        self.host_in_round(client, host, 0)
    }

    /// The same, for a VM that has waited for memory of other cells `round` times.
    pub(super) fn host_in_round(&mut self, client: Client, host: AdmitVm, round: u8) -> Vec<Action> {
        let refused = |why: PlaceError| {
            let why = why.to_string();
            vec![Action::Answer(client, CellResponse::Refused { why })]
        };
        let name = host.name.clone();
        if (host.runs || self.comes_back(&host)) && self.owns(&name) && !self.tenants.contains_key(&name) {
            self.has_come(&name);
            let place = self.place(&name);
            self.tenants.insert(name, client);
            return vec![Action::Answer(client, CellResponse::Hosted(place))];
        }
        if let (Some(early), false) = (&mut self.early, host.runs) {
            early.push((client, host));
            return self.release();
        }
        if !host.runs {
            if let Err(why) = self.check_grants(&host) {
                return refused(PlaceError::Region(why));
            }
            let own_free = self.ledger.own_free();
            if host.own && host.only == Some(self.me.number) && own_free < host.share.memory_bytes {
                let asked = self.begin_to_borrow(client, &host, round);
                return asked
                    .unwrap_or_else(|| refused(too_large_for_its_own(&host, self.me.number, own_free)));
            }
            match self.choose(&host) {
                Ok(cell) if cell == self.me.number => {}
                Ok(cell) => {
                    if self.sent_on.len() == SENT_ON_MAX {
                        self.sent_on.pop_front();
                    }
                    self.sent_on.push_back((name, cell, host.share));
                    return vec![Action::Answer(client, CellResponse::Elsewhere { cell })];
                }
                Err(why) => return refused(why),
            }
        }
        // A VM of that name that runs here, or is about to, keeps its memory.
        if self.ledger.parts(&name).is_some() {
            return refused(taken(&name, self.me.number));
        }
        let has_room = || self.free_for(&host) >= host.share.memory_bytes;
        if !host.runs && !has_room() {
            let asked = self.begin_to_borrow(client, &host, round);
            return asked.unwrap_or_else(|| refused(too_large(&host, &self.rooms_for(&host))));
        }
        if host.runs {
            let parts = loans::parts(self.me.number, host.share, &host.borrowed);
            self.ledger.find(name.clone(), parts);
        } else if !self.occupy(&host) {
            return refused(too_large(&host, &self.rooms_for(&host)));
        }
        let value = Value::Vm {
            share: host.share,
            borrowed: self.place(&name).borrowed,
            cells: host.cells.clone(),
            borrowed_cpus: host.borrowed_cpus.clone(),
            regions: host.regions.clone(),
        };
        let (claim, effects) = self.node.claim(Key::Vm(name.clone()), value);
        self.claims.insert(claim, (Some(client), name, host.share));
        self.acts(effects)
    }

    /// Whether this is a user's VM that had a place here when the admission server ended. The server then
    /// repeats a user's own claim, so only the same share is accepted.
    fn comes_back(&self, host: &AdmitVm) -> bool {
        let is_same = |vm: super::view::KnownVm<'_>| vm.name == host.name && vm.share == host.share;
        owner_of(&host.name).is_some() && self.is_awaited(&host.name) && self.vms().any(is_same)
    }

    /// Chooses the cell for a VM, as far as this one's table shows.
    fn choose(&self, host: &AdmitVm) -> Result<u16, PlaceError> {
        let mut rooms = self.rooms_for(host);
        if rooms.is_empty() {
            let list = |cells: Vec<u16>| {
                let numbers: Vec<String> = cells.iter().map(u16::to_string).collect();
                numbers.join(", ")
            };
            return Err(PlaceError::NoAllowedCell {
                wanted: list(host.cells.clone()),
                known: list(self.rooms().iter().map(|room| room.cell).collect()),
            });
        }
        if let Some(only) = host.only {
            rooms.retain(|room| room.cell == only);
            if rooms.is_empty() {
                let known: Vec<String> = self.rooms().iter().map(|room| room.cell.to_string()).collect();
                let known = known.join(", ");
                return Err(PlaceError::NoCell { only, known });
            }
            if rooms.iter().all(|room| room.is_cordoned) {
                let by_command = self.cells().any(|cell| cell.number == only && cell.is_cordoned);
                return Err(PlaceError::Cordoned {
                    cell: only,
                    by_command,
                });
            }
        }
        if host.share.cpu_reservation_permille > 0 {
            // Cells of other hosts may have no drivers.
            let here = rooms.iter().filter(|room| room.is_here).map(|room| room.cell);
            let able = self.check_cpu_reservation(host, here.collect());
            let able = able.map_err(PlaceError::CpuReservation)?;
            rooms.retain(|room| able.contains(&room.cell));
        }
        let want = want(host);
        // Two cells with different tables would send it back and forth.
        let here = rooms.iter().find(|room| room.cell == self.me.number);
        if host.sent && here.is_some_and(|room| place(&[*room], want).is_some()) {
            return Ok(self.me.number);
        }
        let all = self.rooms_for(host);
        let by_borrowing = || {
            let cell = self.place_by_borrowing(host, &all)?;
            let has_time = self.check_cpu_reservation(host, vec![cell]).is_ok();
            has_time.then_some(cell)
        };
        place(&rooms, want)
            .or_else(by_borrowing)
            .ok_or_else(|| too_large(host, &rooms))
    }

    /// Capacity of the live cells that a VM may depend on. In this cell, memory of other lenders is left out.
    fn rooms_for(&self, host: &AdmitVm) -> Vec<CellCapacity> {
        let mut rooms = self.rooms();
        // Hosts have no memory in common.
        rooms.retain(|room| allows(&host.cells, room.cell) && (host.regions.is_empty() || room.is_here));
        if let Some(own) = rooms.iter_mut().find(|room| room.cell == self.me.number) {
            own.free_bytes = own.free_bytes.min(self.free_for(host));
        }
        if !host.cells.is_empty() {
            let me = self.me.number;
            for room in rooms.iter_mut().filter(|room| room.cell != me) {
                room.free_bytes = room
                    .free_bytes
                    .saturating_sub(self.unused_of_others(room.cell, &host.cells));
            }
        }
        rooms
    }

    /// Capacity of each live cell.
    pub(super) fn rooms(&self) -> Vec<CellCapacity> {
        let mut rooms: Vec<CellCapacity> = self
            .cells()
            .filter(|cell| self.life(cell.number).is_some())
            .map(|cell| CellCapacity {
                cell: cell.number,
                cpus: u32::try_from(cell.plan.cpus.len()).unwrap_or(u32::MAX),
                vcpus: 0,
                free_bytes: self.memory_of(&cell),
                is_cordoned: cell.is_cordoned,
                // The files of a VM are on the host where it was started.
                is_here: cell.plan.host == self.plan.host,
            })
            .collect();
        let promised = self.claims.values().map(|(_, _, share)| (self.me.number, *share));
        for (cell, share) in self.vms().map(|vm| (vm.cell, vm.share)).chain(promised) {
            if let Some(room) = rooms.iter_mut().find(|room| room.cell == cell) {
                room.vcpus = room.vcpus.saturating_add(share.vcpus);
                room.free_bytes = room.free_bytes.saturating_sub(share.memory_bytes);
            }
        }
        // The cell's own free memory is exact.
        if let Some(own) = rooms.iter_mut().find(|room| room.cell == self.me.number) {
            own.free_bytes = self.ledger.free();
        }
        // Several VMs that come at once must not all go to the cell that was the emptiest before. That cell
        // counts its memory itself.
        for (_, cell, share) in &self.sent_on {
            if let Some(room) = rooms.iter_mut().find(|room| room.cell == *cell) {
                room.vcpus = room.vcpus.saturating_add(share.vcpus);
            }
        }
        self.assertions.apply(&mut rooms);
        rooms
    }
}

fn want(host: &AdmitVm) -> Want {
    Want {
        vcpus: host.share.vcpus,
        memory_bytes: host.share.memory_bytes,
    }
}

/// The refusal of a name that a VM has already. A user has chosen the name among that user's own VMs.
pub(super) fn taken(name: &str, cell: u16) -> PlaceError {
    let name = owner_of(name).map_or(name, |(_, name)| name);
    match name.split_once(SHARD_SEPARATOR) {
        Some((vm, _)) => PlaceError::Part {
            vm: vm.to_owned(),
            cell,
        },
        None => PlaceError::Taken {
            name: name.to_owned(),
            cell,
        },
    }
}

/// The reason why a part of a VM has no place in the only eligible cell.
fn too_large_for_its_own(host: &AdmitVm, cell: u16, free_bytes: u64) -> PlaceError {
    PlaceError::TooLargeForItsOwn {
        cell,
        free_mib: free_bytes >> 20,
        wanted_mib: host.share.memory_bytes >> 20,
    }
}

/// The reason why a VM has no place.
fn too_large(host: &AdmitVm, rooms: &[CellCapacity]) -> PlaceError {
    PlaceError::TooLarge {
        wanted_mib: host.share.memory_bytes >> 20,
        refusals: refusals(rooms, want(host)),
    }
}
