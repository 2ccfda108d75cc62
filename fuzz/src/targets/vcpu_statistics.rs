//! KVM's statistics of a vCPU, of which a shard that a guest has taken over may send any other file instead.

use hostinfo::kvm_statistics::VcpuStatistics;

pub fn fuzz(bytes: &[u8]) {
    if let Ok(statistics) = VcpuStatistics::parse(bytes) {
        assert!(statistics.id.len() < 256 && statistics.id.chars().all(|c| c.is_ascii_graphic()));
        assert!(statistics.halted().is_some() || statistics.halt_wait.is_none());
        // The values are in the file.
        for value in [statistics.exits, statistics.halts].into_iter().flatten() {
            let value = value.to_le_bytes();
            assert!(bytes.windows(8).any(|window| window == value));
        }
    }
}
