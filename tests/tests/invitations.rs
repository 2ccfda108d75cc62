//! Risk: a token, a request or a file lets a wrong host into a cluster that runs, keeps a right one out, or
//! ends a cell of another host; a command of another host opens files that its owner or this host forbids.
//!
//! The hosts are processes on the loopback, each with its own runtime directory; etcd is real. VMs halt at
//! once.

use std::fs::Permissions;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use guest_tests::command::{Call, Running, copy_binary};
use guest_tests::halting::halting_guest;
use guest_tests::{Scratch, host, mirrorball, wait};
use serde_json::Value;

/// Time limit of a step beside other programs.
const LIMIT: Duration = Duration::from_secs(60);
/// Time after which no host has a link to one that was removed.
const REMOVED_LIMIT: Duration = Duration::from_secs(1);
const HOSTS: [&str; 4] = ["alpha", "beta", "gamma", "delta"];

/// Clusters of this process.
static CLUSTERS: AtomicU8 = AtomicU8::new(0);

/// Alpha and beta, up; alpha has the authority's key. Each host has its files in a folder of its own.
struct Cluster {
    scratch: Scratch,
    network: [u8; 2],
    /// The last part of the first host's address.
    first: u8,
}

impl Cluster {
    fn up(test: &str) -> Self {
        Self::up_with(test, |_| (String::new(), String::new()))
    }

    /// The same with further keys of beta in both files, and further tables in beta's own.
    fn up_with(test: &str, beta: impl FnOnce(&Scratch) -> (String, String)) -> Self {
        let id = std::process::id();
        let cluster = Self {
            scratch: Scratch::new(test),
            // No other test has it: the first part of the address is the loopback's.
            network: [(id >> 8) as u8 | 128, id as u8],
            // Tests of one process run at once.
            first: 1 + CLUSTERS.fetch_add(1, Ordering::Relaxed) * HOSTS.len() as u8,
        };
        let (of_beta, in_betas_file) = beta(&cluster.scratch);
        let host = |name: &str| {
            let address = cluster.address(name);
            format!("[[hosts]]\nname = \"{name}\"\naddress = \"{address}:7400\"\n")
        };
        let text = format!(
            "# A comment that stays.\n{}{}{of_beta}[[cells]]\nhost = \"alpha\"\nmemory = \"64M\"\n\
             [[cells]]\nhost = \"beta\"\nmemory = \"64M\"\n[membership]\nsilence_ms = 5000\n",
            host("alpha"),
            host("beta")
        );
        for name in ["alpha", "beta"] {
            std::fs::create_dir_all(cluster.folder(name).join("keys")).unwrap();
            std::fs::write(cluster.file(name), &text).unwrap();
        }
        std::fs::write(cluster.file("beta"), text + &in_betas_file).unwrap();
        cluster
            .on(
                "alpha",
                &["cluster", "keys", cluster.file("alpha").to_str().unwrap()],
            )
            .ok();
        for name in ["authority.pem", "revoked.crl", "beta.pem", "beta.key"] {
            let [from, to] = ["alpha", "beta"].map(|host| cluster.folder(host).join("keys").join(name));
            std::fs::copy(from, to).unwrap();
        }
        for name in ["alpha", "beta"] {
            let file = cluster.file(name);
            let up = [
                "cluster",
                "up",
                file.to_str().unwrap(),
                "--host",
                name,
                "--lab",
                "never",
            ];
            cluster.on(name, &up).ok();
        }
        cluster.wait_for("alpha", &["alpha", "beta"]);
        cluster
    }

    fn address(&self, host: &str) -> Ipv4Addr {
        let number = HOSTS.iter().position(|name| *name == host).unwrap() as u8 + self.first;
        Ipv4Addr::new(127, self.network[0], self.network[1], number)
    }

    fn folder(&self, host: &str) -> PathBuf {
        self.scratch.join(host)
    }

    fn file(&self, host: &str) -> PathBuf {
        self.folder(host).join("cluster.toml")
    }

    fn on(&self, host: &str, arguments: &[&str]) -> Call {
        let runtime = self.scratch.join(&format!("run-{host}"));
        mirrorball(arguments)
            .env("MIRRORBALL_RUNTIME", runtime)
            .env("MIRRORBALL_USERS", self.scratch.join("users"))
            .limit(LIMIT)
    }

