//! `mirrorball run`: VMs that live as long as this command.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use cell::vm::Handle;
use config::vm::{DiskMode, DiskSpec, KernelSpec, NetKind, NetSpec};
use config::{ConfigError, HostFacts, Size, VmFile, VmSpec};
use miette::{IntoDiagnostic, Result, miette};
use shard::launch::Order;

/// When to run in the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LabChoice {
    /// Where this machine's KVM can't run guests.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What `run` takes.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// VM files
    files: Vec<PathBuf>,
    /// An image of the image store
    #[arg(long)]
    image: Option<String>,
    /// Kernel file: bzImage or ELF
    #[arg(long)]
    kernel: Option<PathBuf>,
    /// Initramfs
    #[arg(long, requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Appended to the kernel's command line
    #[arg(long, requires = "kernel")]
    cmdline: Option<String>,
    /// vCPUs
    #[arg(long, default_value_t = 1)]
    cpus: u8,
    /// Guest memory
    #[arg(long, default_value = "512M")]
    memory: Size,
    /// A disk: PATH[:private|exclusive][:persistent]
    #[arg(long)]
    disk: Vec<String>,
    /// user[,forward=HOST:GUEST], tap=NAME or none
    #[arg(long)]
    net: Vec<String>,
    /// The VM's name
    #[arg(long)]
    name: Option<String>,
    /// auto, require or off
    #[arg(long, default_value = "auto")]
    sandbox: String,
    /// 4K, thp, 2M or 1G
    #[arg(long, default_value = "4K")]
    pages: String,
    /// How long a guest may take until its agent answers, in seconds
    #[arg(long, default_value_t = 120)]
    boot_limit: u64,
    /// Whether to run in the lab
    #[arg(long, value_enum, default_value = "auto")]
    lab: LabChoice,
    /// Run this in the guest, then end the VM
    #[arg(last = true)]
    command: Vec<String>,
}

fn word<T: serde::de::DeserializeOwned>(flag: &str, text: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|error| miette!("--{flag} {text}: {error}"))
}

fn disk(text: &str) -> DiskSpec {
    let (mut path, mut mode, mut persistent) = (text, DiskMode::Private, false);
    loop {
        if let Some(rest) = path.strip_suffix(":persistent") {
            (path, persistent) = (rest, true);
        } else if let Some(rest) = path.strip_suffix(":exclusive") {
            (path, mode) = (rest, DiskMode::Exclusive);
        } else if let Some(rest) = path.strip_suffix(":private") {
            (path, mode) = (rest, DiskMode::Private);
        } else {
            break;
        }
    }
    DiskSpec {
        path: path.into(),
        format: None,
        mode,
        persistent,
        read_only: false,
        device: Default::default(),
        queues: None,
    }
}

fn net(text: &str) -> Result<Option<NetSpec>> {
    let mut card = NetSpec {
        kind: NetKind::User,
        tap: None,
        forward: Vec::new(),
        mac: None,
        queues: None,
    };
    let mut parts = text.split(',');
    match parts.next() {
        Some("none") => return Ok(None),
        Some("user") => {}
        Some(other) => match other.strip_prefix("tap=") {
            Some(tap) => (card.kind, card.tap) = (NetKind::Tap, Some(tap.to_owned())),
            None => {
                return Err(miette!(
                    "--net {text}: use user[,forward=HOST:GUEST], tap=NAME or none"
                ));
            }
        },
        None => {}
    }
    for part in parts {
        match part.split_once('=') {
            Some(("forward", ports)) => card.forward.push(ports.to_owned()),
            Some(("mac", mac)) => card.mac = Some(mac.to_owned()),
            _ => {
                return Err(miette!(
                    "--net {text}: {part:?} is not an option; use forward= or mac="
                ));
            }
        }
    }
    Ok(Some(card))
}

fn from_flags(args: &RunArgs) -> Result<VmSpec> {
    let mut cards = Vec::new();
    for text in &args.net {
        cards.extend(net(text)?);
    }
    let spec = VmSpec {
        name: args.name.clone(),
        image: args.image.clone(),
        cpus: args.cpus,
        memory: args.memory,
        kernel: args.kernel.clone().map(|path| KernelSpec {
            path,
            initrd: args.initrd.clone(),
            cmdline: args.cmdline.clone().unwrap_or_default(),
        }),
        root: Default::default(),
        disks: args.disk.iter().map(|text| disk(text)).collect(),
        nets: (!args.net.is_empty()).then_some(cards),
        nodes: Vec::new(),
        pages: word("pages", &args.pages)?,
        prefault: false,
        balloon: true,
        command: (!args.command.is_empty()).then(|| args.command.clone()),
        sandbox: word("sandbox", &args.sandbox)?,
    };
    config::check(&spec).map_err(|fault| ConfigError::from_flags(&fault))?;
    Ok(spec)
}

/// Reads and checks VM files.
pub fn read_files(paths: &[PathBuf]) -> Result<Vec<VmFile>> {
    let mut files = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(path)
            .map_err(|error| miette!(help = "check the path", "VM file {}: {error}", path.display()))?;
        let source_name = path.display().to_string();
        let mut spec = config::parse(&source_name, &text)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        // Relative paths start at the file's folder.
        if let Some(kernel) = &mut spec.kernel {
            kernel.path = folder.join(&kernel.path);
            kernel.initrd = kernel.initrd.as_ref().map(|initrd| folder.join(initrd));
        }
        for disk in &mut spec.disks {
            disk.path = folder.join(&disk.path);
        }
        files.push(VmFile {
            source_name,
            text,
            spec,
        });
    }
    config::duplicate_names(&files)?;
    let facts = HostFacts::of_this_host();
    for file in &files {
        config::check_host(&file.spec, Some(file), &facts)?;
    }
    Ok(files)
}

