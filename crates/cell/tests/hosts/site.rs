//! The two hosts, as in the cluster's file.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use config::cluster::{CellPlan, ETCD_KEYS, HostPlan, Site, SpanTransport};
use registry::cluster::files::Files;
use urpc::tls::Subject;

/// Memory of each cell, bytes.
pub const CELL_BYTES: u64 = 512 << 20;

/// Memory that the hosts share, bytes: enough for links and lanes of all their cells.
const MEMORY_BYTES: u64 = 8 << 20;

/// Alpha's cells.
pub const ALPHA: [u16; 2] = [0, 3];

/// The folder of beta's processes.
pub fn beta(folder: &Path) -> PathBuf {
    folder.join("beta")
}

/// The memory that alpha and beta share by the cluster's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    None,
    /// Both see the same file.
    Same,
    /// Both have a file by that name, and see different ones.
    Different,
}

impl Memory {
    /// Makes the files.
    fn files(self, folder: &Path) -> std::io::Result<[Option<PathBuf>; 2]> {
        let file = |name: &str| {
            let path = folder.join(name);
            std::fs::File::create(&path)?.set_len(MEMORY_BYTES)?;
            Ok::<_, std::io::Error>(Some(path))
        };
        Ok(match self {
            Self::None => [None, None],
            Self::Same => [file("memory")?, file("memory")?],
            Self::Different => [file("memory-alpha")?, file("memory-beta")?],
        })
    }
}

/// The folder of both hosts' keys and those of their etcd, which are made if they are missing.
pub fn keys(folder: &Path) -> std::io::Result<PathBuf> {
    let keys = folder.join("keys");
    let etcd = Subject {
        file: ETCD_KEYS.to_owned(),
        names: vec!["127.0.0.1".to_owned()],
    };
    urpc::tls::make(&keys, ["alpha".into(), "beta".into(), etcd]).map_err(std::io::Error::other)?;
    Ok(keys)
}

/// Writes the files of both hosts below a folder.
pub fn write(
    folder: &Path,
    spans: SpanTransport,
    memory: Memory,
    silence_ms: u64,
    etcd: &[String],
) -> std::io::Result<()> {
    let [alpha_memory, beta_memory] = memory.files(folder)?;
    let keys = keys(folder)?;
    let host = |name: &str, address, shared_memory, cells: &[u16]| HostPlan {
        name: name.to_owned(),
        address,
        shared_memory,
        remote_paths: Vec::new(),
        cells: cells.to_vec(),
    };
    let hosts = vec![
        host("alpha", free("127.0.0.1", 0)?, alpha_memory, &ALPHA),
        host("beta", free("127.0.0.2", 1)?, beta_memory, &[1, 2]),
    ];
    for own in &hosts {
        let here = own.name.clone();
        let plans: Vec<CellPlan> = own.cells.iter().map(|number| plan(*number)).collect();
        let site = Site {
            here: here.clone(),
            hosts: hosts.clone(),
            etcd: etcd.to_vec(),
            runs_etcd: false,
            keys: keys.clone(),
            silence_ms,
            spans,
            on_lost: config::cluster::OnLost::Keep,
            file: None,
        };
        Files::at(&folder.join(here)).create(&plans, Some(&site))?;
    }
    Ok(())
}

/// An address at which this cell of a host has a port that is free.
fn free(ip: &str, cell: u16) -> std::io::Result<SocketAddr> {
    let address = TcpListener::bind((ip, 0))?.local_addr()?;
    Ok(SocketAddr::new(address.ip(), address.port() - cell))
}

/// A cell: all of them have the first CPU and node, which every machine has, and a second CPU.
pub fn plan(number: u16) -> CellPlan {
    CellPlan {
        number,
        host: Some(if ALPHA.contains(&number) { "alpha" } else { "beta" }.to_owned()),
        cpus: vec![0, 1],
        nodes: vec![0],
        memory_bytes: CELL_BYTES,
    }
}
