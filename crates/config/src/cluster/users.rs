//! Users that a cluster admits in addition to its owner, and their limits.

use serde::{Deserialize, Serialize};

use super::{ClusterSpec, MEMORY_MIN_BYTES, MembershipSpec, OnLost};
use crate::error::ConfigError;
use crate::fault::{Fault, fault};
use crate::size::Size;

/// Maximum vCPUs of one user: more than for a thousand CPUs.
const USER_CPUS_MAX: u32 = 1 << 16;
/// Maximum users of one cluster.
const USERS_MAX: usize = 256;

/// A user of this host that the cluster admits.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserSpec {
    /// Name in the host's list of users.
    pub name: Option<String>,
    /// The user's id, instead of a name.
    pub uid: Option<u32>,
    /// Maximum vCPUs of the user's VMs together.
    pub cpus: u32,
    /// Maximum guest memory of the user's VMs together.
    pub memory: Size,
}

/// A user of this host that the cluster admits, by id.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserPlan {
    /// The user's id.
    pub uid: u32,
    /// The user's name, or the id in digits if the file gives only that.
    pub name: String,
    /// Maximum vCPUs of the user's VMs together.
    pub vcpus: u32,
    /// Maximum guest memory of the user's VMs together, in bytes.
    pub memory_bytes: u64,
}

impl ClusterSpec {
    /// Returns the users that the cluster admits on this host. `uid_of` looks a name up in the host's list of
    /// users. `text` is the cluster file's text, called `source_name`, for errors.
    ///
    /// # Errors
    /// If a user is unknown, is root, or is listed twice.
    pub fn users(
        &self,
        uid_of: impl Fn(&str) -> Option<u32>,
        source_name: &str,
        text: &str,
    ) -> Result<Vec<UserPlan>, ConfigError> {
        self.plan_users(uid_of)
            .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))
    }

    fn plan_users(&self, uid_of: impl Fn(&str) -> Option<u32>) -> Result<Vec<UserPlan>, Fault> {
        let mut plans: Vec<UserPlan> = Vec::new();
        for (index, user) in self.users.iter().enumerate() {
            let at = index.to_string();
            let plan = user.plan(&at, &uid_of)?;
            if plan.uid == 0 {
                return Err(fault(
                    &["users", &at],
                    "root is listed",
                    "leave root out: the cluster is root's own",
                ));
            }
            if let Some(other) = plans.iter().find(|other| other.uid == plan.uid) {
                return Err(fault(
                    &["users", &at],
                    format!("{} is user {}, as {} before", plan.name, plan.uid, other.name),
                    "list each user once",
                ));
            }
            plans.push(plan);
        }
        Ok(plans)
    }

    pub(super) fn check_users(&self) -> Result<(), Fault> {
        let stops = |membership: &MembershipSpec| membership.on_lost == OnLost::Stop;
        if !self.users.is_empty() && self.membership.as_ref().is_some_and(stops) {
            return Err(fault(
                &["users"],
                "users beside `on_lost = \"stop\"`",
                "a lost host ends its owner's VMs only; leave one of the two out",
            ));
        }
        if self.users.len() > USERS_MAX {
            return Err(fault(
                &["users"],
                format!("{} users", self.users.len()),
                format!("a cluster admits {USERS_MAX} at most"),
            ));
        }
        for (index, user) in self.users.iter().enumerate() {
            let at = index.to_string();
            if user.name.is_some() == user.uid.is_some() {
                return Err(fault(
                    &["users", &at],
                    "a user needs one of `name` and `uid`",
                    "write name = \"alice\", or uid = 1000",
                ));
            }
            if user.cpus > USER_CPUS_MAX {
                return Err(fault(
                    &["users", &at, "cpus"],
                    format!("{} CPUs", user.cpus),
                    format!("a user may have {USER_CPUS_MAX} at most"),
                ));
            }
            if user.cpus == 0 {
                return Err(fault(
                    &["users", &at, "cpus"],
                    "no CPUs for any VM",
                    "1 at least; leave the user out to admit no VM",
                ));
            }
            if user.memory.0 < MEMORY_MIN_BYTES {
                return Err(fault(
                    &["users", &at, "memory"],
                    "too little memory for a VM",
                    "64M at least",
                ));
            }
        }
        Ok(())
    }
}

impl UserSpec {
    fn plan(&self, at: &str, uid_of: impl Fn(&str) -> Option<u32>) -> Result<UserPlan, Fault> {
        let (uid, name) = match (&self.name, self.uid) {
            (Some(name), _) => {
                let uid = uid_of(name).ok_or_else(|| {
                    fault(
                        &["users", at, "name"],
                        format!("this host has no user {name}"),
                        "check the name, or write `uid` instead",
                    )
                })?;
                (uid, name.clone())
            }
            (None, Some(uid)) => (uid, uid.to_string()),
            (None, None) => (0, String::new()),
        };
        Ok(UserPlan {
            uid,
            name,
            vcpus: self.cpus,
            memory_bytes: self.memory.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CELL: &str = "[[cells]]\ncpus = \"1\"\n";

    fn planned(users: &str) -> Result<Vec<UserPlan>, ConfigError> {
        let text = format!("{CELL}{users}");
        let known = [("root", 0), ("alice", 1001), ("twin", 1001)];
        let uid_of = |name: &str| {
            known
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, uid)| *uid)
        };
        ClusterSpec::parse("cluster.toml", &text)?.users(uid_of, "cluster.toml", &text)
    }

    fn user(keys: &str) -> String {
        format!("[[users]]\n{keys}\n")
    }

    #[test]
    fn users_are_listed_by_name_or_id_with_their_limits() {
        let alice = user("name = \"alice\"\ncpus = 4\nmemory = \"8G\"");
        let other = user("uid = 7\ncpus = 1\nmemory = \"64M\"");
        let plan = |uid, name: &str, vcpus, memory_bytes| UserPlan {
            uid,
            name: name.to_owned(),
            vcpus,
            memory_bytes,
        };
        assert_eq!(
            planned(&format!("{alice}{other}")).unwrap(),
            [plan(1001, "alice", 4, 8 << 30), plan(7, "7", 1, 64 << 20)]
        );
        assert_eq!(planned("").unwrap(), []);
    }

    #[test]
    fn wrong_users_are_refused_with_the_place_and_help() {
        let limits = "cpus = 1\nmemory = \"1G\"";
        let twice = format!(
            "{}{}",
            user(&format!("name = \"alice\"\n{limits}")),
            user(&format!("name = \"twin\"\n{limits}"))
        );
        for (users, why) in [
            (user(limits), "needs one of"),
            (
                user(&format!("name = \"alice\"\nuid = 1001\n{limits}")),
                "needs one of",
            ),
            (
                user(&format!("name = \"nobody-here\"\n{limits}")),
                "no user nobody-here",
            ),
            (user(&format!("name = \"root\"\n{limits}")), "root is listed"),
            (user(&format!("uid = 0\n{limits}")), "root is listed"),
            (user("uid = 7\ncpus = 0\nmemory = \"1G\""), "no CPUs"),
            (user("uid = 7\ncpus = 1\nmemory = \"1M\""), "too little memory"),
            (user("uid = 7\ncpus = 1"), "memory"),
            (user(&format!("uid = 7\n{limits}\nhosts = 1")), "hosts"),
            (twice, "as alice before"),
        ] {
            let error = planned(&users).unwrap_err();
            assert!(error.message.contains(why), "{users}: {}", error.message);
            assert!(error.span.is_some(), "{users}");
        }
    }
}
