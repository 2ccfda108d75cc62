//! Requests of the home that a part's monitor carries out on its host: lists vCPUs, and limits the part.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use config::VmSpec;
use registry::cluster::interface::Vcpu;

use super::protocol::{FromPart, HostAnswer};
use super::reports::{AwaitedAnswers, tell};
use crate::affinity::threads_of;
use crate::control_group::{ControlGroup, ControlGroupError};
use crate::shard_process::ShardProcess;
use crate::vcpu_statistics::{STATISTICS_LIMIT, for_spans, read_all, row};

/// Lists the vCPUs of the part's shard, in a thread of its own: the shard may take a while to pass the files
/// of their statistics.
#[derive(Debug, Default)]
pub struct VcpuLister {
    is_listing: Arc<AtomicBool>,
}

impl VcpuLister {
    /// Begins to list them. The answer follows. A request while another one is served is refused.
    ///
    /// # Errors
    /// If the connection to the home has ended, or this process has no threads left.
    pub fn begin(
        &self,
        home: &Arc<Mutex<UnixStream>>,
        number: u64,
        cell: u16,
        shard: &Arc<ShardProcess>,
        awaited: &Arc<AwaitedAnswers>,
    ) -> io::Result<()> {
        if self.is_listing.swap(true, Ordering::AcqRel) {
            let busy = io::Error::other("it serves another request for its vCPUs");
            return answer(home, number, Err(busy));
        }
        let (home, is_listing) = (home.clone(), self.is_listing.clone());
        let (shard, awaited) = (shard.clone(), awaited.clone());
        let list = move || {
            let vcpus = list(cell, &shard, &awaited);
            // A part's end waits for no list of it.
            drop((shard, awaited));
            is_listing.store(false, Ordering::Release);
            let answer = match vcpus {
                Ok(vcpus) => HostAnswer::Vcpus(vcpus),
                Err(error) => refused(&error),
            };
            // A home that is gone needs no answer.
            let _ = tell(&home, &FromPart::OfHost { number, answer });
        };
        std::thread::Builder::new()
            .name("vcpus".into())
            .spawn(list)
            .map(drop)
    }
}

/// The vCPUs of a shard, each with its thread. The home knows which of them are in it, and the VM's name.
fn list(cell: u16, shard: &ShardProcess, awaited: &AwaitedAnswers) -> io::Result<Vec<Vcpu>> {
    let threads = threads_of(shard.pid)?;
    if shard.has_ended() {
        return Err(io::Error::other("it has ended"));
    }
    let statistics = read_all(|first| awaited.statistics(shard, first, STATISTICS_LIMIT));
    let vcpus = threads.into_iter().map(|thread| {
        let kvm = statistics.get(usize::from(thread.vcpu)).map(for_spans);
        row("", cell, shard.pid, thread, kvm)
    });
    Ok(vcpus.collect())
}

/// Sets the weight and the limits of the part's group, which is made if there is none.
///
/// # Errors
/// If the host does not let this user limit anything.
pub fn limit(
    group: &mut Option<ControlGroup>,
    vm: &str,
    spec: &VmSpec,
    shard: Option<i32>,
) -> io::Result<()> {
    let failed = |error: ControlGroupError| io::Error::other(error);
    if let Some(group) = group {
        return group.limit(spec).map_err(failed);
    }
    // A group without the shard would be of no use, and is removed.
    let made = ControlGroup::make(vm, std::process::id(), false).map_err(failed)?;
    made.limit(spec).map_err(failed)?;
    shard.map_or(Ok(()), |pid| made.add(pid)).map_err(failed)?;
    *group = Some(made);
    Ok(())
}

/// Answers a request of the home.
///
/// # Errors
/// If the connection has ended.
pub fn answer(home: &Mutex<UnixStream>, number: u64, done: io::Result<()>) -> io::Result<()> {
    let answer = done.map_or_else(|error| refused(&error), |()| HostAnswer::Done);
    tell(home, &FromPart::OfHost { number, answer })
}

fn refused(error: &io::Error) -> HostAnswer {
    HostAnswer::Refused {
        why: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::process::Command;
    use std::time::Duration;

    use shard_api::launch::{Answer, NumberedOrder, Report};

    use super::super::connections::receive;
    use super::super::reports::watch;
    use super::*;

    #[test]
    fn vcpus_of_a_part_are_listed_one_request_at_a_time_though_the_shard_passes_no_files() {
        let (process, shard) = ShardProcess::of(Command::new("sleep").arg("100"));
        let process = Arc::new(process);
        let (near, far) = UnixStream::pair().unwrap();
        let home = Arc::new(Mutex::new(near));
        let awaited = Arc::<AwaitedAnswers>::default();
        watch(process.clone(), home.clone(), awaited.clone(), || {}).unwrap();
        let lister = VcpuLister::default();
        for number in [1, 2] {
            lister.begin(&home, number, 5, &process, &awaited).unwrap();
        }
        let mut far = BufReader::new(far);
        far.get_ref()
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut next = || match receive::<FromPart>(&mut far).unwrap() {
            FromPart::OfHost { number, answer } => (number, answer),
            other => panic!("{other:?}"),
        };
        let why = "it serves another request for its vCPUs".to_owned();
        assert_eq!(next(), (2, HostAnswer::Refused { why }));
        let (message, _) = shard.receive_with_files().unwrap();
        let NumberedOrder { id: to, .. } = serde_json::from_slice(&message).unwrap();
        let answer = Answer::Refused { why: "no".to_owned() };
        shard.send(&Report::Answer { to, answer }, &[]).unwrap();
        // The process has no threads of vCPUs.
        assert_eq!(next(), (1, HostAnswer::Vcpus(Vec::new())));
        process.kill();
    }
}
