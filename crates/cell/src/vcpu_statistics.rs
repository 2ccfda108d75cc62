//! KVM's statistics of vCPUs, from files that a shard passes.
//!
//! A shard may be under a guest's control and pass any file. A file is read only if the kernel names it as
//! KVM's statistics of that vCPU, which also means that reading it never blocks. No shard can change their
//! content.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use hostinfo::kvm_statistics::{STATISTICS_BYTES_MAX, VcpuStatistics};
use registry::cluster::interface::{self, Vcpu};

use crate::affinity::VcpuThread;

/// Time limit for a shard to pass files, after which it gets no further request for some. The figures are
/// absent if it is busy for longer.
pub(crate) const STATISTICS_LIMIT: Duration = Duration::from_secs(2);

/// Reads the statistics of vCPU `vcpu`.
///
/// # Errors
/// If the file is another one, or is malformed.
pub(crate) fn read(file: &File, vcpu: u8) -> io::Result<VcpuStatistics> {
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if name.to_str() != Some(&format!("anon_inode:kvm-vcpu-stats:{vcpu}")) {
        return Err(not_statistics(vcpu));
    }
    let mut bytes = vec![0; STATISTICS_BYTES_MAX];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64)? {
            0 => break,
            read => filled += read,
        }
    }
    let statistics = VcpuStatistics::parse(&bytes[..filled]).map_err(io::Error::other)?;
    if is_id_of(&statistics.id, vcpu) {
        Ok(statistics)
    } else {
        Err(not_statistics(vcpu))
    }
}

/// Reads the statistics of all vCPUs of a shard, by number. `pass` returns the shard's files from a vCPU on.
/// Those of vCPUs after the first that is not known are missing: the host's KVM may have none, and the shard
/// may be of the release before.
pub(crate) fn read_all(mut pass: impl FnMut(u8) -> Vec<File>) -> Vec<VcpuStatistics> {
    let mut all = Vec::new();
    let begun = Instant::now();
    loop {
        let Ok(first) = u8::try_from(all.len()) else {
            return all;
        };
        // A shard under a guest's control may pass one file at a time, each just in time.
        if begun.elapsed() >= STATISTICS_LIMIT {
            return all;
        }
        let files = pass(first);
        if files.is_empty() {
            return all;
        }
        for (file, vcpu) in files.iter().zip(first..=u8::MAX) {
            match read(file, vcpu) {
                Ok(statistics) => all.push(statistics),
                Err(error) => {
                    tracing::warn!("{error}");
                    return all;
                }
            }
        }
    }
}

/// Counter of the halts of a vCPU, which is read often.
#[derive(Debug)]
pub(crate) struct HaltCounter {
    file: File,
    at: u64,
}

impl HaltCounter {
    /// The counters of all vCPUs of a shard, as [`read_all`] gets their files. Those of vCPUs after the first
    /// that is not known are missing.
    pub(crate) fn find_all(mut pass: impl FnMut(u8) -> Vec<File>) -> Vec<Self> {
        let mut counters = Vec::new();
        let statistics = read_all(|first| {
            let files = pass(first);
            let copies = files.iter().map_while(|file| file.try_clone().ok());
            counters.extend(copies);
            files
        });
        // The file of each that was read is KVM's.
        let known = counters.into_iter().zip(statistics);
        known
            .map_while(|(file, read)| {
                Some(Self {
                    file,
                    at: read.halts_at?,
                })
            })
            .collect()
    }

    /// Halts since the vCPU's creation.
    pub(crate) fn read(&self) -> Option<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, self.at).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }
}

/// The statistics of a vCPU of a plain VM, as clients see them.
pub(crate) fn for_plain(statistics: &VcpuStatistics) -> interface::VcpuStatistics {
    let halted = statistics.halted();
    interface::VcpuStatistics {
        halted_ms: halted.and_then(|halted| u64::try_from(halted.as_millis()).ok()),
        is_halted: statistics.is_halted,
        ..for_spans(statistics)
    }
}

