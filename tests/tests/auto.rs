//! Risk: `run` behaves otherwise in the automatic lab than it would here, or leaves a lab behind.
//!
//! These tests run here and not in a lab host, since they test the way into the lab. They use a lab of their
//! own, found through their own cache directory, which ends soon after its last use.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Call, binary};
use guest_tests::terminal::Terminal;
use guest_tests::{Scratch, wait};
use nix::sys::signal::Signal;

const SOON: Duration = Duration::from_secs(20);
/// A lab's start and a guest's, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(150);
/// Seconds after which the lab ends without being used.
const IDLE_S: u64 = 8;
/// Byte of Ctrl-], which leaves the console.
const DETACH: &[u8] = b"\x1d";
/// Flags of every VM here.
const TINY: [&str; 6] = ["--image", "tiny", "--memory", "128M", "--net", "none"];

/// The automatic lab of one test.
struct Lab {
    scratch: Scratch,
    idle: String,
}

impl Lab {
    fn new(test: &str) -> Self {
        let lab = Self {
            scratch: Scratch::shared(test),
            idle: IDLE_S.to_string(),
        };
        let ours = lab.cache().join("mirrorball/lab");
        fs::create_dir_all(&ours).expect("our own directory");
        // The lab hosts' kernel is fetched once by each user, not by each test.
        for entry in fs::read_dir(users_labs()).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with("kernel-") {
                symlink(entry.path(), ours.join(entry.file_name())).expect("our own directory");
            }
        }
        lab
    }

    fn cache(&self) -> PathBuf {
        self.scratch.join("cache")
    }

    /// A runtime directory without VMs, so that commands such as `ps` look in the lab.
    fn runtime(&self) -> PathBuf {
        self.scratch.join("runtime")
    }

    /// A call of `mirrorball` that finds this lab only.
    fn call<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Call {
        Call::new(binary())
            .args(arguments)
            .env("XDG_CACHE_HOME", self.cache())
            .env("MIRRORBALL_RUNTIME", self.runtime())
            .env("MIRRORBALL_LAB_IDLE_S", &self.idle)
            .limit(START_LIMIT)
    }

    fn terminal(&self, arguments: &[&str]) -> Terminal {
        let variables = [
            ("XDG_CACHE_HOME", self.cache().into_os_string()),
            ("MIRRORBALL_RUNTIME", self.runtime().into_os_string()),
            ("MIRRORBALL_LAB_IDLE_S", self.idle.clone().into()),
        ];
        Terminal::mirrorball_with(
            arguments,
            &variables
                .each_ref()
                .map(|(name, value)| (*name, value.as_os_str())),
        )
    }

    /// Names of the VMs in the lab.
    #[track_caller]
    fn vms(&self) -> Vec<String> {
        let list = self.call(["ps", "--json"]).ok().json();
        let entries = list.as_array().expect("ps --json gives an array");
        entries
            .iter()
            .map(|vm| vm["name"].as_str().expect("a name").to_owned())
            .collect()
    }

    /// QEMU processes of this lab.
    fn hosts(&self) -> usize {
        let word = self.cache().to_string_lossy().into_owned();
        let lines = fs::read_dir("/proc").expect("/proc is mounted").flatten();
        lines
            .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
            .filter(|line| line.starts_with(b"qemu") && String::from_utf8_lossy(line).contains(&word))
            .count()
    }

    #[track_caller]
    fn expect_end(&self) {
        wait::until(
            "the end of an unused lab",
            Duration::from_secs(IDLE_S) + SOON,
            || (self.hosts() == 0).then_some(()),
        );
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.hosts() > 0 {
            self.call(["lab", "down", "--name", "auto"]).run();
        }
    }
}

/// Where the user's own labs are.
fn users_labs() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    cache.expect("a user has a home").join("mirrorball/lab")
}

fn start_of(path: &Path, bytes: usize) -> Vec<u8> {
    fs::read(path).expect("our own file")[..bytes].to_vec()
}

#[test]
fn streams_files_directory_and_exit_status_are_those_of_the_caller() {
    let lab = Lab::new("through");
    let disk = lab.scratch.sparse("disk.raw", 4 << 20);
    let input: Vec<u8> = (0..=255).cycle().take(64 << 10).collect();
    let run = lab.call([
        "run",
        "--lab",
        "always",
        "--disk",
        "disk.raw:exclusive:persistent",
    ]);
    let script = "tee /dev/vda; sync; echo from the guest >&2; exit 7";
    let ended = run
        .args(TINY)
        .args(["--", "sh", "-c", script])
        .folder(lab.scratch.path())
        .input(&input)
        .run()
        .expect(7);
    assert!(
        ended.stdout == input,
        "{} bytes came back\n{ended}",
        ended.stdout.len()
    );
    for said in ["in the lab: --lab=always", "is up after", "from the guest"] {
        assert!(ended.errors().contains(said), "does not say {said:?}:\n{ended}");
    }
    assert!(
        start_of(&disk, input.len()) == input,
        "what the guest wrote is not in the file"
    );

    // The same by a file beside it, in the lab that runs by now; a private disk stays as it was.
    let text = "name = \"by-file\"\nimage = \"tiny\"\nmemory = \"128M\"\nnets = []\n\
                [[disks]]\npath = \"disk.raw\"\n";
    lab.scratch.write("vm.toml", text);
    let script = "head -c 3 /dev/vda | od -An -tx1; echo gone > /dev/vda; sync";
    let ended = lab
        .call(["run", "--lab", "always", "vm.toml", "--", "sh", "-c", script])
        .folder(lab.scratch.path())
        .ok();
    assert_eq!(ended.text().trim(), "00 01 02", "{ended}");
    assert!(!ended.errors().contains("is up after"), "a second lab:\n{ended}");
    assert!(
        start_of(&disk, input.len()) == input,
        "a private disk was written"
    );
    lab.expect_end();
}

