//! The process at the other end of a connection, and what it may do.
//!
//! The owner is the user whom the API runs as, and root. Everybody else came in by the group of the socket: a *member*.

use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use axum::serve::IncomingStream;
use config::settings::MemberPolicy;
use nix::unistd::geteuid;
use registry::vms::Record;

use crate::api::Context;
use crate::connections::Listener;
use crate::problem::Problem;

/// What members of the group may do.
#[derive(Clone, Debug)]
pub enum MemberRights {
    /// See everything, and change nothing.
    Look,
    /// Start VMs that the policy admits, and end those.
    Limited(MemberPolicy),
    /// Everything that the owner may: members of root's API are root.
    All,
}

/// The user id of a connection's other end, as the kernel told it when that connected; none if it did not.
#[derive(Clone, Copy, Debug)]
pub struct Peer(Option<u32>);

impl Connected<IncomingStream<'_, Listener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Self {
        Self(stream.io().uid())
    }
}

/// The one who makes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// May do everything; its user id, if that is known.
    Owner(Option<u32>),
    /// May do what the [`MemberRights`] say; its user id, if that is known.
    Member(Option<u32>),
}

impl Caller {
    fn of(Peer(uid): Peer, own: u32, rights: &MemberRights) -> Self {
        match rights {
            MemberRights::All => Self::Owner(uid),
            MemberRights::Look | MemberRights::Limited(_) => Self::by_uid(uid, own),
        }
    }

    /// The user `own` and root are owners, and others are members.
    pub(crate) fn by_uid(uid: Option<u32>, own: u32) -> Self {
        if uid.is_some_and(|uid| uid == own || uid == 0) {
            Self::Owner(uid)
        } else {
            Self::Member(uid)
        }
    }

    /// The user id, if that is known.
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

    /// Checks that the caller may use the guest of `record`: run programs in it, copy files and read its console.
    ///
    /// A member may do that in the VMs that the member started. It gives no right that a member lacks: the policy lets members choose
    /// the kernel's command line, and so the first program, of a guest that has a network card. What the guest may have of the
    /// host was decided when it started.
    pub fn may_use_guest(self, rights: &MemberRights, record: &Record) -> Result<(), Problem> {
        self.may_change(rights, record)
    }

    /// Checks that the caller is the owner, whose the operation `what` is.
    pub fn must_own(self, what: &str) -> Result<(), Problem> {
        match self {
            Self::Owner(_) => Ok(()),
            Self::Member(_) => Err(Problem::new(
                StatusCode::FORBIDDEN,
                format!("{what} is for the owner of the API, not for members; ask the owner"),
            )),
        }
    }

    /// The policy and the user id by which the caller may start VMs; nothing for the owner, who may start any.
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

/// Tells the handlers who calls.
pub async fn recognize(
    State(context): State<Context>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = Caller::of(peer, geteuid().as_raw(), &context.rights);
    request.extensions_mut().insert(caller);
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
            "name": "a", "state": "running", "monitor_pid": 1, "shard_pid": 2, "started_unix_s": 0, "boots": 1, "cid": 3,
            "sandbox_missing": [], "member": member, "spec": { "name": "a", "image": "tiny" },
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn the_owner_is_this_user_or_root_and_nobody_else_unless_members_may_all() {
        let caller = |uid, rights: &MemberRights| Caller::of(Peer(uid), 1000, rights);
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