/// The statistics of a vCPU of a VM that spans cells. KVM counts its halts, but the shard waits for their
/// ends: so KVM's times of halts are zero, and are left out.
pub(crate) fn for_spans(statistics: &VcpuStatistics) -> interface::VcpuStatistics {
    interface::VcpuStatistics {
        exits: statistics.exits,
        halts: statistics.halts,
        halted_ms: None,
        is_halted: None,
    }
}

/// A vCPU and its thread in a shard, for clients.
pub(crate) fn row(
    vm: &str,
    cell: u16,
    shard_pid: i32,
    thread: VcpuThread,
    kvm: Option<interface::VcpuStatistics>,
) -> Vcpu {
    Vcpu {
        vm: vm.to_owned(),
        vcpu: thread.vcpu,
        cell,
        shard_pid,
        thread_id: thread.id,
        cpus: thread.cpus,
        last_cpu: thread.last_cpu,
        ran_ms: thread.ran_ms,
        waited_ms: Some(thread.waited_ms),
        kvm,
    }
}

/// Whether KVM names this vCPU so: `kvm-PID/vcpu-N`.
fn is_id_of(id: &str, vcpu: u8) -> bool {
    let parts = id.strip_prefix("kvm-").and_then(|rest| rest.split_once("/vcpu-"));
    parts.is_some_and(|(pid, number)| pid.parse::<u32>().is_ok() && number == vcpu.to_string())
}

fn not_statistics(vcpu: u8) -> io::Error {
    io::Error::other(format!(
        "its shard passed another file than KVM's statistics of vCPU {vcpu}"
    ))
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn file_of_another_type_is_refused_and_not_read() {
        // A read of the pipe would block forever.
        let (reader, _writer) = pipe().unwrap();
        for file in [
            File::from(OwnedFd::from(reader)),
            File::open("/dev/zero").unwrap(),
            tempfile::Builder::new()
                .prefix("anon_inode:kvm-vcpu-stats:0")
                .tempfile()
                .unwrap()
                .into_file(),
        ] {
            let refused = read(&file, 0).unwrap_err().to_string();
            assert_eq!(
                refused,
                "its shard passed another file than KVM's statistics of vCPU 0"
            );
        }
    }

    #[test]
    fn files_are_requested_until_one_is_not_known() {
        let mut asked = Vec::new();
        let none = read_all(|first| {
            asked.push(first);
            Vec::new()
        });
        assert!(none.is_empty() && asked == [0]);
        let mut asked = 0;
        let wrong = read_all(|_| {
            asked += 1;
            vec![File::open("/dev/null").unwrap()]
        });
        assert!(wrong.is_empty());
        assert_eq!(asked, 1, "a shard that passes other files receives one request");
    }

    #[test]
    fn times_of_halts_are_shown_where_kvm_waits_for_their_ends() {
        let statistics = VcpuStatistics {
            exits: Some(9),
            halts: Some(4),
            halt_wait: Some(Duration::from_millis(70)),
            is_halted: Some(false),
            ..VcpuStatistics::default()
        };
        let (plain, spans) = (for_plain(&statistics), for_spans(&statistics));
        assert_eq!((plain.halted_ms, plain.is_halted), (Some(70), Some(false)));
        assert_eq!((spans.halted_ms, spans.is_halted), (None, None));
        for shown in [plain, spans] {
            assert_eq!((shown.exits, shown.halts), (Some(9), Some(4)));
        }
    }

    #[test]
    fn id_names_the_vcpu() {
        assert!(is_id_of("kvm-4711/vcpu-3", 3));
        for wrong in [
            "kvm-4711/vcpu-13",
            "kvm-4711/vcpu-03",
            "kvm-4711",
            "kvm-/vcpu-3",
            "vcpu-3",
            "",
        ] {
            assert!(!is_id_of(wrong, 3), "{wrong}");
        }
    }
}
