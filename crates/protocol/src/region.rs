//! Regions of memory that VMs share, as their home keeps them.
//!
//! A region is one file in memory. Its home is the cell that gives the memory. The home creates the file for
//! the first member, sends each member a descriptor, and gives the file up after the last. Guarantees:
//!
//! - A region never has two files: VMs that map it see the same bytes.
//! - The home counts a region's bytes once, from its creation until its file is given up.
//! - No file is given up while a VM has it.
//! - After the last member has ended, the region can be created again, whatever the home has gone through.
//!
//! The file outlives the home's process, since members have descriptors of it. The next process knows the
//! regions of the VMs that run, and seeks their files at the members before a VM gets one
//! ([`Request::Search`]). Nothing of this is persisted: the VMs that run decide.
//!
//! The table of VMs may lose a member that still runs. So the end of the last member is only a reason to
//! probe ([`Regions::without_members`]): the caller checks, by a lock of the file or by the host's registry,
//! whether a VM still has it ([`Regions::probed`]).

use std::collections::BTreeMap;

/// The regions that have a file.
#[derive(Clone, Debug, Default)]
pub struct Regions(BTreeMap<String, Region>);

#[derive(Clone, Debug)]
struct Region {
    bytes: u64,
    file: RegionFile,
}

/// Location of a region's file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RegionFile {
    /// This process has it.
    Held,
    /// Only VMs may have it: the process that created it has ended.
    Lost {
        /// Whether a search is under way.
        is_sought: bool,
    },
}

/// Reaction of the home to a VM's request for a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request {
    /// Reserve the memory, call [`Regions::create`], create the file, and send a descriptor.
    Create,
    /// Send a descriptor.
    Send,
    /// Seek the file at the members, and call [`Regions::sought`]. The VM requests the region again later.
    Search,
    /// Nothing: a search is under way. The VM requests the region again later.
    Wait,
    /// Refuse: the region has another size as long as its members run, in bytes.
    OtherSize(u64),
}

/// Result of a search.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Found {
    /// A member has sent the file.
    File,
    /// Each VM of the region that runs has requested the file from this process: no VM has it.
    Nowhere,
    /// A VM that may have the file did not answer.
    Unknown,
}

/// Reaction of the home to the result of a search.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// Keep the file.
    Keep,
    /// Free the memory: the region is given up.
    Free,
    /// Close the file, if there is one.
    None,
}

impl Regions {
    /// Returns the regions of VMs that run, by name, as a new process of the home finds them.
    pub fn new(found: impl IntoIterator<Item = (String, u64)>) -> Self {
        let lost = |bytes| Region {
            bytes,
            file: RegionFile::Lost { is_sought: false },
        };
        Self(
            found
                .into_iter()
                .map(|(name, bytes)| (name, lost(bytes)))
                .collect(),
        )
    }

    /// Handles a VM's request for a region of `bytes`.
    pub fn request(&mut self, name: &str, bytes: u64) -> Request {
        let Some(region) = self.0.get_mut(name) else {
            return Request::Create;
        };
        if region.bytes != bytes {
            return Request::OtherSize(region.bytes);
        }
        match &mut region.file {
            RegionFile::Held => Request::Send,
            RegionFile::Lost { is_sought } => match std::mem::replace(is_sought, true) {
                true => Request::Wait,
                false => Request::Search,
            },
        }
    }

    /// Records a new region, whose file this process creates. Returns false, without effect, if it has a file
    /// already.
    pub fn create(&mut self, name: &str, bytes: u64) -> bool {
        if self.0.contains_key(name) {
            return false;
        }
        let file = RegionFile::Held;
        self.0.insert(name.to_owned(), Region { bytes, file });
        true
    }

    /// Records the result of a search.
    pub fn sought(&mut self, name: &str, found: Found) -> Outcome {
        let is_lost = |region: &&mut Region| region.file != RegionFile::Held;
        let Some(region) = self.0.get_mut(name).filter(is_lost) else {
            return Outcome::None;
        };
        match found {
            Found::File => {
                region.file = RegionFile::Held;
                Outcome::Keep
            }
            Found::Unknown => {
                region.file = RegionFile::Lost { is_sought: false };
                Outcome::None
            }
            Found::Nowhere => {
                self.0.remove(name);
                Outcome::Free
            }
        }
    }

    /// Returns the regions without members, which the caller probes. `has_member` decides by the VMs in the
    /// table.
    pub fn without_members(&self, has_member: impl Fn(&str) -> bool) -> Vec<String> {
        let names = self.0.keys().filter(|name| !has_member(name));
        names.cloned().collect()
    }

    /// Records whether a process has the file of a region that had no member. Returns whether the region is
    /// given up: the caller closes the file and frees the memory.
    pub fn probed(&mut self, name: &str, is_used: bool, has_member: bool) -> bool {
        !is_used && !has_member && self.0.remove(name).is_some()
    }

    /// Drops a region whose file could not be created. Returns whether it existed.
    pub fn not_created(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    /// Whether a region has a file.
    pub fn is_known(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Whether this process has the file of a region.
    pub fn is_held(&self, name: &str) -> bool {
        self.0
            .get(name)
            .is_some_and(|region| region.file == RegionFile::Held)
    }

    /// Returns the regions and their sizes in bytes, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, region)| (&name[..], region.bytes))
    }
}

#[cfg(test)]
mod tests;
