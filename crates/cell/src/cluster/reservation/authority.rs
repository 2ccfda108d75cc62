//! The authority for places: the cells of the user's own cluster, or the host's cluster, which is root's,
//! through its admission server.

use std::io;

use registry::cluster::admission::{self, PlaceRequest, Reply, Request};
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{AdmitVm, CellRequest, CellResponse};
use registry::vms::{self, Registry};

/// The authority that gives a place, and receives the report when it is free again.
#[derive(Clone, Debug)]
pub(super) enum Authority {
    /// The cells of this user's cluster.
    Own(Files),
    /// The admission server of the host's cluster.
    Host,
}

impl Authority {
    /// Requests a place in a cell. The connection holds it.
    ///
    /// # Errors
    /// If the authority does not answer.
    pub(super) fn ask(&self, cell: u16, host: &AdmitVm) -> io::Result<(Connection, CellResponse)> {
        match self {
            Self::Own(files) => {
                let mut connection = Connection::open(&files.cell(cell))?;
                let answer = connection.ask(&CellRequest::AdmitVm(host.clone()))?;
                Ok((connection, answer))
            }
            Self::Host => {
                let mut connection = admission::connect()?.ok_or(io::ErrorKind::NotFound)?;
                let answer =
                    match connection.exchange(&admission::OF_USER, &place_request(host, Some(cell)))? {
                        Reply::Placed { place, .. } => CellResponse::Hosted(place),
                        Reply::Refused { why } => CellResponse::Refused { why },
                        other => return Err(io::Error::other(format!("no place: {other:?}"))),
                    };
                Ok((connection, answer))
            }
        }
    }

    /// The same for a VM that runs, from a cell that may have lost the VM's entry: the cell makes it anew,
    /// with the vCPUs that run on CPUs of other cells by the VM's record.
    ///
    /// # Errors
    /// If the authority does not answer.
    pub(super) fn ask_again(&self, cell: u16, host: &AdmitVm) -> io::Result<(Connection, CellResponse)> {
        let folder = Registry::open().and_then(|registry| registry.folder_of(&host.name));
        let record = folder.and_then(|folder| vms::read(&folder));
        let mut host = host.clone();
        if let Ok(record) = record {
            host.share.cpu_reservation_permille = record.spec.cpu_reservation_permille();
            host.borrowed_cpus = record.borrowed_cpus;
        }
        self.ask(cell, &host)
    }

    /// Reports the end of a VM. Returns when its name is free.
    ///
    /// # Errors
    /// If the authority does not answer.
    pub(super) fn leave(&self, cell: u16, name: &str) -> io::Result<()> {
        let name = name.to_owned();
        match self {
            Self::Own(files) => {
                Connection::open(&files.cell(cell))?.ask(&CellRequest::Leave { name })?;
            }
            Self::Host => {
                admission::request(&Request::Leave { name })?;
            }
        }
        Ok(())
    }

    /// Whether the cluster is up; true if its state can't be read.
    pub(super) fn is_up(&self) -> bool {
        match self {
            Self::Own(files) => !files.plan().is_ok_and(|plan| plan.is_empty()),
            Self::Host => admission::socket_in(&admission::directory()).exists(),
        }
    }
}

/// A user's request for the place of a VM.
pub(super) fn place_request(host: &AdmitVm, cell: Option<u16>) -> Request {
    Request::Place(PlaceRequest {
        name: host.name.clone(),
        share: host.share,
        cell,
    })
}
