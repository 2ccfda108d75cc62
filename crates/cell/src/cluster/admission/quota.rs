//! VMs and limits of each admitted user. Without I/O, clock or threads.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use config::Size;
use config::cluster::UserPlan;
use registry::cluster::admission::{Limits, PlacedVm, UserUse};
use registry::cluster::interface::VmShare;

/// A connection that holds a place.
pub(super) type Holder = u64;

/// The users, and their VMs by name.
#[derive(Debug)]
pub(super) struct Quotas(BTreeMap<u32, User>);

#[derive(Debug)]
struct User {
    plan: UserPlan,
    vms: BTreeMap<String, Held>,
}

/// A VM that counts against its user's limits.
#[derive(Debug)]
struct Held {
    share: VmShare,
    /// None while the request to the cells is under way.
    cell: Option<u16>,
    /// None for a VM of the server's last process, whose monitor has not come yet.
    holder: Option<Holder>,
}

/// The reason why a VM may have no place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The cluster does not admit the user.
    NotAdmitted,
    /// The user has a VM of this name.
    Taken(String),
    /// The VM has no vCPU or no memory.
    Nothing,
    /// The VM needs more vCPUs than the user has left.
    Cpus { wanted: u32, left: u32, most: u32 },
    /// The VM needs more memory than the user has left, in bytes.
    Memory { wanted: u64, left: u64, most: u64 },
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: u64| Size(bytes >> 20 << 20);
        match self {
            Self::NotAdmitted => write!(out, "the cluster does not admit this user"),
            Self::Taken(name) => write!(
                out,
                "a VM named {name} has a place in the cluster already; choose another name, or end it with \
                 `mirrorball stop {name}`"
            ),
            Self::Nothing => write!(out, "a VM needs a vCPU and memory"),
            Self::Cpus { wanted, left, most } => write!(
                out,
                "the cluster lets you have {most} vCPUs, {left} more than your VMs have, and the VM needs \
                 {wanted}; give it less, or end another VM"
            ),
            Self::Memory { wanted, left, most } => write!(
                out,
                "the cluster lets you have {} of memory, {} more than your VMs have, and the VM needs {}; \
                 give it less, or end another VM",
                size(*most),
                size(*left),
                size(*wanted)
            ),
        }
    }
}

impl Quotas {
    /// Quotas without VMs.
    pub(super) fn new(users: Vec<UserPlan>) -> Self {
        let user = |plan: UserPlan| {
            let vms = BTreeMap::new();
            (plan.uid, User { plan, vms })
        };
        Self(users.into_iter().map(user).collect())
    }

    /// The entry of a user in the cluster's file; none if the user is not admitted.
    pub(super) fn plan(&self, uid: u32) -> Option<&UserPlan> {
        self.0.get(&uid).map(|user| &user.plan)
    }

    /// Records a VM that had a place in the server's last process. It counts until its monitor comes, or
    /// [`Quotas::lapse`].
    pub(super) fn expect(&mut self, uid: u32, name: String, share: VmShare, cell: u16) {
        if let Some(user) = self.0.get_mut(&uid) {
            let held = Held {
                share,
                cell: Some(cell),
                holder: None,
            };
            user.vms.insert(name, held);
        }
    }

    /// Counts a VM of `holder`'s, before its place is requested.
    ///
    /// # Errors
    /// If the user's limits do not allow it.
    pub(super) fn reserve(
        &mut self,
        uid: u32,
        name: &str,
        share: VmShare,
        holder: Holder,
    ) -> Result<(), Refusal> {
        let user = self.0.get_mut(&uid).ok_or(Refusal::NotAdmitted)?;
        if share.vcpus == 0 || share.memory_bytes == 0 {
            return Err(Refusal::Nothing);
        }
        if user.vms.get(name).is_some_and(|held| held.holder.is_some()) {
            return Err(Refusal::Taken(name.to_owned()));
        }
        // A VM that comes back is not counted twice.
        let used = user.used(|other| other != name);
        let left = user.plan.vcpus.saturating_sub(used.vcpus);
        if share.vcpus > left {
            return Err(Refusal::Cpus {
                wanted: share.vcpus,
                left,
                most: user.plan.vcpus,
            });
        }
        let left = user.plan.memory_bytes.saturating_sub(used.memory_bytes);
        if share.memory_bytes > left {
            return Err(Refusal::Memory {
                wanted: share.memory_bytes,
                left,
                most: user.plan.memory_bytes,
            });
        }
        let held = Held {
            share,
            cell: None,
            holder: Some(holder),
        };
        user.vms.insert(name.to_owned(), held);
        Ok(())
    }

