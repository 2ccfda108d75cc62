//! Identity of the process at the other end of a connection, and its rights.
//!
//! The owner is the user who runs the API, or root. All other users connect by the group of the socket: a
//! *member*.

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use axum::serve::IncomingStream;
use config::settings::MemberPolicy;
use nix::unistd::geteuid;
use registry::monitor::{NameRules, Owner};
use registry::vms::Record;

use crate::api::Context;
use crate::connections::Listener;
use crate::problem::Problem;

/// Rights of the group's members.
#[derive(Clone, Debug)]
pub enum MemberRights {
    /// Read everything, and change nothing.
    Look,
    /// Start VMs that the policy admits, and end those.
    Limited(MemberPolicy),
    /// All rights of the owner: members of root's API are root.
    All,
}

/// Ids of a connection's peer, from the kernel at connection time; none if unknown.
#[derive(Clone, Debug)]
pub struct Peer(Option<Owner>);

impl Connected<IncomingStream<'_, Listener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Self {
        Self(stream.io().owner().cloned())
    }
}

impl Peer {
    fn uid(&self) -> Option<u32> {
        self.0.as_ref().map(|owner| owner.uid)
    }

    /// Rules for the files that a member's VM names. An API of root has them opened by the member's rights;
    /// any other has only the rights of its own user, and `none` is returned.
    ///
    /// # Errors
    /// If the ids of the peer are unknown.
    pub(crate) fn name_rules(&self, own: u32, policy: &MemberPolicy) -> Result<Option<NameRules>, Problem> {
        if own != 0 {
            return Ok(None);
        }
        let owner = self.0.clone().ok_or_else(|| {
            Problem::new(
                StatusCode::FORBIDDEN,
                "the kernel does not say which groups you have; ask the owner to start the VM",
            )
        })?;
        Ok(Some(NameRules {
            directories: policy.paths.clone(),
            setting: "`paths` of `[members]` in the host's file".to_owned(),
            owner: Some(owner),
        }))
    }
}

/// Originator of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The owner, with all rights; the user id if known.
    Owner(Option<u32>),
    /// A member, with the rights of [`MemberRights`]; the user id if known.
    Member(Option<u32>),
}

impl Caller {
    fn of(uid: Option<u32>, own: u32, rights: &MemberRights) -> Self {
        match rights {
            MemberRights::All => Self::Owner(uid),
            MemberRights::Look | MemberRights::Limited(_) => Self::by_uid(uid, own),
        }
    }

    /// The user `own` and root are owners; all others are members.
    pub(crate) fn by_uid(uid: Option<u32>, own: u32) -> Self {
        if uid.is_some_and(|uid| uid == own || uid == 0) {
            Self::Owner(uid)
        } else {
            Self::Member(uid)
        }
    }

    /// Returns the user id, if known.
    pub fn uid(self) -> Option<u32> {
        match self {
            Self::Owner(uid) | Self::Member(uid) => uid,
        }
    }

    /// Checks that the caller may end or change the VM of `record`.
    pub fn may_change(self, rights: &MemberRights, record: &Record) -> Result<(), Problem> {
        match (self, rights) {
            (Self::Owner(_), _) => Ok(()),
            (Self::Member(Some(uid)), MemberRights::Limited(_)) if record.member == Some(uid) => Ok(()),
            (Self::Member(_), MemberRights::Limited(_)) => {
                let why = format!(
                    "{} is not yours; members may use, change and end their own VMs",
                    record.name
                );
                Err(Problem::new(StatusCode::FORBIDDEN, why))
            }
            (Self::Member(_), MemberRights::Look | MemberRights::All) => Err(only_look()),
        }
    }

    /// Checks that the caller may use the guest of `record`: run programs in it, copy files and read its
    /// console.
    ///
    /// A member may use the guests of VMs that the member started. This adds no right: the policy lets
    /// members choose the kernel's command line, and so the first program, of a guest that has a network
    /// card. The guest's access to the host was decided when it started.
    pub fn may_use_guest(self, rights: &MemberRights, record: &Record) -> Result<(), Problem> {
        self.may_change(rights, record)
    }

    /// Checks that the caller is the owner, as the operation `what` requires.
    pub fn must_own(self, what: &str) -> Result<(), Problem> {
        match self {
            Self::Owner(_) => Ok(()),
            Self::Member(_) => Err(Problem::new(
                StatusCode::FORBIDDEN,
                format!("{what} is for the owner of the API, not for members; ask the owner"),
            )),
        }
    }

