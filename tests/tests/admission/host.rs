//! A host with root's cluster and users beside it, each with a runtime directory and a home. The guests halt
//! at once.

use std::fs::{self, Permissions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::{Call, copy_binary};
use guest_tests::halting::halting_guest;
use guest_tests::{Scratch, host, mirrorball, wait};
use serde_json::Value;

pub const ALICE: u32 = 61_001;
pub const BOB: u32 = 61_002;
/// A user that the cluster file does not admit.
pub const MALLORY: u32 = 61_003;
/// Time limit of a short step on an emulated host.
pub const SOON: Duration = Duration::from_secs(60);

/// A host with root's cluster. Dropping it ends the cluster, and VMs that a test has left.
pub struct Host {
    scratch: Scratch,
    kvm: Permissions,
    guest: PathBuf,
}

impl Host {
    pub fn new(test: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "these tests need root");
        let scratch = Scratch::new(test);
        fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).expect("our own directory");
        let guest = scratch.write("guest", halting_guest());
        fs::set_permissions(&guest, Permissions::from_mode(0o644)).expect("our own file");
        for user in [ALICE, BOB, MALLORY] {
            for name in ["home", "run"] {
                let folder = scratch.join(&format!("{name}-{user}"));
                fs::create_dir(&folder).expect("our own directory");
                fs::set_permissions(&folder, Permissions::from_mode(0o700)).expect("our own directory");
                chown(&folder, Some(user), Some(user)).expect("root gives files away");
            }
        }
        // The build directory may be closed to others.
        copy_binary(&scratch.join("command")).expect("room for the command");
        let kvm = fs::metadata("/dev/kvm")
            .expect("these tests need KVM")
            .permissions();
        fs::set_permissions("/dev/kvm", Permissions::from_mode(0o666)).expect("root may");
        Self { scratch, kvm, guest }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.scratch.write(name, text);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("our own file");
        path
    }

    pub fn users(&self) -> PathBuf {
        self.path("users")
    }

    /// Brings up two cells of a CPU and 512 MiB each, for two users.
    #[track_caller]
    pub fn up(&self) {
        let cpus = cpus();
        let cell = |cpu: usize| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"512M\"\n");
        let user = |uid: u32| format!("[[users]]\nuid = {uid}\ncpus = 3\nmemory = \"256M\"\n");
        let text = format!("{}{}{}{}", cell(cpus[0]), cell(cpus[1]), user(ALICE), user(BOB));
        let file = self.write("cluster.toml", &text);
        self.root(["cluster", "up", "--lab", "never", text_of(&file)])
            .ok();
    }

    /// A command of root's.
    pub fn root<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        mirrorball(arguments)
            .limit(SOON)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.path("root"))
            .env("MIRRORBALL_DATA", self.path("data"))
            .env("MIRRORBALL_USERS", self.users())
    }

    /// A command of a user's, without root's environment.
    pub fn user<'a>(&self, uid: u32, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        let own = |name: &str| self.path(&format!("{name}-{uid}"));
        let set = |name: &str, path: PathBuf| format!("{name}={}", path.display());
        let path = std::env::var("PATH").expect("a path");
        let call = Call::new("env")
            .args(["-i", "MIRRORBALL_IN_LAB=1", &format!("PATH={path}")])
            .args([set("HOME", own("home")), set("XDG_RUNTIME_DIR", own("run"))])
            .args([set("MIRRORBALL_USERS", self.users())])
            .args([
                "setpriv",
                "--reuid",
                &uid.to_string(),
                "--regid",
                &uid.to_string(),
            ])
            .args(["--clear-groups".into(), self.path("command")]);
        call.args(arguments).folder(Path::new("/")).limit(SOON)
    }

    /// The start of a VM of 64 MiB and a vCPU by a user, or by root.
    pub fn run(&self, uid: u32, name: &str, more: &[&str]) -> Call {
        self.run_with_memory(uid, name, "64M", more)
    }

    /// The start of a VM of this memory and a vCPU.
    pub fn run_with_memory(&self, uid: u32, name: &str, memory: &str, more: &[&str]) -> Call {
        let run = ["run", "-d", "--net", "none", "--memory", memory, "--kernel"];
        let arguments = run.into_iter().chain([text_of(&self.guest), "--name", name]);
        let arguments = arguments.chain(more.iter().copied());
        match uid {
            0 => self.root(arguments),
            _ => self.user(uid, arguments).args(["--lab", "never"]),
        }
    }

    /// The user's VM in the list of `ps`; none if it is not listed.
    #[track_caller]
    pub fn listed(&self, uid: u32, name: &str) -> Option<Value> {
        let all = match uid {
            0 => self.root(["ps", "--json"]).ok().json(),
            _ => self.user(uid, ["ps", "--json"]).ok().json(),
        };
        let mut all = all.as_array().expect("an array").iter();
        all.find(|vm| vm["name"] == name).cloned()
    }

    /// The report of root's `status` on each cell.
    #[track_caller]
    pub fn cells(&self) -> Vec<Value> {
        let status = self.root(["cluster", "status", "--json"]).ok().json();
        status.as_array().expect("an array").clone()
    }

    /// The VMs in all cells, sorted.
    #[track_caller]
    pub fn placed(&self) -> Vec<String> {
        names(&Value::Array(self.cells()))
    }

    /// Waits until these VMs are in cells, which may be starting again.
    #[track_caller]
    pub fn wait_placed(&self, expected: &[&str]) {
        wait::until("the places of VMs", SOON, || {
            let status = self.root(["cluster", "status", "--json"]).run();
            (status.status == 0 && names(&status.json()) == expected).then_some(())
        });
    }

    /// The process of the admission server, which the guard of the first cell has started.
    #[track_caller]
    pub fn server(&self) -> u32 {
        let pid = self.cells()[0]["pid"].as_u64().expect("a process");
        let guard = host::parent(u32::try_from(pid).expect("a process"));
        let is_server = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            host::parent(*pid) == guard && line == b"mirrorball\0cell-admission\0"
        };
        wait::until("the admission server", SOON, || {
            host::processes().into_iter().find(is_server)
        })
    }

    /// A connection to the admission server that the kernel takes for this user's. Its process is this
    /// test's.
    pub fn connect_as(&self, uid: u32) -> std::io::Result<UnixStream> {
        let path = self.users().join("admission.sock");
        let connect = move || {
            // SAFETY: takes numbers only, and changes this thread alone, which ends with the connection made.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
            assert_eq!(changed, 0, "root may");
            UnixStream::connect(path)
        };
        std::thread::spawn(connect).join().expect("no panic")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for log in ["admission.log", "0/log", "1/log"] {
                let path = self.path("root/cells").join(log);
                eprintln!("{log}:\n{}", fs::read_to_string(path).unwrap_or_default());
            }
        }
        for uid in [0, ALICE, BOB, MALLORY] {
            let folder = match uid {
                0 => self.path("root"),
                _ => self.path(&format!("run-{uid}")).join("mirrorball"),
            };
            for vm in fs::read_dir(folder.join("vms")).into_iter().flatten().flatten() {
                let name = vm.file_name().into_string().unwrap_or_default();
                // An entry that is no VM's is no error here.
                let _ = match uid {
                    0 => self.root(["kill", &name]).run(),
                    _ => self.user(uid, ["kill", &name]).run(),
                };
            }
            if uid != 0 {
                let _ = self.user(uid, ["cluster", "down", "--leave"]).run();
            }
        }
        let _ = self.root(["cluster", "down", "--leave"]).run();
        let _ = fs::set_permissions("/dev/kvm", self.kvm.clone());
    }
}

