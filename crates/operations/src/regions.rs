//! Operations on shared regions of this host's cells.

use std::time::{Duration, Instant};

use registry::cluster::client::Connection;
use registry::cluster::interface::{CellRequest, CellResponse, RegionMoved};

use crate::cells::{cells, does_not_answer};
use crate::failure::{Failure, Kind};

/// Time limit for a region's memory to move. Ours: a region of 1 TiB at 2 GiB/s.
const MOVE_LIMIT: Duration = Duration::from_secs(600);
/// Time limit for a home that has started again to have the region's file.
const FILE_LIMIT: Duration = Duration::from_secs(15);
/// Interval between two requests to such a home.
const INTERVAL: Duration = Duration::from_millis(50);

/// Moves the memory of a shared region to the memory of the cell `to`.
///
/// # Errors
/// If this host's cells have no such region, or its home refuses or does not reply.
pub fn move_region(region: &str, to: u16) -> Result<RegionMoved, Failure> {
    let (files, plan) = cells()?;
    let regions = files.regions().map_err(Failure::host)?;
    let Some(spec) = regions.iter().find(|spec| spec.name == region) else {
        let names: Vec<&str> = regions.iter().map(|spec| &spec.name[..]).collect();
        let names = match names[..] {
            [] => "none".to_owned(),
            _ => names.join(", "),
        };
        let unknown = format!("the cluster has no shared region {region}; it has {names}");
        return Err(Failure::new(Kind::Unknown, unknown).help("see `[[shared]]` in the cluster file"));
    };
    if plan.iter().all(|cell| cell.number != spec.cell) {
        let away = format!(
            "shared region {region} is memory of cell {}, which is no cell of this host",
            spec.cell
        );
        return Err(Failure::new(Kind::Unknown, away).help("give the command on that host"));
    }
    let home = files.cell(spec.cell);
    let request = CellRequest::MoveRegion {
        region: region.to_owned(),
        to,
    };
    let deadline = Instant::now() + FILE_LIMIT;
    loop {
        let answer = Connection::open(&home).and_then(|mut connection| {
            connection.limit_wait(MOVE_LIMIT)?;
            connection.ask(&request)
        });
        match answer.map_err(|error| does_not_answer(spec.cell, &error))? {
            CellResponse::RegionMoved(moved) => return Ok(moved),
            CellResponse::Later { .. } if Instant::now() < deadline => std::thread::sleep(INTERVAL),
            CellResponse::Refused { why } | CellResponse::Later { why } => {
                return Err(Failure::new(Kind::Refused, why));
            }
            other => return Err(Failure::host(other.unexpected())),
        }
    }
}
