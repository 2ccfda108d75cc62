//! The decisions of a cell's process about the VMs that it adopts: no I/O, no clock, no threads.
//!
//! [`super::serve`] carries them out. The simulator (`crates/sim`) runs the same decisions by seed.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Adoptions that may fail before the VM is set aside.
pub const FAILURES_MAX: u32 = 2;

/// Adoptions of a VM in a row that began and did not complete. A file in the VM's directory has the number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failures(u32);

impl Failures {
    /// The number that sets a VM aside.
    pub const SET_ASIDE: Self = Self(FAILURES_MAX);

    /// Reads the number of a file. A text without a number sets the VM aside.
    pub fn read(text: &str) -> Self {
        text.trim().parse().map_or(Self::SET_ASIDE, Self)
    }

    /// Number of attempts to adopt the VM.
    pub fn count(self) -> u32 {
        self.0
    }

    /// Whether the VM is adopted by command only.
    pub fn is_set_aside(self) -> bool {
        self.0 >= FAILURES_MAX
    }

    /// The number while another adoption is under way: it counts as failed until it is completed.
    #[must_use]
    pub fn with_begun(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Whether no other VM may be adopted meanwhile. If the VM ends the process again, no other VM is
    /// suspected.
    fn is_adopted_alone(self) -> bool {
        self.0 > 0
    }
}

/// The consequence of a VM that this program can't read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The trial of this program has failed. The former program may read the VM.
    FailsTrial,
    /// The VM is set aside: no later adoption by this program goes better.
    SetAside,
}

/// The result of the trial of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The cell has adopted the VMs that the former program left.
    Adopted,
    /// The cell can't read some VMs. Each has its reason.
    Refused(Vec<String>),
    /// So many VMs are not adopted yet.
    Late(usize),
}

/// The VMs that a cell's process adopts or serves, by their addresses on the socket device, which no two VMs
/// share. `H` is a VM that is served.
#[derive(Debug)]
pub struct AdoptionTable<H> {
    /// Without an `H` the adoption is under way.
    vms: BTreeMap<u32, Option<H>>,
    /// Whether all VMs are known that an earlier process of the cell left.
    are_listed: bool,
    /// Those of them that are not adopted yet.
    awaited: BTreeSet<u32>,
    /// Those of them that this program can't read, each with the reason.
    refused: Vec<String>,
    is_on_trial: bool,
    /// Those whose adoptions count as failed if the process ends now.
    attempts: BTreeSet<u32>,
    /// The one among them that is adopted alone.
    alone: Option<u32>,
}

impl<H> AdoptionTable<H> {
    /// A table without VMs. `is_on_trial`: the guard still has to decide if the process's program stays.
    pub fn new(is_on_trial: bool) -> Self {
        Self {
            vms: BTreeMap::new(),
            are_listed: false,
            awaited: BTreeSet::new(),
            refused: Vec::new(),
            is_on_trial,
            attempts: BTreeSet::new(),
            alone: None,
        }
    }