/// The names of the VMs in cells, sorted.
fn names(cells: &Value) -> Vec<String> {
    let cells = cells.as_array().expect("an array").iter();
    let vms = cells.flat_map(|cell| cell["vms"].as_array().expect("an array"));
    let mut vms: Vec<String> = vms.map(|vm| vm.as_str().expect("a name").to_owned()).collect();
    vms.sort();
    vms
}

/// The CPUs that this process may use, two at least.
pub fn cpus() -> Vec<usize> {
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("of this process");
    let all = 0..nix::sched::CpuSet::count();
    let cpus: Vec<usize> = all.filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    assert!(cpus.len() >= 2, "a host with {} CPUs", cpus.len());
    cpus
}

/// Whether this host's control groups can hold VMs to their places.
pub fn has_groups() -> bool {
    host::has_controllers(&["cpu", "cpuset", "memory", "pids"])
}

pub fn text_of(path: &Path) -> &str {
    path.to_str().expect("ASCII")
}

/// A file descriptor that another thread may hold.
pub fn duplicate(stream: &UnixStream) -> OwnedFd {
    // SAFETY: the descriptor is open; the new one has no other owner.
    unsafe {
        let fd = libc::dup(stream.as_raw_fd());
        assert!(fd >= 0, "a descriptor");
        OwnedFd::from_raw_fd(fd)
    }
}
