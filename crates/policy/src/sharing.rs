//! When a page read from an image is shared (SOSP '97, section 4.3.3: the global buffer cache).
//!
//! Mapping costs more time than copying and saves memory: a page copied costs 0.5 us, a page mapped alone 6.5 us, a page
//! of a mapped run of 32 about 2 us. So copy at once, and let the background replace copies by mappings, unless memory
//! is what the host is short of.

/// What is known when a read comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// VMs that use the image, this one included.
    pub users: u32,
    /// Memory that the host could still give, in thousandths of what it has.
    pub available_permille: u32,
}

/// What to do with a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Copy, and remember where each page came from: somebody may come to share it with.
    Remember,
    /// Copy, remember, and replace the copies by mappings in the background.
    Deferred,
    /// Map runs of at least this many pages at once; copy the rest, and replace it in the background.
    AtRead {
        /// The shortest run worth mapping.
        run_pages_min: u64,
    },
}

/// Below this much available memory the host is short of it.
pub const SHORT_PERMILLE: u32 = 125;
/// Below this, memory counts more than any time.
pub const SCARCE_PERMILLE: u32 = 50;
/// The shortest run that is mapped when memory is short: 32 KiB, where a mapped page costs about six times a copied one.
pub const RUN_PAGES_SHORT: u64 = 8;

/// The rule of `share = "adaptive"`.
pub fn adaptive(situation: Situation) -> Way {
    match situation.available_permille {
        available if available < SCARCE_PERMILLE => Way::AtRead { run_pages_min: 1 },
        available if available < SHORT_PERMILLE => Way::AtRead {
            run_pages_min: RUN_PAGES_SHORT,
        },
        // Alone, a mapping only spares the copy in the host's page cache, which the host can drop by itself.
        _ if situation.users < 2 => Way::Remember,
        _ => Way::Deferred,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn eagerness(way: Way) -> u64 {
        match way {
            Way::Remember => 0,
            Way::Deferred => 1,
            Way::AtRead { run_pages_min } => 1000 - run_pages_min,
        }
    }

    proptest! {
        #[test]
        fn less_memory_or_more_users_never_share_less(
            users in 0..9u32, more in 0..9u32, available in 0..1000u32, less in 0..1000u32,
        ) {
            let before = adaptive(Situation { users, available_permille: available });
            let situation = Situation { users: users + more, available_permille: available.saturating_sub(less) };
            prop_assert!(eagerness(adaptive(situation)) >= eagerness(before));
        }
    }

    #[test]
    fn a_lone_vm_on_a_large_host_only_remembers() {
        let situation = Situation {
            users: 1,
            available_permille: 800,
        };
        assert_eq!(adaptive(situation), Way::Remember);
        assert_eq!(
            adaptive(Situation {
                users: 2,
                ..situation
            }),
            Way::Deferred
        );
    }
}