    /// Returns the policy and the user id for the caller's starts; none for the owner, who may start any VM.
    pub fn policy(self, rights: &MemberRights) -> Result<Option<(u32, &MemberPolicy)>, Problem> {
        match (self, rights) {
            (Self::Owner(_), _) => Ok(None),
            (Self::Member(Some(uid)), MemberRights::Limited(policy)) => Ok(Some((uid, policy))),
            (Self::Member(_), _) => Err(only_look()),
        }
    }
}

fn only_look() -> Problem {
    Problem::new(
        StatusCode::FORBIDDEN,
        "members of the group may only look; ask the owner for a table `[members]` in the host's file",
    )
}

/// Adds the caller's identity to each request.
pub async fn recognize(
    State(context): State<Context>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let own = geteuid().as_raw();
    let caller = Caller::of(peer.uid(), own, &context.rights);
    request.extensions_mut().insert(caller);
    request.extensions_mut().insert(peer);
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited() -> MemberRights {
        let text = "[members]\nmemory = \"1G\"\ncpus = 1";
        let settings = config::settings::Settings::parse("host.toml", text).unwrap();
        MemberRights::Limited(settings.members.unwrap())
    }

    fn record(member: Option<u32>) -> Record {
        let record = serde_json::json!({
            "name": "a", "state": "running", "monitor_pid": 1, "shard_pid": 2, "started_unix_s": 0,
            "boots": 1, "cid": 3,
            "sandbox_missing": [], "member": member, "spec": { "name": "a", "image": "tiny" },
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn only_this_user_and_root_are_owners_unless_members_have_all_rights() {
        let caller = |uid, rights: &MemberRights| Caller::of(uid, 1000, rights);
        for uid in [0, 1000] {
            assert_eq!(caller(Some(uid), &MemberRights::Look), Caller::Owner(Some(uid)));
        }
        for uid in [Some(1001), None] {
            assert_eq!(caller(uid, &MemberRights::Look), Caller::Member(uid));
            assert_eq!(caller(uid, &limited()), Caller::Member(uid));
            assert_eq!(caller(uid, &MemberRights::All), Caller::Owner(uid));
        }
    }

    #[test]
    fn files_of_a_members_vm_are_opened_by_the_members_rights_where_the_api_is_roots() {
        let MemberRights::Limited(policy) = limited() else {
            panic!("no policy");
        };
        let owner = Owner {
            uid: 1001,
            gid: 100,
            groups: vec![36],
        };
        let peer = Peer(Some(owner.clone()));
        let rules = peer.name_rules(0, &policy).unwrap().unwrap();
        assert_eq!(rules.owner, Some(owner));
        assert_eq!(rules.directories, policy.paths);
        assert!(
            peer.name_rules(1000, &policy).unwrap().is_none(),
            "no rights to give up"
        );
        assert!(Peer(None).name_rules(0, &policy).is_err());
    }

    #[test]
    fn members_start_vms_by_a_policy_only() {
        let (member, unknown) = (Caller::Member(Some(1001)), Caller::Member(None));
        assert_eq!(
            member.policy(&MemberRights::Look).unwrap_err().status,
            StatusCode::FORBIDDEN
        );
        assert!(unknown.policy(&limited()).is_err());
        let rights = limited();
        assert_eq!(member.policy(&rights).unwrap().unwrap().0, 1001);
        assert!(Caller::Owner(None).policy(&MemberRights::Look).unwrap().is_none());
    }

    #[test]
    fn members_end_their_own_vms_only() {
        let member = Caller::Member(Some(1001));
        let may = |caller: Caller, rights: &MemberRights, started_by| {
            caller.may_change(rights, &record(started_by)).is_ok()
        };
        assert!(may(member, &limited(), Some(1001)));
        assert!(!may(member, &limited(), Some(1002)));
        assert!(!may(member, &limited(), None), "the owner's VM");
        assert!(!may(member, &MemberRights::Look, Some(1001)));
        assert!(!may(Caller::Member(None), &limited(), None));
        assert!(may(Caller::Owner(None), &limited(), Some(1001)));
        let use_guest = |caller: Caller, started_by| caller.may_use_guest(&limited(), &record(started_by));
        assert!(use_guest(member, Some(1001)).is_ok());
        assert!(use_guest(member, Some(1002)).is_err() && use_guest(member, None).is_err());
    }
}
