//! Both hosts as stories have them: their processes, and a VM with a part on each.

use std::cell::RefCell;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cell::open::{OfVm, VmResources, open};
use cell::programs::{self, BuildProgram, Programs};
use cell::remote::part::RemotePart;
use cell::remote::protocol::FromPart;
use cell::share_group::Claims;
use cell::spanning::Span;
use cell::spanning::boot::Boot;
use config::VmSpec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry::cluster::client;
use registry::cluster::files::{CellLock, Files};
use registry::runtime::VARIABLE;
use registry::share_group::ShareGroup;
use shard::launch::{Ending, Order, Report};

use super::{beta, site};

/// Time limit of all waits.
pub const SOON: Duration = Duration::from_secs(30);
/// The program of shards: this one.
pub const PROGRAM: &str = "/proc/self/exe";
/// The line that a process prints when it is ready.
pub const READY: &str = "ready";

/// Both hosts.
pub struct Two {
    /// The folder of both.
    pub folder: PathBuf,
    /// A VM with a part on each.
    pub spec: VmSpec,
    /// The running processes, by name.
    running: RefCell<Vec<(&'static str, Child)>>,
    _claims: Vec<CellLock>,
}

impl Drop for Two {
    fn drop(&mut self) {
        for (_, child) in self.running.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Two {
    /// The hosts that the environment describes, without processes.
    fn of_environment() -> Self {
        let alpha = alpha();
        let folder = alpha.parent().expect("of both").to_owned();
        std::fs::write(folder.join("kernel"), "none").expect("a file");
        let text = format!(
            "cpus = 2\nmemory = \"256M\"\nnets = []\nballoon = false\n\
             span = {{ cells = [0, 1], memory = \"coherent\" }}\n[kernel]\npath = {:?}\n",
            folder.join("kernel")
        );
        Self {
            spec: config::parse("vm.toml", &text).expect("a VM"),
            folder,
            running: RefCell::default(),
            _claims: Vec::new(),
        }
    }

    /// Starts their processes, except for VMs.
    pub fn up(has_real_cells: bool) -> Self {
        let (mut two, alpha) = (Self::of_environment(), alpha());
        if has_real_cells {
            two.start("0", &["cell", "0"], &alpha, Stdio::null());
            two.start("1", &["cell", "1"], &site::beta(&two.folder), Stdio::null());
            wait(|| two.both_live());
            return two;
        }
        two.start("beta", &["beta"], &site::beta(&two.folder), Stdio::piped());
        two.wait_until_ready("beta");
        for number in site::ALPHA {
            let cell = beta::answer(&Files::at(&alpha), number).expect("alpha's cell");
            two._claims.push(cell);
        }
        two
    }

    /// Starts a home on alpha, in a separate process; returns when its part runs.
    pub fn start_home(&self) {
        self.start("home", &["home"], &alpha(), Stdio::piped());
        self.wait_until_ready("home");
    }

    /// Starts this program again.
    pub fn start(&self, what: &'static str, arguments: &[&str], runtime: &Path, output: Stdio) {
        let child = Command::new(PROGRAM)
            .args(arguments)
            .env(VARIABLE, runtime)
            .stdin(Stdio::piped())
            .stdout(output)
            .stderr(Stdio::null())
            .spawn();
        self.running.borrow_mut().push((what, child.expect("a process")));
    }

    /// Waits until a process that was started prints that it is ready.
    fn wait_until_ready(&self, what: &str) {
        let mut running = self.running.borrow_mut();
        let mut of = running.iter_mut().filter(|(of, _)| *of == what);
        let (_, child) = of.next().expect("it runs");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        assert!(
            lines.map_while(Result::ok).any(|line| line == READY),
            "{what} is not"
        );
    }

    /// Sends a signal to a process that was started.
    pub fn signal(&self, what: &str, signal: Signal) {
        let running = self.running.borrow();
        let mut of = running.iter().filter(|(of, _)| *of == what);
        let (_, child) = of.next().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("a process");
    }

    /// Ends a process that was started.
    pub fn kill(&self, what: &str) {
        let mut running = self.running.borrow_mut();
        let at = running.iter().position(|(of, _)| *of == what);
        let (_, mut child) = running.remove(at.expect("it runs"));
        child.kill().expect("a process");
        child.wait().expect("its end");
    }

    /// Whether each real cell has a record of the other.
    pub fn both_live(&self) -> bool {
        let files = [Files::open().expect("alpha's"), self.beta_files()];
        files.iter().all(|files| {
            let status = client::status(files).ok().flatten();
            status.is_some_and(|status| {
                status.ready && status.cells.iter().filter(|cell| cell.life.is_some()).count() == 2
            })
        })
    }

    /// The places of the VM.
    pub fn span(&self) -> Span {
        let span = Span::begin("big", &self.spec, shard::PLATFORM).expect("places");
        span.expect("it spans cells")
    }

    /// The VM's files.
    pub fn opened(&self) -> VmResources {
        self.opened_as("big", &self.spec)
    }

    /// The files of another VM.
    pub fn opened_as(&self, name: &str, spec: &VmSpec) -> VmResources {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).expect("a directory");
        let claims = Claims::new(ShareGroup::of_run().expect("randomness"));
        let of_vm = OfVm {
            spec,
            name,
            folder: &folder,
            cid: 7,
            names: None,
        };
        open(of_vm, claims, &programs().shard).expect("its files, and KVM")
    }

    /// Files of the cells of host beta.
    pub fn beta_files(&self) -> Files {
        Files::at(&site::beta(&self.folder))
    }

    /// The VMs that beta's cell has.
    pub fn at_beta(&self) -> Vec<String> {
        vms_of(&self.beta_files())
    }

    /// The VMs that alpha's cell has.
    pub fn at_alpha(&self) -> Vec<String> {
        vms_of(&Files::open().expect("alpha's"))
    }

    /// Processes of shards, in beta's runtime directory.
    pub fn shards(&self) -> Vec<i32> {
        self.processes(programs::SHARD)
    }

    /// Processes with such a word among the first two of their command lines, in beta's runtime directory.
    pub fn processes(&self, word: &str) -> Vec<i32> {
        let mark = format!("{VARIABLE}={}", site::beta(&self.folder).display());
        let all = std::fs::read_dir("/proc").expect("processes").flatten();
        all.filter_map(|process| {
            let pid: i32 = process.file_name().to_str()?.parse().ok()?;
            let words = |file| std::fs::read_to_string(process.path().join(file)).ok();
            let arguments = words("cmdline")?;
            if !arguments.split('\0').take(2).any(|one| one == word) {
                return None;
            }
            // A shard has no environment; its parent is the part's monitor.
            let stat = words("stat")?;
            let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
            let parents = std::fs::read_to_string(format!("/proc/{parent}/environ"));
            let environment = words("environ")? + &parents.unwrap_or_default();
            environment.split('\0').any(|word| word == mark).then_some(pid)
        })
        .collect()
    }

    /// Waits until beta has nothing of the VM.
    #[track_caller]
    pub fn wait_until_free(&self) {
        wait(|| self.at_beta().is_empty());
        wait(|| self.processes("part-monitor").is_empty() && self.shards().is_empty());
        wait(|| {
            let parts = site::beta(&self.folder).join("parts/vms");
            let mut left = std::fs::read_dir(parts).expect("a directory").flatten();
            left.all(|entry| !entry.path().is_dir())
        });
    }
}

/// The VMs of a host's cells.
fn vms_of(files: &Files) -> Vec<String> {
    let status = client::status(files).expect("an answer");
    let cells = status.expect("a cluster").cells.into_iter();
    cells.flat_map(|cell| cell.vms).collect()
}

/// Waits until the condition holds.
#[track_caller]
pub fn wait(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < deadline, "the condition does not hold in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The programs of shards and of keepers, open.
pub fn programs() -> Programs {
    let program = || BuildProgram::open(Path::new(PROGRAM)).expect("this program");
    Programs {
        shard: Arc::new(program()),
        keeper: program(),
    }
}

/// Starts the VM's shard on beta, and waits until it runs. The boot keeps its link.
pub fn started(two: &Two, span: &Span, opened: &VmResources) -> Boot {
    let boot = Boot::new(span, &opened.launch.memory, Some(0..0)).expect("links and lanes");
    let clocks = boot.clocks().expect("those of two hosts").status();
    let error_ns = clocks[1]["error_ns"].as_u64().expect("nanoseconds");
    assert!((1..50_000_000).contains(&error_ns), "{error_ns}");
    println!("  clocks within {} us", error_ns / 1000);
    let remote = remote(span);
    remote
        .start(boot.remote(span, 1, &opened.launch).expect("coherent memory"))
        .expect("an order");
    match remote.next(Some(SOON)) {
        Some(FromPart::Report(Report::Running { .. })) => {}
        other => panic!("it does not run: {other:?}"),
    }
    assert_eq!(two.shards().len(), 1);
    boot
}

/// The part on beta.
pub fn remote(span: &Span) -> &RemotePart {
    span.remote(1).expect("a part on beta")
}

/// The end of its shard, which is the next report.
#[track_caller]
pub fn gone(remote: &RemotePart) -> String {
    match remote.next(Some(SOON)) {
        Some(FromPart::Gone(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// Orders the end of the part's shard, as its home's monitor does at the end of a boot. Returns the end of
/// its process.
#[track_caller]
pub fn quit(remote: &RemotePart) -> String {
    remote.order(&Order::Quit).expect("an order");
    let ended = remote.next(Some(SOON));
    assert!(
        matches!(ended, Some(FromPart::Report(Report::Ended(Ending::Quit)))),
        "{ended:?}"
    );
    gone(remote)
}

/// Ends a process at once.
pub fn kill_process(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("a process");
}

/// Runs as the home of the VM, in a process of alpha's, until its standard input ends.
pub fn home() -> io::Result<()> {
    let two = Two::of_environment();
    let (span, opened) = (two.span(), two.opened());
    let _boot = started(&two, &span, &opened);
    println!("{READY}");
    io::stdin().read_to_end(&mut Vec::new()).map(drop)
}

/// Alpha's runtime directory, which is that of every story.
fn alpha() -> PathBuf {
    PathBuf::from(std::env::var_os(VARIABLE).expect("alpha's directory"))
}
