//! Requests for places by users who do not own the cluster: the socket, the messages, and the client's
//! checks.
//!
//! Only a cluster that root started has this socket, and only root can have created it: it is in a directory
//! of root's that no other user can write to, and root's process listens. A failure costs only the client:
//! its VM runs outside the cluster.
//!
//! Requests and replies are one line of JSON each. No request names its user; the server reads the user from
//! the kernel (`SO_PEERCRED`). A connection holds at most one place, and releases it when it closes.
//! `cell::cluster::admission` is the server.

use std::fs::{DirBuilder, Metadata, symlink_metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::cluster::CellPlan;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_socket, getsockopt, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;
use serde::{Deserialize, Serialize};
use urpc::version::Versions;

use super::client::Connection;
use super::interface::{VmPlacement, VmShare};
use crate::json_line::Protocol;

/// The user's side of the protocol.
pub const OF_USER: Protocol = Protocol {
    name: "the protocol of admission",
    peer: "the admission server",
    versions: Versions::up_to(1),
};
/// The admission server's side of the protocol.
pub const OF_SERVER: Protocol = Protocol {
    peer: "the user",
    ..OF_USER
};

/// The environment variable that names the directory, for tests.
pub const VARIABLE: &str = "MIRRORBALL_USERS";
const DIRECTORY: &str = "/run/mirrorball-users";
/// Mode of the directory: all users can list it, and only root can change it.
const DIRECTORY_MODE: u32 = 0o755;
/// Bits of a directory into which other users may put files.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;
/// Maximum length of a request, in bytes.
pub const REQUEST_BYTES_MAX: u64 = 4 << 10;
/// Time limit for connecting while the server's queue is full.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a reply: longer than that of a cell.
const REPLY_LIMIT: Duration = Duration::from_secs(15);

/// A user's request.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "request")]
pub enum Request {
    /// Reserve a place for a VM until the connection closes.
    Place(PlaceRequest),
    /// Release the place of a VM of this user that has ended. The reply comes when its name and its share are
    /// free.
    Leave {
        /// The VM's name.
        name: String,
    },
    /// Report the cells' free resources and the user's own VMs.
    Status {},
    /// Report the CPUs and the memory of the cluster's cells. Every user may request this.
    Taken {},
}

/// A user's request for a place.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PlaceRequest {
    /// The VM's name.
    pub name: String,
    /// Resources that it takes of a cell.
    pub share: VmShare,
    /// The only cell that may take it.
    pub cell: Option<u16>,
}

/// Reply to a [`Request`].
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "reply")]
pub enum Reply {
    /// The VM has this place.
    Placed {
        /// CPUs and nodes of the VM.
        place: VmPlacement,
        /// Enforcement of the limits.
        limits: Limits,
    },
    /// The cluster does not admit this user.
    NotAdmitted,
    /// The request can't be carried out.
    Refused {
        /// Reason and help.
        why: String,
    },
    /// The request was carried out.
    Done,
    /// Cluster as this user may see it.
    Status(UserStatus),
    /// Use by all users, for root.
    Users {
        /// The admitted users.
        users: Vec<UserUse>,
    },
    /// Resources of the cluster's cells.
    Taken {
        /// The cells of this host.
        cells: Vec<CellPlan>,
    },
}

/// Enforcement of a VM's CPU and memory limits.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limits {
    /// A control group of root's, which the user's processes can't leave.
    Group,
    /// The user's own processes, best effort.
    BestEffort,
}

impl Limits {
    /// Text that `cluster status` prints.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Group => "held by control groups",
            Self::BestEffort => "best effort",
        }
    }
}

/// The cluster as one of its users sees it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserStatus {
    /// The cells of this host that take VMs, by number.
    pub cells: Vec<CellRoom>,
    /// The user's limits and use.
    #[serde(flatten)]
    pub own: UserUse,
}

/// Free resources of a cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellRoom {
    /// The cell's number.
    pub number: u16,
    /// The cell's CPUs.
    pub cpus: Vec<usize>,
    /// The NUMA nodes of its memory.
    pub nodes: Vec<u32>,
    /// Free memory, in bytes.
    pub free_bytes: u64,
}

