//! `mirrorball cluster`: starts, shows and ends the cells of this host.

mod adoption;
mod background;
mod cells;
mod change;
mod cordon;
mod down;
mod fail;
mod foreground;
mod forget;
mod invite;
mod join;
mod keys;
mod leave;
mod notify;
mod plan;
mod scope;
mod status;
mod up;
mod upgrade;
mod users;
mod vcpus;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use config::Size;
use miette::Result;

use super::execution_site::LabChoice;

/// Poll interval for the cells' state.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Subcommands of `mirrorball cluster`.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Start the cells: as a file says, or one for each NUMA node of this host
    Up {
        /// The cluster file
        file: Option<PathBuf>,
        /// This many, instead of a file
        #[arg(long, conflicts_with = "file")]
        cells: Option<u16>,
        /// Which of the file's hosts this is, when not the one that has its host name
        #[arg(long, requires = "file")]
        host: Option<String>,
        /// Stay until the cluster is down, for a service manager; SIGTERM ends the cells, and VMs run on
        #[arg(long)]
        foreground: bool,
        /// Whether to run in the lab
        #[arg(long, value_enum, default_value = "auto")]
        lab: LabChoice,
    },
    /// Make the keys of a cluster of several hosts; each host needs its own and authority.pem
    Keys {
        /// The cluster file, which says where they go
        file: PathBuf,
        /// Make new keys for all hosts and etcd, by the same authority; each is valid for a year
        #[arg(long)]
        renew: bool,
    },
    /// Remove a host: revoke its keys, and have all other hosts end their links to it
    Remove {
        /// The cluster file, which says where the keys are
        file: PathBuf,
        /// Name of the host
        host: String,
    },
    /// Show the cells, their resources and their VMs
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the vCPUs of the VMs in this host's cells: where each is, and how long it has run
    Vcpus {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Lend memory of one cell to another one of the same host
    Lend(Loan),
    /// Have back what was lent, as far as no VM uses it
    Reclaim(Loan),
    /// Have a VM's cell serve it, though the cell has set it aside
    Adopt {
        /// Name of the VM
        vm: String,
    },
    /// Have a cell take no new VM; those that run there run on
    Cordon {
        /// Number of the cell
        cell: u16,
    },
    /// Have a cordoned cell take VMs again
    Uncordon {
        /// Number of the cell
        cell: u16,
    },
    /// End a VM of another user that the cluster has admitted, without asking its processes
    Evict {
        /// The VM, as `cluster status` shows it: USER:VM
        vm: String,
    },
    /// Have a cell of this host fail, as if its CPUs and memory were lost: end the VMs that depend on it, and
    /// those alone
    Fail {
        /// Number of the cell
        cell: u16,
    },
    /// Replace the program of this host's cells by this one, while their VMs run; a program that can't adopt
    /// them is taken back
    Upgrade,
    /// Invite a further host, where authority.key is: print the command that joins it, and wait for it
    Invite {
        /// The cluster file
        file: PathBuf,
        /// The host's name
        host: String,
        /// Its address, as 10.77.0.3 or 10.77.0.3:7400
        address: String,
        /// Where the host calls this machine
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: Option<SocketAddr>,
    },
    /// Make this machine a host of the cluster that has invited it, and start its cells
    Join(join::JoinArgs),
    /// Have this host leave the cluster: take no new VM, wait for its VMs to end, and end its cells
    Leave {
        /// How long VMs have to end, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        within: u64,
        /// Stop VMs that run then, by the power button; each is killed 30 s later
        #[arg(long)]
        stop: bool,
    },
    /// Take a change of the cluster's hosts, for another host
    #[command(hide = true)]
    Take,
    /// Free the names of the VMs of a host that is lost, and off
    Forget {
        /// Name of the host
        host: String,
        /// The host is off, or can't run its VMs for another reason that you know
        #[arg(long)]
        fenced: bool,
    },
    /// End the cells
    Down {
        /// Let VMs run on, alone; they join the cluster again when it is up again
        #[arg(long, conflicts_with = "stop")]
        leave: bool,
        /// Stop the VMs first; those that do not power off within 30 s are killed
        #[arg(long)]
        stop: bool,
    },
}

impl ClusterCommand {
    /// Whether it only prints information.
    pub fn only_prints(&self) -> bool {
        matches!(self, Self::Status { .. } | Self::Vcpus { .. })
    }

    /// Whether it may be given on another host of the cluster.
    pub fn is_for_other_hosts(&self) -> bool {
        matches!(self, Self::Cordon { .. } | Self::Uncordon { .. } | Self::Take)
    }
}

/// A loan of memory from one cell to another.
#[derive(Debug, Args)]
pub struct Loan {
    /// How much, as 512M
    size: Size,
    /// The cell that has it
    #[arg(long, value_name = "CELL")]
    from: u16,
    /// The cell that is to have it
    #[arg(long, value_name = "CELL")]
    to: u16,
}

pub use cells::move_region;

/// Runs a `cluster` subcommand.
pub fn cluster(command: &ClusterCommand) -> Result<ExitCode> {
    match command {
        ClusterCommand::Up {
            file,
            cells,
            host,
            foreground,
            lab,
        } => up::by_command(file.as_ref(), *cells, host.as_deref(), *foreground, *lab),
        ClusterCommand::Keys { file, renew } => keys::keys(file, *renew),
        ClusterCommand::Remove { file, host } => keys::remove(file, host),
        ClusterCommand::Status { json } => status::status(*json),
        ClusterCommand::Vcpus { json } => vcpus::vcpus(*json),
        ClusterCommand::Lend(loan) => {
            cells::loan(|| operations::cells::lend(loan.from, loan.to, loan.size.0))
        }
        ClusterCommand::Reclaim(loan) => {
            cells::loan(|| operations::cells::reclaim(loan.to, loan.from, loan.size.0))
        }
        ClusterCommand::Adopt { vm } => adoption::adopt(vm),
        ClusterCommand::Cordon { cell } => cordon::cordon(*cell, true),
        ClusterCommand::Uncordon { cell } => cordon::cordon(*cell, false),
        ClusterCommand::Evict { vm } => users::evict(vm),
        ClusterCommand::Fail { cell } => fail::fail(*cell),
        ClusterCommand::Upgrade => upgrade::upgrade(),
        ClusterCommand::Invite {
            file,
            host,
            address,
            listen,
        } => invite::invite(file, host, address, *listen),
        ClusterCommand::Join(args) => join::join(args),
        ClusterCommand::Leave { within, stop } => leave::leave(Duration::from_secs(*within), *stop),
        ClusterCommand::Take => change::take_from_input(),
        ClusterCommand::Forget { host, fenced } => forget::forget(host, *fenced),
        ClusterCommand::Down { leave, stop } => down::down(*leave, *stop),
    }
}