    /// Begins an invitation of `host` on alpha; returns the token.
    fn invite(&self, host: &str) -> (Running, String) {
        let (file, address) = (self.file("alpha"), self.address(host).to_string());
        let invite = ["cluster", "invite", file.to_str().unwrap(), host, &address];
        let mut running = self.on("alpha", &invite).spawn();
        running.wait_for("mirrorball cluster join ", LIMIT);
        let token = wait::until("a whole token", LIMIT, || {
            let said = running.seen();
            let (_, rest) = said.split_once("mirrorball cluster join ")?;
            let (token, _) = rest.split_once('\n')?;
            Some(token.to_owned())
        });
        (running, token)
    }

    /// Uses a token on `at`, which calls itself `host`.
    fn join(&self, at: &str, host: &str, token: &str) -> Call {
        let into = self.folder(at);
        let join = [
            "cluster",
            "join",
            token,
            "--host",
            host,
            "--into",
            into.to_str().unwrap(),
        ];
        self.on(at, &[&join[..], &["--lab", "never"]].concat())
    }

    #[track_caller]
    fn refused(call: Call, why: &str) {
        let said = call.run().expect(1).errors();
        assert!(said.contains(why), "{said}");
        assert_eq!(
            said.lines()
                .filter(|line| line.starts_with("mirrorball: "))
                .count(),
            1,
            "{said}"
        );
    }

    /// The live cells in a host's view: number, host and life.
    fn cells(&self, host: &str) -> Vec<(Value, Value, Value)> {
        let status = self.on(host, &["cluster", "status", "--json"]).run();
        if status.status != 0 {
            return Vec::new();
        }
        let status = status.json();
        let live = status
            .as_array()
            .unwrap()
            .iter()
            .filter(|cell| !cell["life"].is_null());
        live.map(|cell| (cell["number"].clone(), cell["host"].clone(), cell["life"].clone()))
            .collect()
    }