/// Runs VMs; the status is that of the first that did not end well.
pub fn run(args: RunArgs) -> Result<ExitCode> {
    let specs: Vec<VmSpec> = if args.files.is_empty() {
        let spec = from_flags(&args)?;
        config::check_host(&spec, None, &HostFacts::of_this_host())?;
        vec![spec]
    } else {
        read_files(&args.files)?
            .into_iter()
            .map(|file| file.spec)
            .collect()
    };
    if !lab::auto::inside() && args.lab != LabChoice::Never {
        let why = match args.lab {
            LabChoice::Always => Some("--lab=always".to_owned()),
            _ => match shard::probe::probe() {
                shard::probe::Verdict::Usable => None,
                verdict => Some(verdict.to_string()),
            },
        };
        if let Some(why) = why {
            eprintln!("mirrorball: running in the lab: {why}");
            let argv: Vec<_> = std::env::args_os().skip(1).collect();
            return lab::auto::enter(&argv).into_diagnostic();
        }
    }
    let alone = specs.len() == 1;
    let mut threads = Vec::new();
    for (index, spec) in specs.into_iter().enumerate() {
        let limit = Duration::from_secs(args.boot_limit);
        threads.push(std::thread::spawn(move || one(&spec, index, alone, limit)));
    }
    let mut status = 0;
    for thread in threads {
        let ended = thread.join().map_err(|_| miette!("a VM's thread failed"))??;
        if status == 0 {
            status = ended;
        }
    }
    Ok(ExitCode::from(status))
}

fn one(spec: &VmSpec, index: usize, alone: bool, boot_limit: Duration) -> Result<u8> {
    let pid = std::process::id();
    let name = spec.name.clone().unwrap_or_else(|| format!("vm-{pid}-{index}"));
    let folder = tempfile::Builder::new()
        .prefix("mirrorball-")
        .tempdir()
        .into_diagnostic()?;
    let handle = Arc::new(Handle::default());
    let cid = 3 + (pid.wrapping_mul(64).wrapping_add(index as u32) % 0x3fff_ffff);
    let command = spec.command.clone();
    let outcome = Arc::new(std::sync::Mutex::new(None));
    if let Some(argv) = command.clone() {
        let (for_agent, result_place) = (Arc::clone(&handle), Arc::clone(&outcome));
        let socket = folder.path().join("vsock.sock");
        let mut started = false;
        let start = move || {
            if std::mem::replace(&mut started, true) {
                return;
            }
            let (handle, outcome, socket, argv) = (
                for_agent.clone(),
                result_place.clone(),
                socket.clone(),
                argv.clone(),
            );
            std::thread::spawn(move || {
                let result = in_guest(&socket, argv, boot_limit);
                *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                let _ = handle.order(&Order::Quit);
            });
        };
        return finish(spec, &name, folder.path(), cid, &handle, start, &outcome);
    }
    if alone {
        attach(&handle).into_diagnostic()?;
    }
    finish(spec, &name, folder.path(), cid, &handle, || {}, &outcome)
}

type Outcome = std::sync::Mutex<Option<std::result::Result<u8, String>>>;

fn finish(
    spec: &VmSpec,
    name: &str,
    folder: &Path,
    cid: u32,
    handle: &Arc<Handle>,
    mut start: impl FnMut(),
    outcome: &Arc<Outcome>,
) -> Result<u8> {
    let ending = cell::vm::run(spec, name, folder, cid, handle, |missing| {
        for line in missing {
            eprintln!("mirrorball: {name}: sandbox without {line}");
        }
        start();
    })
    .map_err(|error| miette!("{name}: {error}"))?;
    match outcome.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(Ok(status)) => return Ok(status),
        Some(Err(why)) => {
            eprintln!("mirrorball: {name}: {why}");
            return Ok(124);
        }
        None => {}
    }
    if let Some(reason) = cell::ending::reason(&ending) {
        eprintln!("mirrorball: {name}: {reason}");
        for line in handle
            .console
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .last_lines(8)
        {
            eprintln!("  | {line}");
        }
    }
    Ok(cell::ending::status(&ending))
}

fn in_guest(socket: &Path, argv: Vec<String>, limit: Duration) -> std::result::Result<u8, String> {
    let stream =
        agent::client::connect_vsock(socket, agent::VSOCK_PORT, limit).map_err(|error| error.to_string())?;
    let request = agent::protocol::ExecRequest {
        argv,
        env: Vec::new(),
        cwd: None,
        tty: None,
    };
    agent::client::exec(stream, &request)
        .map(|status| status.code())
        .map_err(|error| error.to_string())
}

/// Joins this process's standard input and output to the console.
fn attach(handle: &Arc<Handle>) -> std::io::Result<()> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    handle
        .console
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .attach(theirs)?;
    std::thread::spawn(move || {
        let (mut from, mut buffer) = (ours, [0; 4096]);
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut out = std::io::stdout();
            if out
                .write_all(&buffer[..count])
                .and_then(|()| out.flush())
                .is_err()
            {
                break;
            }
        }
    });
    let handle = Arc::clone(handle);
    std::thread::spawn(move || {
        let mut buffer = [0; 1024];
        while let Ok(count @ 1..) = std::io::stdin().read(&mut buffer) {
            let input = handle
                .input
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_ref()
                .map(|s| s.try_clone());
            if let Some(Ok(mut input)) = input {
                let _ = input.write_all(&buffer[..count]);
            }
        }
    });
    Ok(())
}