/// A user's limits and use.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct UserUse {
    /// The user's id.
    pub uid: u32,
    /// The user's name in the cluster file.
    pub name: String,
    /// Maximum resources of the user's VMs together.
    pub most: VmShare,
    /// Resources that they use.
    pub used: VmShare,
    /// Enforcement of the limits.
    pub limits: Limits,
    /// The VMs, by name.
    pub vms: Vec<PlacedVm>,
}

/// A user's VM with a place.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct PlacedVm {
    /// The VM's name.
    pub name: String,
    /// The VM's cell.
    pub cell: u16,
    /// Resources that it takes of the cell.
    pub share: VmShare,
}

/// Returns the directory: `$MIRRORBALL_USERS`, else `/run/mirrorball-users`.
pub fn directory() -> PathBuf {
    std::env::var_os(VARIABLE).map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from)
}

/// Returns the path of the socket in the directory.
pub fn socket_in(directory: &Path) -> PathBuf {
    directory.join("admission.sock")
}

/// Returns the path of the lock in the directory, which the server holds.
pub fn lock_in(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Creates the directory when it is missing, and checks that only root controls it.
///
/// # Errors
/// If it can't be created, is a link or a file, or another user can change it or a directory above it.
pub fn make_directory(directory: &Path) -> io::Result<()> {
    make_directory_of(directory, ROOT)
}

fn make_directory_of(directory: &Path, owner: u32) -> io::Result<()> {
    if symlink_metadata(directory).is_err() {
        DirBuilder::new().mode(DIRECTORY_MODE).create(directory)?;
        // The process's umask must not restrict it.
        std::fs::set_permissions(
            directory,
            std::os::unix::fs::PermissionsExt::from_mode(DIRECTORY_MODE),
        )?;
    }
    check_directory(directory, owner)
}

/// Checks that only `owner` can change the directory and those above it.
fn check_directory(directory: &Path, owner: u32) -> io::Result<()> {
    check(directory, &symlink_metadata(directory)?, owner)?;
    let absolute = std::path::absolute(directory)?;
    for above in absolute.ancestors().skip(1) {
        let about = symlink_metadata(above)?;
        // In a directory with the sticky bit, others can't rename or remove files of other owners.
        let is_open = about.mode() & WRITABLE_BY_OTHERS != 0 && about.mode() & STICKY == 0;
        if about.is_symlink() || is_open || ![ROOT, owner].contains(&about.uid()) {
            return Err(refused(directory, "is below one that another user controls"));
        }
    }
    Ok(())
}

fn check(directory: &Path, about: &Metadata, owner: u32) -> io::Result<()> {
    if about.is_symlink() {
        Err(refused(
            directory,
            "is a symbolic link, which can be led elsewhere",
        ))
    } else if !about.is_dir() {
        Err(refused(directory, "is not a directory"))
    } else if about.uid() != owner {
        Err(refused(directory, "belongs to another user"))
    } else if about.mode() & WRITABLE_BY_OTHERS != 0 {
        Err(refused(directory, "can be written by other users"))
    } else {
        Ok(())
    }
}

fn refused(directory: &Path, why: &str) -> io::Error {
    let why = format!(
        "{} {why}; help: let root remove it, or set {VARIABLE} to a directory that root alone may write to",
        directory.display()
    );
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// Connects to the admission server of this host's cluster; none where there is no such server.
///
/// # Errors
/// If the server does not answer, or the directory or the server is not root's.
pub fn connect() -> io::Result<Option<Connection>> {
    connect_to(&directory(), ROOT)
}

fn connect_to(directory: &Path, owner: u32) -> io::Result<Option<Connection>> {
    match symlink_metadata(directory) {
        Ok(about) => check(directory, &about, owner)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let path = socket_in(directory);
    if symlink_metadata(&path).is_err() {
        return Ok(None);
    }
    let stream = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // The limit also applies to the wait for a slot in the listener's queue.
    let limit = TimeVal::new(CONNECT_LIMIT.as_secs() as i64, 0);
    setsockopt(&stream, sockopt::SendTimeout, &limit)?;
    connect_socket(stream.as_raw_fd(), &UnixAddr::new(&path)?)?;
    // Credentials of the listening process.
    if getsockopt(&stream, sockopt::PeerCredentials)?.uid() != owner {
        return Err(refused(directory, "is served by another user's process"));
    }
    let connection = Connection::of(UnixStream::from(stream));
    connection.limit_wait(REPLY_LIMIT)?;
    Ok(Some(connection))
}

/// Sends one request on a connection of its own; none where there is no admission server.
///
/// # Errors
/// As [`connect`], and if the server closes the connection.
pub fn request(request: &Request) -> io::Result<Option<Reply>> {
    match connect()? {
        Some(mut connection) => connection.exchange(&OF_USER, request).map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use nix::unistd::geteuid;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn directory_that_another_user_could_lead_elsewhere_is_refused() {
        let (folder, own) = (folder(), geteuid().as_raw());
        let path = |name: &str| folder.path().join(name);
        make_directory_of(&path("users"), own).unwrap();
        let mode = fs::metadata(path("users")).unwrap().mode() & 0o7777;
        assert_eq!(mode, DIRECTORY_MODE);
        make_directory_of(&path("users"), own).unwrap();
        let refused = |path: &Path, owner, why: &str| {
            let error = make_directory_of(path, owner).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("help: "), "{error}");
            let error = connect_to(path, owner).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        symlink(path("users"), path("link")).unwrap();
        refused(&path("link"), own, "symbolic link");
        fs::write(path("file"), "").unwrap();
        refused(&path("file"), own, "not a directory");
        refused(&path("users"), own + 1, "belongs to another user");
        fs::set_permissions(path("users"), Permissions::from_mode(0o777)).unwrap();
        refused(&path("users"), own, "written by other users");
        fs::create_dir(path("open")).unwrap();
        make_directory_of(&path("open/users"), own).unwrap();
        fs::set_permissions(path("open"), Permissions::from_mode(0o777)).unwrap();
        let error = make_directory_of(&path("open/users"), own).unwrap_err();
        assert!(error.to_string().contains("below one that another user controls"));
    }

    #[test]
    fn host_without_an_admission_server_has_no_connection() {
        let (folder, own) = (folder(), geteuid().as_raw());
        assert!(connect_to(&folder.path().join("none"), own).unwrap().is_none());
        assert!(connect_to(folder.path(), own).unwrap().is_none());
        // A server that has ended is another case: it may start again.
        drop(UnixListener::bind(socket_in(folder.path())).unwrap());
        assert!(connect_to(folder.path(), own).is_err());
    }

    #[test]
    fn requests_and_replies_are_lines() {
        let (folder, own) = (folder(), geteuid().as_raw());
        let listener = UnixListener::bind(socket_in(folder.path())).unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            (&stream).write_all(b"{\"reply\":\"not-admitted\"}\n").unwrap();
            OF_SERVER.read::<Request>(&line).unwrap()
        });
        let asked = Request::Place(PlaceRequest {
            name: "web".to_owned(),
            share: VmShare {
                vcpus: 1,
                memory_bytes: 1 << 30,
                ..VmShare::default()
            },
            cell: Some(1),
        });
        let mut connection = connect_to(folder.path(), own).unwrap().unwrap();
        let reply: Reply = connection.exchange(&OF_USER, &asked).unwrap();
        assert_eq!(reply, Reply::NotAdmitted);
        assert_eq!(server.join().unwrap(), asked);
    }

    #[test]
    fn request_that_names_a_user_is_the_same_without_that() {
        let line = r#"{"request":"place","name":"web","share":{"vcpus":1,"memory_bytes":1},"cell":null}"#;
        let forged = line.replace("\"cell\"", "\"uid\":0,\"cell\"");
        let read = |line: &str| OF_SERVER.read::<Request>(line).unwrap();
        assert_eq!(read(line), read(&forged));
    }
}