    #[track_caller]
    fn wait_for(&self, at: &str, hosts: &[&str]) {
        wait::until(&format!("{at} sees {hosts:?}"), LIMIT, || {
            let cells = self.cells(at);
            (cells
                .iter()
                .map(|cell| cell.1.as_str().unwrap())
                .collect::<Vec<_>>()
                == hosts)
                .then_some(())
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for host in HOSTS {
            let log = self.scratch.join(&format!("run-{host}/cells"));
            if std::thread::panicking() && log.exists() {
                for cell in 0..6 {
                    let said = std::fs::read_to_string(log.join(format!("{cell}/log")));
                    eprintln!("--- {host}, cell {cell}:\n{}", said.unwrap_or_default());
                }
            }
            let _ = self.on(host, &["cluster", "down"]).run();
        }
    }
}

/// Promise CELL-24.
#[test]
fn host_joins_by_its_token_once_and_the_cells_of_others_run_on() {
    let cluster = Cluster::up("invitations-join");
    let before = cluster.cells("beta");
    let (mut invite, token) = cluster.invite("gamma");
    Cluster::refused(
        cluster.join("delta", "delta", &token),
        "the token is for host gamma, and this is delta",
    );
    Cluster::refused(
        cluster.join("gamma", "gamma", &token[..token.len() - 1]),
        "no token",
    );
    let last = if token.ends_with('A') { "B" } else { "A" };
    let other = format!("{}{last}", &token[..token.len() - 1]);
    assert_ne!(cluster.join("gamma", "gamma", &other).run().status, 0);
    assert!(!invite.has_ended(), "{}", invite.seen());

    // A host of the cluster that is up and can't be reached keeps the new one out; the same token can be used
    // again afterwards.
    std::fs::rename(cluster.file("beta"), cluster.folder("beta").join("away")).unwrap();
    std::fs::create_dir(cluster.file("beta")).unwrap();
    Cluster::refused(
        cluster.join("gamma", "gamma", &token),
        "host beta does not take the new cluster file",
    );
    std::fs::remove_dir(cluster.file("beta")).unwrap();
    std::fs::rename(cluster.folder("beta").join("away"), cluster.file("beta")).unwrap();

    cluster.join("gamma", "gamma", &token).ok();
    assert_eq!(invite.wait().expect(0).status, 0);
    for host in ["alpha", "beta", "gamma"] {
        cluster.wait_for(host, &["alpha", "beta", "gamma"]);
    }
    assert_eq!(cluster.cells("beta")[..2], before[..], "the same processes");
    let texts = ["alpha", "beta", "gamma"].map(|host| std::fs::read_to_string(cluster.file(host)).unwrap());
    assert!(texts[0].starts_with("# A comment that stays.\n"), "{}", texts[0]);
    assert!(texts.iter().all(|text| *text == texts[0]));
    let keys = |host: &str, name: &str| cluster.folder(host).join("keys").join(name);
    assert!(keys("gamma", "gamma.key").exists() && !keys("alpha", "gamma.key").exists());
    assert!(!keys("gamma", "authority.key").exists() && !keys("gamma", "issued.txt").exists());
    let issued = std::fs::read_to_string(keys("alpha", "issued.txt")).unwrap();
    assert_eq!(
        issued.lines().filter(|line| line.starts_with("gamma ")).count(),
        1
    );

    Cluster::refused(
        cluster.join("gamma", "gamma", &token),
        "a cluster is up here already",
    );
    Cluster::refused(cluster.join("delta", "gamma", &token), "no invitation answers at");
    let file = cluster.file("alpha");
    let file = file.to_str().unwrap();
    let invite = |host: &str, address: &str| cluster.on("alpha", &["cluster", "invite", file, host, address]);
    let address = |host: &str| cluster.address(host).to_string();
    Cluster::refused(invite("gamma", &address("gamma")), "host gamma is in");
    Cluster::refused(invite("delta", "here"), "is no address of a host");
    let taken = invite("delta", &address("gamma")).run().expect(1).errors();
    assert!(taken.contains("has this address already"), "{taken}");
    let elsewhere = cluster.file("beta");
    let elsewhere = [
        "cluster",
        "invite",
        elsewhere.to_str().unwrap(),
        "delta",
        &address("delta"),
    ];
    Cluster::refused(
        cluster.on("beta", &elsewhere),
        "there is no key of the authority here",
    );
    let _busy = TcpListener::bind((cluster.address("alpha"), 7464)).unwrap();
    Cluster::refused(invite("delta", &address("delta")), "no host can call");
}

/// Promise CELL-25.
#[test]
fn host_that_leaves_is_taken_out_everywhere_and_one_that_is_removed_is_cut_off_within_a_second() {
    let cluster = Cluster::up("invitations-leave");
    let before = cluster.cells("beta");
    Cluster::refused(
        cluster.on("alpha", &["cluster", "leave"]),
        "host alpha runs the cluster's etcd",
    );
    for (number, leaves) in [(2, true), (3, false)] {
        let (invite, token) = cluster.invite("gamma");
        cluster.join("gamma", "gamma", &token).ok();
        let said = invite.wait().expect(0).text();
        assert!(
            said.contains(&format!("gamma is host of cell {number}")),
            "{said}"
        );
        cluster.wait_for("beta", &["alpha", "beta", "gamma"]);
        if leaves {
            cluster.on("gamma", &["cluster", "leave", "--within", "5"]).ok();
            cluster.on("gamma", &["cluster", "status"]).run().expect(1);
            let file = cluster.file("gamma");
            let up = [
                "cluster",
                "up",
                file.to_str().unwrap(),
                "--host",
                "gamma",
                "--lab",
                "never",
            ];
            Cluster::refused(cluster.on("gamma", &up), "gamma has left the cluster");
        } else {
            let file = cluster.file("alpha");
            let begun = Instant::now();
            cluster
                .on("alpha", &["cluster", "remove", file.to_str().unwrap(), "gamma"])
                .ok();
            cluster.wait_for("beta", &["alpha", "beta"]);
            let took = begun.elapsed();
            eprintln!("a host was removed within {took:?}");
            assert!(took < 5 * REMOVED_LIMIT, "{took:?}");
        }
        for host in ["alpha", "beta"] {
            wait::until("the others are alone", LIMIT, || {
                (cluster.cells(host) == before).then_some(())
            });
            let text = std::fs::read_to_string(cluster.file(host)).unwrap();
            assert!(
                !text.contains("name = \"gamma\"") && text.contains("left = true"),
                "{text}"
            );
        }
        let _ = std::fs::remove_dir_all(cluster.folder("gamma"));
    }
    let lists =
        ["alpha", "beta"].map(|host| std::fs::read(cluster.folder(host).join("keys/revoked.crl")).unwrap());
    assert_eq!(lists[0], lists[1]);
    Cluster::refused(cluster.on("alpha", &["cluster", "forget", "beta"]), "`--fenced`");
    Cluster::refused(
        cluster.on("alpha", &["cluster", "forget", "beta", "--fenced"]),
        "beta is not lost",
    );
    Cluster::refused(
        cluster.on("alpha", &["cluster", "forget", "alpha", "--fenced"]),
        "is this host",
    );
    Cluster::refused(
        cluster.on("alpha", &["cluster", "forget", "omega", "--fenced"]),
        "no host omega",
    );
}

/// A user that every host has in its list of users.
const NOBODY: u32 = 65_534;

/// A cluster in which commands on alpha start VMs on beta.
struct Remote {
    cluster: Cluster,
    guest: PathBuf,
    kvm: std::fs::Permissions,
}

impl Remote {
    /// Beta lets commands of other hosts name files below `allowed`, and admits nobody's VMs.
    fn up(test: &str) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test needs root");
        let cluster = Cluster::up_with(test, |scratch| {
            std::fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).unwrap();
            let allowed = scratch.join("allowed");
            std::fs::create_dir(&allowed).unwrap();
            let users = format!("[[users]]\nuid = {NOBODY}\ncpus = 2\nmemory = \"128M\"\n");
            (format!("remote_paths = [{allowed:?}]\n"), users)
        });
        let guest = cluster.scratch.join("allowed/guest");
        std::fs::write(&guest, halting_guest()).unwrap();
        let kvm = std::fs::metadata("/dev/kvm").unwrap().permissions();
        std::fs::set_permissions("/dev/kvm", Permissions::from_mode(0o666)).unwrap();
        Self { cluster, guest, kvm }
    }