#[test]
fn probe_decides_where_a_vm_runs_and_one_line_has_the_reason() {
    let lab = Lab::new("probe");
    let verdict = lab.call(["probe"]).run();
    let run = |choice: &str| lab.call(["run", "--lab", choice]).args(TINY);
    let ended = run("auto").args(["--", "true"]).run();
    let lines: Vec<String> = ended.errors().lines().map(str::to_owned).collect();
    let told = lines
        .iter()
        .filter(|line| line.contains("running in the lab"))
        .count();
    let is_root = nix::unistd::geteuid().is_root();
    // A measured number may be another the second time.
    let without_digits = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
    if verdict.status == 0 {
        assert_eq!((ended.status, told), (0, 0), "{ended}");
    } else if is_root {
        // Emulation does not isolate root's VMs, so it must be requested.
        assert_eq!((ended.status, told), (1, 0), "{ended}");
        let verdict = without_digits(verdict.text().trim());
        assert!(without_digits(&lines[0]).contains(&verdict), "{ended}");
        assert!(lines[0].contains("--lab=always"), "{ended}");
    } else {
        let line = format!("mirrorball: running in the lab: {}", verdict.text().trim());
        assert_eq!(without_digits(&lines[0]), without_digits(&line), "{ended}");
        assert_eq!((ended.status, told), (0, 1), "{ended}");
    }

    // Here, whether or not this machine's KVM can run guests: the run need not get far.
    let before = lab.hosts();
    let name = format!("t-never-{}", std::process::id());
    let ended = run("never").args(["-d", "--name", &name]).run();
    assert!(!ended.errors().contains("in the lab"), "{ended}");
    if ended.status == 0 {
        lab.call(["kill", &name]).ok();
    }
    assert!(lab.hosts() <= before, "--lab never started a lab");
    lab.expect_end();
}

#[test]
fn a_terminal_reaches_the_guest_and_a_vm_left_running_keeps_the_lab() {
    let lab = Lab::new("terminal");
    let name = "left";
    let mut run = lab.terminal(&[&["run", "--lab", "always", "--name", name], &TINY[..]].concat());
    wait::until("a raw terminal", START_LIMIT, || run.is_raw().then_some(()));
    wait::until("a prompt", START_LIMIT, || {
        run.seen().contains("# ").then_some(())
    });
    run.send(b"echo sum-$((20 + 3))\n");
    run.expect("sum-23", SOON);
    run.send(DETACH);
    assert_eq!(run.wait(SOON), 0, "{}", run.seen());
    assert!(run.seen().contains("left left running"), "{}", run.seen());
    assert!(!run.is_raw(), "the terminal stayed raw");

    std::thread::sleep(Duration::from_secs(IDLE_S + 4));
    assert_eq!(lab.vms(), [name]);
    let mut console = lab.terminal(&["console", name]);
    wait::until("a raw terminal", SOON, || console.is_raw().then_some(()));
    console.send(b"\necho again-$((1 + 1))\n");
    console.expect("again-2", SOON);
    // Ctrl-C goes to the guest.
    console.send(b"sleep 1000\n");
    std::thread::sleep(Duration::from_millis(500));
    console.send(b"\x03echo after-$((2 + 2))\n");
    console.expect("after-4", SOON);
    console.send(DETACH);
    assert_eq!(console.wait(SOON), 0, "{}", console.seen());

    let echoed = lab.call(["exec", name, "--", "cat"]).input(b"\0binary\xff").ok();
    assert_eq!(echoed.stdout, b"\0binary\xff", "{echoed}");
    lab.call(["stop", name]).limit(BOOT_LIMIT).ok();
    lab.expect_end();
}

#[test]
fn an_interrupt_ends_the_vm_and_the_lab_ends_by_itself() {
    let lab = Lab::new("interrupt");
    let run = lab.call(["run", "--lab", "always"]).args(TINY);
    let mut running = run.args(["--", "sh", "-c", "echo started; sleep 1000"]).spawn();
    running.wait_for("started", START_LIMIT);
    assert_eq!(lab.vms().len(), 1);
    running.signal(Signal::SIGINT);
    running.wait().expect(128 + 2);
    wait::until("the end of the VM", SOON, || lab.vms().is_empty().then_some(()));
    lab.expect_end();
}
