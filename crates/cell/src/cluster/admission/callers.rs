//! Bounds on connections, by the users that the kernel names. Without I/O, clock or threads.
//!
//! Each admitted user has connections of their own, one for each VM and some more. All others share a few, so
//! that they never take an admitted user's.

use std::collections::BTreeMap;

/// Connections of an admitted user, in addition to one for each vCPU that the user may have.
const SPARE: u32 = 16;
/// Connections of one user who is not admitted.
const STRANGER_MAX: u32 = 4;
/// Connections of all users together who are not admitted.
const STRANGERS_MAX: u32 = 32;

/// Connections of root.
const ROOT_MAX: u32 = 64;

/// The connections of each user.
#[derive(Debug, Default)]
pub(super) struct Callers {
    /// Of each user that has any: how many, and whether the user is admitted.
    open: BTreeMap<u32, (u32, bool)>,
}

impl Callers {
    /// Counts a new connection of a user, who may have `vcpus` if admitted. Returns whether there is room for
    /// it.
    pub(super) fn begin(&mut self, uid: u32, vcpus: Option<u32>) -> bool {
        let strangers: u32 = self
            .open
            .iter()
            .filter(|(uid, (_, admitted))| **uid != 0 && !admitted)
            .map(|(_, (open, _))| open)
            .sum();
        let (open, _) = self.open.get(&uid).copied().unwrap_or_default();
        let has_room = match vcpus {
            // Others take nothing from root, who asks whether users are served.
            None if uid == 0 => open < ROOT_MAX,
            Some(vcpus) => open < vcpus.saturating_add(SPARE),
            None => open < STRANGER_MAX && strangers < STRANGERS_MAX,
        };
        if has_room {
            self.open.insert(uid, (open + 1, vcpus.is_some()));
        }
        has_room
    }

    /// How many connections of a user count.
    #[cfg(test)]
    pub(super) fn open_of(&self, uid: u32) -> u32 {
        self.open.get(&uid).map_or(0, |(open, _)| *open)
    }

    /// A connection that was counted has ended.
    pub(super) fn end(&mut self, uid: u32) {
        if let Some((open, _)) = self.open.get_mut(&uid) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_with_many_connections_keeps_no_other_user_out() {
        let mut callers = Callers::default();
        let most = 4 + SPARE;
        assert_eq!(
            (0..1000).filter(|_| callers.begin(1001, Some(4))).count(),
            most as usize
        );
        assert!(callers.begin(1002, Some(1)));
        assert!(callers.begin(7, None));
        callers.end(1001);
        assert!(callers.begin(1001, Some(4)) && !callers.begin(1001, Some(4)));
    }

    #[test]
    fn strangers_take_only_what_is_for_them() {
        let mut callers = Callers::default();
        let begun = (0..1000).filter(|_| callers.begin(7, None)).count();
        assert_eq!(begun, STRANGER_MAX as usize);
        // A user may have many ids.
        let begun = (100_000..101_000).filter(|uid| callers.begin(*uid, None)).count();
        assert_eq!(begun, (STRANGERS_MAX - STRANGER_MAX) as usize);
        assert!(callers.begin(1001, Some(1)));
        for _ in 0..STRANGER_MAX {
            callers.end(7);
        }
        assert!(callers.begin(8, None));
        assert_eq!(
            callers.open.len(),
            begun + 2,
            "users without connections are forgotten"
        );
    }
}