    /// Records that a reserved VM has its place.
    pub(super) fn placed(&mut self, uid: u32, name: &str, cell: u16) {
        let user = self.0.get_mut(&uid);
        if let Some(held) = user.and_then(|user| user.vms.get_mut(name)) {
            held.cell = Some(cell);
        }
    }

    /// The connection that holds a VM of this user's; none if there is no such VM.
    pub(super) fn holder(&self, uid: u32, name: &str) -> Option<Holder> {
        self.0.get(&uid)?.vms.get(name)?.holder
    }

    /// Stops counting a VM, if `holder` holds it.
    pub(super) fn release(&mut self, uid: u32, name: &str, holder: Holder) {
        if let Some(user) = self.0.get_mut(&uid)
            && let Entry::Occupied(held) = user.vms.entry(name.to_owned())
            && held.get().holder == Some(holder)
        {
            held.remove();
        }
    }

    /// Stops counting the VMs of the server's last process whose monitors have not come. Returns them.
    pub(super) fn lapse(&mut self) -> Vec<(u32, String)> {
        let mut lapsed = Vec::new();
        for (uid, user) in &mut self.0 {
            let gone = user.vms.iter().filter(|(_, held)| held.holder.is_none());
            lapsed.extend(gone.map(|(name, _)| (*uid, name.clone())));
            user.vms.retain(|_, held| held.holder.is_some());
        }
        lapsed
    }

    /// Use and limits of a user; none if the user is not admitted.
    pub(super) fn use_of(&self, uid: u32, limits: Limits) -> Option<UserUse> {
        self.0.get(&uid).map(|user| user.describe(limits))
    }

    /// Use and limits of all users.
    pub(super) fn all(&self, limits: Limits) -> Vec<UserUse> {
        self.0.values().map(|user| user.describe(limits)).collect()
    }
}

impl User {
    /// Total of the user's VMs whose name `counts`.
    fn used(&self, counts: impl Fn(&str) -> bool) -> VmShare {
        let counted = self.vms.iter().filter(|(name, _)| counts(name));
        counted.fold(VmShare::default(), |sum, (_, held)| VmShare {
            vcpus: sum.vcpus.saturating_add(held.share.vcpus),
            memory_bytes: sum.memory_bytes.saturating_add(held.share.memory_bytes),
            ..VmShare::default()
        })
    }