    /// Begins an adoption. Returns whether none of the VM was under way, and it is not served.
    pub fn begin(&mut self, cid: u32) -> bool {
        match self.vms.entry(cid) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(None);
                true
            }
        }
    }

    /// The trial waits for a VM that an earlier process left. [`Self::begin`] follows, and then
    /// [`Self::tried_first`].
    pub fn await_first(&mut self, cid: u32) {
        self.awaited.insert(cid);
    }

    /// The adoption of such a VM was begun, or could not be. The trial waits no longer for one that is not
    /// under way. Its monitor may have handed it over before it was awaited.
    pub fn tried_first(&mut self, cid: u32) {
        if !matches!(self.vms.get(&cid), Some(None)) {
            self.awaited.remove(&cid);
        }
    }

    /// All VMs are known that an earlier process left.
    pub fn all_are_listed(&mut self) {
        self.are_listed = true;
    }

    /// Begins the part of an adoption that counts as failed if the process ends, of a VM that has failed so
    /// often. Returns whether it may begin; otherwise the table has to change first. It ends with
    /// [`Self::is_served`] or [`Self::is_over`].
    ///
    /// A VM that has failed is adopted while no other is, so that a process which ends again has ended in the
    /// adoption of the VM that ends it: a VM is never set aside for another's fault. Others don't wait for
    /// one that waits: an adoption that takes long would hold up all of the cell.
    pub fn begin_attempt(&mut self, cid: u32, failures: Failures) -> bool {
        let is_alone = failures.is_adopted_alone();
        let may_begin = match is_alone {
            true => self.attempts.is_empty(),
            false => self.alone.is_none(),
        };
        if may_begin {
            self.attempts.insert(cid);
            self.alone = is_alone.then_some(cid);
        }
        may_begin
    }

    fn end_attempt(&mut self, cid: u32) {
        self.attempts.remove(&cid);
        self.alone.take_if(|alone| *alone == cid);
    }

    /// Clients reach the VM.
    pub fn is_served(&mut self, cid: u32, vm: H) {
        self.end_attempt(cid);
        self.vms.insert(cid, Some(vm));
        self.awaited.remove(&cid);
    }

    /// The VM can't be read, for this reason. Its adoption is over ([`Self::is_over`]).
    pub fn is_unreadable(&mut self, why: String) -> Unreadable {
        if !self.is_on_trial {
            return Unreadable::SetAside;
        }
        self.refused.push(why);
        Unreadable::FailsTrial
    }

    /// The VM has ended, or its adoption has.
    pub fn is_over(&mut self, cid: u32) {
        self.end_attempt(cid);
        self.vms.remove(&cid);
        self.awaited.remove(&cid);
    }

    /// A VM: none if it is not adopted, and without an `H` while its adoption is under way.
    pub fn get(&self, cid: u32) -> Option<Option<&H>> {
        self.vms.get(&cid).map(Option::as_ref)
    }

    /// The VMs that are served.
    pub fn served(&self) -> impl Iterator<Item = &H> {
        self.vms.values().flatten()
    }

    /// Whether the result of the trial is open.
    pub fn is_trial_open(&self) -> bool {
        self.refused.is_empty() && !(self.are_listed && self.awaited.is_empty())
    }

    /// The result of the trial by now. A program that has adopted the VMs is not on trial any more.
    pub fn verdict(&mut self) -> Verdict {
        if !self.refused.is_empty() {
            return Verdict::Refused(self.refused.clone());
        }
        if self.is_trial_open() {
            return Verdict::Late(self.awaited.len());
        }
        self.is_on_trial = false;
        Verdict::Adopted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_is_set_aside_when_two_adoptions_have_failed_in_a_row() {
        let none = Failures::default();
        assert!(!none.is_set_aside() && !none.is_adopted_alone());
        let one = none.with_begun();
        assert!(!one.is_set_aside() && one.is_adopted_alone());
        assert!(one.with_begun().is_set_aside());
        assert_eq!(Failures::read(" 1\n"), one);
        for text in ["", "x", "-1", "4294967296"] {
            assert!(Failures::read(text).is_set_aside(), "{text:?}");
        }
        assert!(Failures::read("4294967295").with_begun().is_set_aside());
    }

    #[test]
    fn vm_that_has_failed_is_adopted_while_no_other_is() {
        let (none, one) = (Failures::default(), Failures::read("1"));
        let mut table = AdoptionTable::new(false);
        assert!(table.begin_attempt(3, none) && table.begin_attempt(4, none));
        assert!(!table.begin_attempt(5, one), "others are under way");
        assert!(table.begin_attempt(6, none), "one that waits holds up no other");
        table.is_served(6, ());
        table.is_served(3, ());
        assert!(!table.begin_attempt(5, one));
        table.is_over(4);
        assert!(table.begin_attempt(5, one));
        assert!(!table.begin_attempt(7, none) && !table.begin_attempt(8, one));
        table.is_served(5, ());
        assert!(table.begin_attempt(7, none) && table.begin_attempt(9, none));
    }

    #[test]
    fn vm_is_adopted_by_one_thread_at_a_time() {
        let mut table = AdoptionTable::new(false);
        assert!(table.begin(3));
        assert!(!table.begin(3));
        assert_eq!(table.get(3), Some(None));
        table.is_served(3, "vm");
        assert!(!table.begin(3));
        assert_eq!(table.get(3), Some(Some(&"vm")));
        assert_eq!(table.served().collect::<Vec<_>>(), [&"vm"]);
        table.is_over(3);
        assert_eq!(table.get(3), None);
        assert!(table.begin(3));
    }

    #[test]
    fn trial_ends_when_all_vms_of_the_former_program_are_adopted_or_one_is_unreadable() {
        let mut table = AdoptionTable::new(true);
        for cid in [3, 4, 5] {
            table.await_first(cid);
            // The last one's keeper is gone.
            if cid < 5 {
                table.begin(cid);
            }
            table.tried_first(cid);
        }
        assert_eq!(table.verdict(), Verdict::Late(2));
        table.is_served(3, ());
        table.is_over(4);
        assert!(table.is_trial_open(), "more may be listed");
        table.all_are_listed();
        assert!(!table.is_trial_open());
        assert_eq!(table.verdict(), Verdict::Adopted);
        assert_eq!(table.is_unreadable("late".to_owned()), Unreadable::SetAside);

        let mut table = AdoptionTable::<()>::new(true);
        table.await_first(3);
        table.begin(3);
        assert_eq!(table.is_unreadable("why".to_owned()), Unreadable::FailsTrial);
        table.is_over(3);
        table.all_are_listed();
        assert!(!table.is_trial_open());
        assert_eq!(table.verdict(), Verdict::Refused(vec!["why".to_owned()]));
    }

    #[test]
    fn trial_does_not_wait_for_a_vm_that_its_monitor_has_handed_over_before() {
        let mut table = AdoptionTable::new(true);
        table.begin(3);
        table.is_served(3, ());
        table.await_first(3);
        assert!(!table.begin(3));
        table.tried_first(3);
        table.all_are_listed();
        assert_eq!(table.verdict(), Verdict::Adopted);
    }
}