    /// The start on beta's cell of a VM with this kernel, by a command on alpha.
    fn run(&self, name: &str, kernel: &Path, more: &[&str]) -> Call {
        let kernel = kernel.to_str().unwrap();
        let words = [
            "run", "-d", "--cell", "1", "--net", "none", "--memory", "64M", "--kernel", kernel,
        ];
        self.cluster
            .on("alpha", &[&words[..], &["--name", name], more].concat())
    }

    /// The same by nobody, who has alpha's keys and the list of its hosts.
    fn run_as_nobody(&self, name: &str, kernel: &Path) -> Call {
        let scratch = &self.cluster.scratch;
        let (runtime, keys) = (scratch.join("run-nobody"), scratch.join("keys-nobody"));
        let site = self.cluster.folder("alpha").join("keys").display().to_string();
        if !runtime.exists() {
            std::fs::create_dir_all(runtime.join("cells")).unwrap();
            let text = std::fs::read_to_string(scratch.join("run-alpha/cells/site.json")).unwrap();
            let text = text.replace(&site, &keys.display().to_string());
            std::fs::write(runtime.join("cells/site.json"), text).unwrap();
            Call::new("cp")
                .args([Path::new("-r"), Path::new(&site), &keys])
                .ok();
            let owned = [Path::new("-R"), Path::new("65534:65534"), &runtime, &keys];
            Call::new("chown").args(owned).ok();
        }
        let command = scratch.join("command");
        if !command.exists() {
            copy_binary(&command).unwrap();
        }
        let as_nobody = [
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
        ];
        let words = [
            "run", "--lab", "never", "-d", "--cell", "1", "--net", "none", "--memory", "64M", "--name", name,
        ];
        Call::new("env")
            .args(as_nobody)
            .args([&command])
            .args(words)
            .args([Path::new("--kernel"), kernel])
            .folder(Path::new("/"))
            .env("MIRRORBALL_RUNTIME", runtime)
            .limit(LIMIT)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        for name in ["root-vm", "named"] {
            let _ = self.cluster.on("beta", &["kill", name]).run();
        }
        let _ = self.cluster.on("beta", &["cluster", "evict", "65534:own"]).run();
        // Nobody's runtime directory, as no session has made one.
        let _ = std::fs::remove_dir_all(format!("/tmp/mirrorball-{NOBODY}"));
        std::fs::set_permissions("/dev/kvm", self.kvm.clone()).expect("root may");
    }
}

