//! `mirrorball lab`: the subcommands.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use config::lab::{Delay, LabSpec, Loss};

use crate::control::Change;
use crate::host::Lab;
use crate::registry::{Claim, Entry};
use crate::session::HostAccess;
use crate::{EXIT_LAB_DIED, EXIT_TIME_LIMIT, LabError, auto, control, registry, supervisor};

/// Real Linux hosts with KVM inside QEMU.
#[derive(Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// Starts a lab, runs a command in its first host, ends the lab.
    Run {
        /// The lab's description; one host when absent.
        file: Option<PathBuf>,
        /// Seconds the run may take.
        #[arg(long, value_name = "SECONDS")]
        limit: Option<u64>,
        /// Seconds after which a host that does not answer hangs; a machine that runs much else needs more.
        #[arg(long, value_name = "SECONDS", default_value_t = 90)]
        silence: u64,
        /// The host to run in, when not the first.
        #[arg(long)]
        host: Option<String>,
        /// The command and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Starts a lab and leaves it running.
    Up {
        /// The lab's description; one host when absent.
        file: Option<PathBuf>,
        /// Name by which other commands find the lab.
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// Runs a command in a host of a running lab.
    Exec {
        /// The lab's name.
        #[arg(long = "lab", default_value = "lab")]
        lab: String,
        /// Name of the host in the lab's file.
        host: String,
        /// The command and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Shows the state of the link between two hosts of a running lab, or changes it, in both directions.
    Link {
        /// The lab's name.
        #[arg(long = "lab", default_value = "lab")]
        lab: String,
        /// Name of one host.
        one: String,
        /// Name of the other host.
        other: String,
        /// Delay of each frame in one direction, as 2ms; stays when absent.
        #[arg(long)]
        delay: Option<Delay>,
        /// Share of frames lost in each direction, as 1%; stays when absent.
        #[arg(long)]
        loss: Option<Loss>,
        /// Drop all frames.
        #[arg(long, conflicts_with = "loss")]
        down: bool,
        /// Restore the link of the lab's file.
        #[arg(long, conflicts_with_all = ["delay", "loss", "down"])]
        restore: bool,
    },
    /// Ends a running lab.
    Down {
        /// The lab's name.
        #[arg(long, default_value = "lab")]
        name: String,
    },
    /// Lists running labs.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Runs a subcommand; returns the program's exit status. Prints its own errors.
pub fn run(args: LabArgs) -> ExitCode {
    let result = match args.command {
        LabCommand::Run {
            file,
            limit,
            silence,
            host,
            command,
        } => run_lab(file, limit, Duration::from_secs(silence), host, command),
        LabCommand::Up { file, name } => up(file, &name),
        LabCommand::Exec { lab, host, command } => exec(&lab, &host, &command),
        LabCommand::Link {
            lab,
            one,
            other,
            delay,
            loss,
            down,
            restore,
        } => {
            let loss = if down { Some(Loss::ALL) } else { loss };
            let change = Change { restore, delay, loss };
            link(&lab, [one, other], change)
        }
        LabCommand::Down { name } => down(&name),
        LabCommand::Ls { json } => list(json),
    };
    result.unwrap_or_else(|error| match error.downcast_ref::<LabError>() {
        // Its message carries the console's end.
        Some(error) => {
            eprintln!("mirrorball: {}", error.chain());
            ExitCode::from(match error {
                LabError::TimeLimit { .. } => EXIT_TIME_LIMIT,
                _ => EXIT_LAB_DIED,
            })
        }
        None => {
            eprintln!("{error:?}");
            ExitCode::from(1)
        }
    })
}

type Outcome = miette::Result<ExitCode>;

fn spec(file: Option<PathBuf>) -> miette::Result<LabSpec> {
    let Some(file) = file else {
        return Ok(LabSpec::one_host());
    };
    let text = std::fs::read_to_string(&file)
        .map_err(|error| miette::miette!("could not read {}: {error}", file.display()))?;
    Ok(LabSpec::parse(&file.display().to_string(), &text)?)
}

fn run_lab(
    file: Option<PathBuf>,
    limit: Option<u64>,
    silence: Duration,
    host: Option<String>,
    command: Vec<OsString>,
) -> Outcome {
    let spec = spec(file)?;
    let limit = limit.or(spec.limit_s).map(Duration::from_secs);
    let claim = registry::claim(&format!("{}{}", registry::RUN_PREFIX, std::process::id()))?;
    let result = run_command(&spec, &claim, limit, silence, host, command);
    if let Err(error) = &result
        && claim.directory.exists()
    {
        claim.keep(&error.chain());
    }
    Ok(result?)
}

fn run_command(
    spec: &LabSpec,
    claim: &Claim,
    limit: Option<Duration>,
    silence: Duration,
    host: Option<String>,
    command: Vec<OsString>,
) -> Result<ExitCode, LabError> {
    let started = Instant::now();
    let mut lab = Lab::start(spec, claim)?;
    for why in &lab.false_starts {
        eprintln!("mirrorball: {why}");
    }
    eprintln!(
        "mirrorball: the lab is up after {:.1} s",
        started.elapsed().as_secs_f64()
    );
    let index = match &host {
        None => 0,
        Some(name) => lab
            .hosts
            .iter()
            .position(|host| host.name == *name)
            .ok_or_else(|| LabError::NoHost {
                lab: "this".into(),
                host: name.clone(),
                hosts: lab
                    .hosts
                    .iter()
                    .map(|host| host.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
            })?,
    };
    let access = lab.hosts[index].access.clone();
    let (watched, (hangs, hung)) = (access.clone(), mpsc::channel());
    std::thread::spawn(move || {
        watched.wait_until_unresponsive(silence);
        let _ = hangs.send(());
    });
    let (sender, receiver) = mpsc::channel();
    // This thread keeps the lab: its hosts would die with another one.
    std::thread::spawn(move || {
        let result = access
            .exec(&command)
            .and_then(|status| access.sync().map(|()| status));
        let _ = sender.send(result);
    });
    loop {
        match receiver.recv_timeout(Duration::from_millis(50)) {
            Ok(Ok(status)) => return Ok(ExitCode::from(status.code())),
            Ok(Err(error)) => {
                // QEMU may need a moment to be seen dead.
                std::thread::sleep(Duration::from_millis(300));
                return Err(lab.died().unwrap_or(error));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(LabError::Supervisor("the session ended unexpectedly".into()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(error) = lab.died() {
            return Err(error);
        }
        if hung.try_recv().is_ok() {
            return Err(lab.silent(index, silence));
        }
        if let Some(limit) = limit
            && started.elapsed() > limit
        {
            return Err(lab.time_limit(limit));
        }
    }
}

fn up(file: Option<PathBuf>, name: &str) -> Outcome {
    let spec = spec(file)?;
    if registry::find(name)?.is_some() {
        return Err(LabError::Running(name.into()).into());
    }
    supervisor::start(name, &spec, None)?;
    Ok(ExitCode::SUCCESS)
}

fn exec(lab: &str, host: &str, command: &[OsString]) -> Outcome {
    let entry = registry::find(lab)?.ok_or_else(|| supervisor::ended(lab))?;
    let access = access(&entry, host)?;
    match access
        .exec(command)
        .and_then(|status| access.sync().map(|()| status))
    {
        Ok(status) => Ok(ExitCode::from(status.code())),
        Err(LabError::Agent(agent::client::ClientError::Io(_))) if auto::gone(lab) => {
            Err(supervisor::ended(lab).into())
        }
        Err(error) => Err(error.into()),
    }
}

fn access<'a>(entry: &'a Entry, host: &str) -> Result<&'a HostAccess, LabError> {
    let found = entry.hosts.iter().find(|(name, _)| name == host);
    found.map(|(_, access)| access).ok_or_else(|| {
        let hosts: Vec<&str> = entry.hosts.iter().map(|(name, _)| name.as_str()).collect();
        LabError::NoHost {
            lab: entry.name.clone(),
            host: host.into(),
            hosts: hosts.join(", "),
        }
    })
}

fn link(lab: &str, hosts: [String; 2], change: Change) -> Outcome {
    let entry = registry::find(lab)?.ok_or_else(|| supervisor::ended(lab))?;
    for host in &hosts {
        access(&entry, host)?;
    }
    let quality = control::request_change(&registry::directory(lab)?, hosts.clone(), change)?;
    let [one, other] = hosts;
    match quality {
        Some(quality) => {
            println!("{one} and {other}, each way: {quality}");
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let lab = lab.into();
            Err(LabError::NoLink { lab, one, other }.into())
        }
    }
}

fn down(name: &str) -> Outcome {
    let entry = registry::find(name)?.ok_or_else(|| supervisor::ended(name))?;
    if let Ok(pid) = i32::try_from(entry.pid) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM);
    }
    for _ in 0..200 {
        if registry::find(name)?.is_none() && !std::path::Path::new(&format!("/proc/{}", entry.pid)).exists()
        {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(LabError::Supervisor(format!("lab {name} does not end; its process is {}", entry.pid)).into())
}

fn list(json: bool) -> Outcome {
    let entries = registry::list()?;
    let dead = registry::dead()?;
    if json {
        let mut labs: Vec<_> = entries
            .iter()
            .map(|entry| {
                let hosts: Vec<&str> = entry.hosts.iter().map(|(name, _)| name.as_str()).collect();
                serde_json::json!({ "name": entry.name, "pid": entry.pid, "hosts": hosts })
            })
            .collect();
        labs.extend(
            dead.iter()
                .map(|(name, why)| serde_json::json!({ "name": name, "died": why })),
        );
        println!("{}", serde_json::Value::from(labs));
    } else {
        for entry in entries {
            let hosts: Vec<&str> = entry.hosts.iter().map(|(name, _)| name.as_str()).collect();
            println!("{}  {}", entry.name, hosts.join(" "));
        }
        for (name, why) in dead {
            println!("{name}  died: {}", why.lines().next().unwrap_or_default());
        }
    }
    Ok(ExitCode::SUCCESS)
}