    fn describe(&self, limits: Limits) -> UserUse {
        let placed = self.vms.iter().filter_map(|(name, held)| {
            Some(PlacedVm {
                name: name.clone(),
                cell: held.cell?,
                share: held.share,
            })
        });
        UserUse {
            uid: self.plan.uid,
            name: self.plan.name.clone(),
            most: VmShare {
                vcpus: self.plan.vcpus,
                memory_bytes: self.plan.memory_bytes,
                ..VmShare::default()
            },
            used: self.used(|_| true),
            limits,
            vms: placed.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1001;
    const BOB: u32 = 1002;
    const GIB: u64 = 1 << 30;

    fn share(vcpus: u32, gib: u64) -> VmShare {
        VmShare {
            vcpus,
            memory_bytes: gib * GIB,
            ..VmShare::default()
        }
    }

    /// Four vCPUs and 8 GiB for each of two users.
    fn quotas() -> Quotas {
        let plan = |uid, name: &str| UserPlan {
            uid,
            name: name.to_owned(),
            vcpus: 4,
            memory_bytes: 8 * GIB,
        };
        Quotas::new(vec![plan(ALICE, "alice"), plan(BOB, "bob")])
    }

    #[test]
    fn vms_of_a_user_are_bounded_by_the_limits_together() {
        let mut quotas = quotas();
        quotas.reserve(ALICE, "a", share(3, 4), 1).unwrap();
        let error = quotas.reserve(ALICE, "b", share(2, 1), 2).unwrap_err();
        assert_eq!(
            error,
            Refusal::Cpus {
                wanted: 2,
                left: 1,
                most: 4
            }
        );
        let error = quotas.reserve(ALICE, "b", share(1, 5), 2).unwrap_err();
        assert_eq!(
            error,
            Refusal::Memory {
                wanted: 5 * GIB,
                left: 4 * GIB,
                most: 8 * GIB
            }
        );
        assert!(
            error
                .to_string()
                .contains("8G of memory, 4G more than your VMs have"),
            "{error}"
        );
        quotas.reserve(ALICE, "b", share(1, 4), 2).unwrap();
        // Another user has limits of their own.
        quotas.reserve(BOB, "a", share(4, 8), 3).unwrap();
        quotas.release(ALICE, "a", 1);
        quotas.reserve(ALICE, "c", share(3, 4), 4).unwrap();
    }

    #[test]
    fn greatest_numbers_overflow_nothing() {
        let mut quotas = quotas();
        let most = VmShare {
            vcpus: u32::MAX,
            memory_bytes: u64::MAX,
            ..VmShare::default()
        };
        quotas.reserve(ALICE, "a", share(1, 1), 1).unwrap();
        assert!(matches!(
            quotas.reserve(ALICE, "b", most, 2),
            Err(Refusal::Cpus { .. })
        ));
        let most = VmShare { vcpus: 1, ..most };
        assert!(matches!(
            quotas.reserve(ALICE, "b", most, 2),
            Err(Refusal::Memory { .. })
        ));
        assert_eq!(quotas.reserve(ALICE, "b", share(0, 1), 2), Err(Refusal::Nothing));
        assert_eq!(quotas.reserve(ALICE, "b", share(1, 0), 2), Err(Refusal::Nothing));
    }

    #[test]
    fn names_are_per_owner_and_strangers_have_none() {
        let mut quotas = quotas();
        quotas.reserve(ALICE, "web", share(1, 1), 1).unwrap();
        quotas.reserve(BOB, "web", share(1, 1), 2).unwrap();
        assert_eq!(
            quotas.reserve(ALICE, "web", share(1, 1), 3),
            Err(Refusal::Taken("web".to_owned()))
        );
        assert_eq!(
            quotas.reserve(7, "web", share(1, 1), 4),
            Err(Refusal::NotAdmitted)
        );
        assert_eq!(quotas.holder(ALICE, "web"), Some(1));
        assert_eq!(quotas.holder(BOB, "web"), Some(2));
        assert_eq!(quotas.holder(7, "web"), None);
        // The end of one connection does not release a VM that another one holds.
        quotas.release(ALICE, "web", 2);
        assert_eq!(quotas.holder(ALICE, "web"), Some(1));
    }

    #[test]
    fn user_sees_own_vms_only_and_root_all() {
        let mut quotas = quotas();
        quotas.reserve(ALICE, "web", share(2, 1), 1).unwrap();
        quotas.placed(ALICE, "web", 1);
        quotas.reserve(BOB, "db", share(1, 2), 2).unwrap();
        quotas.placed(BOB, "db", 0);
        let alice = quotas.use_of(ALICE, Limits::Group).unwrap();
        let vm = PlacedVm {
            name: "web".to_owned(),
            cell: 1,
            share: share(2, 1),
        };
        assert_eq!(alice.vms, [vm]);
        assert_eq!((alice.used, alice.most), (share(2, 1), share(4, 8)));
        assert_eq!(quotas.use_of(7, Limits::Group), None);
        let all = quotas.all(Limits::BestEffort);
        let names: Vec<&str> = all
            .iter()
            .flat_map(|user| &user.vms)
            .map(|vm| &vm.name[..])
            .collect();
        assert_eq!(names, ["web", "db"]);
    }

    #[test]
    fn vm_of_the_last_process_counts_until_it_comes_back_or_lapses() {
        let mut quotas = quotas();
        quotas.expect(ALICE, "web".to_owned(), share(3, 1), 0);
        quotas.expect(ALICE, "gone".to_owned(), share(1, 1), 0);
        assert!(matches!(
            quotas.reserve(ALICE, "new", share(1, 1), 1),
            Err(Refusal::Cpus { .. })
        ));
        quotas.reserve(ALICE, "web", share(3, 1), 2).unwrap();
        assert_eq!(quotas.lapse(), [(ALICE, "gone".to_owned())]);
        quotas.reserve(ALICE, "new", share(1, 1), 3).unwrap();
        assert_eq!(quotas.lapse(), []);
        // A VM of a user who is not admitted any more counts against no limit.
        quotas.expect(7, "web".to_owned(), share(1, 1), 0);
        assert_eq!(quotas.lapse(), []);
    }
}
