//! Pages of a VM by their use in the guest and their origin on the host, as `mirrorball mem VM --explain`
//! shows them.
//!
//! The host's part comes from the VM's shard, the guest's part from the guest's `/proc/kpageflags` and
//! `/proc/iomem` through its agent, of any version. The guest may send anything: both files are bounded, and
//! only choose the row in which a page counts.

mod guest;
mod table;

use std::io;
use std::path::Path;
use std::time::Duration;

use agent::client::GuestFile;
use registry::control::{Answer, HostPage, PageRun, Request, ask};

use crate::failure::{Failure, Kind};
use crate::guest::{AgentWait, connect_booting, explain as of_agent};

pub use guest::GuestUse;
use guest::{GuestPages, KernelRanges};
pub use table::{PageUse, UseRow};

/// Time limit for the VM's answer to one request.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for the guest's agent to answer.
const AGENT_LIMIT: Duration = Duration::from_secs(20);
/// Greatest length of the guest's `/proc/iomem`, bytes.
const IOMEM_BYTES_MAX: u64 = 256 << 10;
/// Greatest number of runs that are read of the host's map: a VM of 64 GiB without two equal neighbours.
const RUNS_MAX: usize = 16 << 20;

/// Reads the map of the VM `name`, whose directory is `folder`. A guest that does not report its pages leaves
/// all of them in the row [`GuestUse::Unknown`], and [`PageUse::unread`] has the reason.
///
/// # Errors
/// If the VM does not run, or its memory shares no pages.
pub fn explain(name: &str, folder: &Path) -> Result<PageUse, Failure> {
    let host = host_pages(name, folder)?;
    let guest = guest_pages(name, folder, &host);
    let (guest, unread) = match guest {
        Ok(guest) => (guest, None),
        Err(failure) => (GuestPages::default(), Some(failure.line())),
    };
    Ok(PageUse {
        vm: name.to_owned(),
        unread,
        ..table::join(&host, &guest)
    })
}

/// Returns the origins of all pages of the VM's memory.
fn host_pages(name: &str, folder: &Path) -> Result<Vec<PageRun>, Failure> {
    let refused = |why: &str| Failure::new(Kind::Refused, format!("{name}: {why}"));
    let mut runs: Vec<PageRun> = Vec::new();
    let mut from = 0;
    loop {
        let part = match ask(folder, &Request::PageMap { from }, Some(ANSWER_LIMIT)) {
            Ok(Answer::PageMap(part)) if part.answers(from) => part,
            Ok(Answer::Refused { why }) => return Err(refused(&why)),
            Ok(Answer::Ended { .. }) => return Err(refused("the VM has ended")),
            Ok(_) => return Err(refused("the VM's monitor does not report its pages")),
            Err(error) => return Err(refused(&format!("the VM does not report its pages: {error}"))),
        };
        for PageRun(start, pages, host) in part.runs {
            match runs.last_mut() {
                Some(PageRun(first, count, last)) if *last == host && *first + *count == start => {
                    *count += pages;
                }
                _ => runs.push(PageRun(start, pages, host)),
            }
        }
        if runs.len() > RUNS_MAX {
            return Err(refused("its memory has too many pages for this table"));
        }
        match part.next {
            Some(next) => from = next,
            None => return Ok(runs),
        }
    }
}

/// Returns the guest's use of its pages.
fn guest_pages(name: &str, folder: &Path, host: &[PageRun]) -> Result<GuestPages, Failure> {
    let end = host.last().map_or(0, |PageRun(start, pages, _)| start + pages);
    let mut iomem = Vec::new();
    receive(name, folder, "/proc/iomem", IOMEM_BYTES_MAX, &mut |data| {
        iomem.extend_from_slice(data);
    })?;
    let kernel = KernelRanges::of(&String::from_utf8_lossy(&iomem));
    let mut pages = GuestPages::up_to(end);
    let most = GuestPages::file_bytes_max(end);
    receive(name, folder, "/proc/kpageflags", most, &mut |data| {
        pages.read(data)
    })?;
    let ram: Vec<_> = host
        .iter()
        .map(|PageRun(start, pages, _)| *start..start + pages)
        .collect();
    pages.complete(&kernel, &ram);
    Ok(pages)
}

/// Receives a file of the guest, of `most` bytes at most.
fn receive(
    name: &str,
    folder: &Path,
    path: &str,
    most: u64,
    sink: &mut dyn FnMut(&[u8]),
) -> Result<(), Failure> {
    let waiting = AgentWait {
        limit: Some(AGENT_LIMIT),
        on_booting: &|_| {},
        goes_on: &|| true,
    };
    let stream = connect_booting(name, folder, &waiting)?;
    let file = GuestFile::open(stream, path).map_err(|error| of_agent(name, error))?;
    let received = file.receive(most, &mut |data| -> io::Result<()> {
        sink(data);
        Ok(())
    });
    received.map(drop).map_err(|error| of_agent(name, error))
}

/// Whether a page of this origin is memory of this VM alone.
pub fn is_private(host: HostPage) -> bool {
    !matches!(
        host,
        HostPage::Absent | HostPage::Image | HostPage::Frozen | HostPage::Merged
    )
}
