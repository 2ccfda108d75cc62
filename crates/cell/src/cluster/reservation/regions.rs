//! A VM's shared regions: their grants, and their files, which their home cells send.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use config::VmSpec;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse, OF_CLIENT, RegionGrant};
use serde_json::Value;
use shard_api::launch::Fd;
use shard_api::message::{receive_by, send};

use super::ReservationError;

/// Time limit for a region's home to send its file: it may be restarting, and seeks the file then.
const LIMIT: Duration = Duration::from_secs(15);
/// Interval between two requests.
const INTERVAL: Duration = Duration::from_millis(50);

/// The grants of the regions that a VM of this user's cluster names.
///
/// # Errors
/// If the cluster has no such region.
pub(super) fn grants(files: &Files, spec: &VmSpec) -> Result<Vec<RegionGrant>, ReservationError> {
    if spec.shared.is_empty() {
        return Ok(Vec::new());
    }
    let specs = files.regions()?;
    let grant = |wanted: &config::vm::SharedSpec| {
        let region = specs.iter().find(|region| region.name == wanted.name);
        let region = region.ok_or_else(|| {
            let known: Vec<&str> = specs.iter().map(|region| &region.name[..]).collect();
            ReservationError::NoRegion {
                region: wanted.name.clone(),
                known: match known[..] {
                    [] => "none".to_owned(),
                    _ => known.join(", "),
                },
            }
        })?;
        Ok(RegionGrant {
            name: region.name.clone(),
            home: region.cell,
            bytes: region.size.0,
            access: wanted.access(),
            borrowed: Vec::new(),
        })
    };
    spec.shared.iter().map(grant).collect()
}

/// Takes the file of each region from its home, for a VM that the cells have with these grants. The grants
/// that are returned name the lenders of the region's memory.
///
/// # Errors
/// If a home refuses, or does not send the file in time.
pub(crate) fn take(vm: &str, grants: &[RegionGrant]) -> Result<Vec<(RegionGrant, File)>, ReservationError> {
    let files = Files::open()?;
    grants.iter().map(|grant| take_one(&files, vm, grant)).collect()
}

fn take_one(files: &Files, vm: &str, grant: &RegionGrant) -> Result<(RegionGrant, File), ReservationError> {
    let home = files.cell(grant.home);
    let deadline = Instant::now() + LIMIT;
    loop {
        if home.has_failed() {
            return Err(ReservationError::RegionLost {
                region: grant.name.clone(),
                cell: grant.home,
                why: "the cell has failed".to_owned(),
            });
        }
        let why = match ask(&home.socket(), vm, &grant.name, deadline) {
            Ok((CellResponse::Region { borrowed }, Some(file))) => {
                let grant = RegionGrant {
                    borrowed,
                    ..grant.clone()
                };
                return Ok((grant, file));
            }
            Ok((CellResponse::Refused { why }, _)) => return Err(ReservationError::Refused(why)),
            Ok((CellResponse::Later { why }, _)) => why,
            Ok((other, _)) => {
                return Err(io::Error::other(format!("an answer to another question: {other:?}")).into());
            }
            Err(error) => format!("cell {} does not answer: {error}", grant.home),
        };
        if Instant::now() + INTERVAL > deadline {
            return Err(ReservationError::RegionLost {
                region: grant.name.clone(),
                cell: grant.home,
                why,
            });
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Requests a region's file of its home.
fn ask(
    home: &std::path::Path,
    vm: &str,
    region: &str,
    deadline: Instant,
) -> io::Result<(CellResponse, Option<File>)> {
    let mut socket = UnixStream::connect(home)?;
    let request = CellRequest::TakeRegion {
        vm: vm.to_owned(),
        region: region.to_owned(),
    };
    send(&mut socket, &OF_CLIENT.sent(&request), &[]).map_err(io::Error::other)?;
    let (answer, mut files) = receive_by::<Value>(&mut socket, deadline).map_err(io::Error::other)?;
    let answer = OF_CLIENT.read(&answer.to_string()).map_err(io::Error::other)?;
    Ok((answer, files.take(Fd(0)).ok()))
}