/// Promise CELL-47.
#[test]
fn command_of_another_host_names_files_that_its_owner_may_open_below_the_allowed_directories_alone() {
    let remote = Remote::up("invitations-names");
    let scratch = &remote.cluster.scratch;
    // The same bytes at a place that beta does not allow, and behind a link that leads there.
    let outside = scratch.write("outside", halting_guest());
    let link = scratch.join("allowed/link");
    symlink(&outside, &link).unwrap();
    let refused = |call: Call, why: &str| {
        let said = call.run().expect(1).errors();
        assert!(said.contains(why), "{said}");
        assert_eq!(
            said.lines()
                .filter(|line| line.starts_with("mirrorball: "))
                .count(),
            1,
            "{said}"
        );
    };
    let key = "`remote_paths` of host beta in its cluster file lists these";
    refused(remote.run("named", &outside, &[]), key);
    refused(remote.run("named", &link, &[]), "by a symbolic link");
    let up = scratch.join("allowed/../outside");
    refused(remote.run("named", &up, &[]), "an absolute path without `..`");
    let file = format!(
        "name = \"named\"\ncell = 1\n[kernel]\npath = {:?}\n",
        remote.guest
    );
    let file = scratch.write("vm.toml", file);
    let by_file = ["run", "-d", file.to_str().unwrap()];
    refused(remote.cluster.on("alpha", &by_file), key);

    remote.run("root-vm", &remote.guest, &[]).ok();
    let listed = remote.cluster.on("beta", &["ps", "--json"]).ok().json();
    assert_eq!(listed[0]["name"], "root-vm", "{listed}");
    let snapshot = |place: &str| {
        let place = scratch.join(place);
        let words = ["snapshot", "root-vm", place.to_str().unwrap()];
        remote.cluster.on("alpha", &words)
    };
    refused(snapshot("outside-snapshot"), key);
    assert!(!scratch.join("outside-snapshot").exists());
    let target = scratch.join("stolen");
    let copy = ["cp", "root-vm:/etc/passwd", target.to_str().unwrap()];
    refused(remote.cluster.on("alpha", &copy), key);

    // Neither a command on files of beta nor an internal process of beta's.
    let forged = |words: &[&str]| {
        let rules = ["MIRRORBALL_NAMES", "{\"directories\":[],\"setting\":\"\"}"];
        remote.cluster.on("beta", words).env(rules[0], rules[1])
    };
    for words in [&["disk", "ls"][..], &["monitors"], &["cell", "7"]] {
        refused(forged(words), "does not run for other hosts");
    }

    // By nobody, alpha's key vouches for nobody: beta's root may read the file, and nobody may not.
    let owned = scratch.join("allowed/owned");
    std::fs::write(&owned, halting_guest()).unwrap();
    std::fs::set_permissions(&owned, Permissions::from_mode(0o600)).unwrap();
    remote.cluster.on("beta", &["kill", "root-vm"]).ok();
    refused(remote.run_as_nobody("own", &owned), "Permission denied");
    std::os::unix::fs::chown(&owned, Some(NOBODY), Some(NOBODY)).unwrap();
    remote.run_as_nobody("own", &owned).ok();
    let status = remote
        .cluster
        .on("beta", &["cluster", "status", "--json"])
        .ok()
        .json();
    assert!(status.to_string().contains(&format!("{NOBODY}:own")), "{status}");
    let is_keeper = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        line.starts_with(b"mirrorball-keeper") && status.contains("Uid:\t65534\t65534\t65534\t65534\n")
    };
    assert!(
        host::processes().iter().any(is_keeper),
        "its processes are not nobody's"
    );
}
