//! KVM's statistics of vCPUs, from files that a shard passes.
//!
//! A shard may be in a guest's hands and pass any file. A file is read only if the kernel names it as KVM's
//! statistics of that vCPU, which also means that reading it never blocks. No shard can change their content.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use hostinfo::kvm_statistics::{STATISTICS_BYTES_MAX, VcpuStatistics};

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
        // A read of the pipe would block for ever.
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
