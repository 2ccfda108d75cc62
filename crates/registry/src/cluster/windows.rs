//! Windows of VMs that span cells: reports of cells to the arbiter among them, and its schedule. Times are
//! nanoseconds of the host's monotonic clock.

use serde::{Deserialize, Serialize};

/// Report of a cell whose CPUs have drivers.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellReport {
    /// The cell's number.
    pub cell: u16,
    /// Sum of the weights of the busy vCPUs of VMs in this cell alone, for each of its CPUs.
    pub local_weight: u32,
    /// VMs with their home in this cell that span cells and have work.
    pub vms: Vec<SpanningVm>,
    /// Limits of these VMs. A program of an earlier release reports none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<VmLimit>,
}

/// Part of the time for which a VM may run, by its limit of CPUs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmLimit {
    /// The VM's name.
    pub vm: String,
    /// Thousandths of the time.
    pub most_permille: u32,
}

/// VM that spans cells, as it runs since its last boot and move of a vCPU.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct SpanningVm {
    /// The VM's name.
    pub name: String,
    /// The VM's weight.
    pub weight: u32,
    /// Its vCPUs, by number.
    pub vcpus: Vec<SpanningVcpu>,
}

/// vCPU of a VM that spans cells, and the thread that runs it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub struct SpanningVcpu {
    /// The vCPU's number.
    pub vcpu: u8,
    /// Cell that it is in.
    pub cell: u16,
    /// The host's number of its CPU.
    pub cpu: usize,
    /// Process id of the shard.
    pub shard_pid: i32,
    /// Id of the thread.
    pub thread_id: i32,
}

/// Windows for a time.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct WindowSchedule {
    /// Time at which it begins.
    pub from_ns: u64,
    /// Time at which it ends.
    pub until_ns: u64,
    /// Windows of each frame.
    pub windows: Vec<VmWindow>,
}

/// Window of a VM in each frame.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmWindow {
    /// The VM and its vCPUs.
    pub vm: SpanningVm,
    /// Beginning, from that of the frame.
    pub start_ns: u64,
    /// Length.
    pub length_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::super::interface::{CellRequest, CellResponse};
    use super::*;

    #[test]
    fn report_and_schedule_are_read_as_they_were_first_written() {
        let vm = SpanningVm {
            name: "db".to_owned(),
            weight: 100,
            vcpus: vec![SpanningVcpu {
                vcpu: 1,
                cell: 2,
                cpu: 5,
                shard_pid: 70,
                thread_id: 71,
            }],
        };
        let vcpu = r#"{"vcpu":1,"cell":2,"cpu":5,"shard_pid":70,"thread_id":71}"#;
        let json = format!(r#"{{"name":"db","weight":100,"vcpus":[{vcpu}]}}"#);
        let line = format!(r#"{{"ask":"windows","cell":3,"local_weight":150,"vms":[{json}]}}"#);
        let request: CellRequest = serde_json::from_str(&line).unwrap();
        let CellRequest::Windows(report) = &request else {
            panic!("{request:?}");
        };
        assert_eq!(
            (report.cell, report.local_weight, &report.vms[..]),
            (3, 150, &[vm.clone()][..])
        );
        assert_eq!(serde_json::to_string(&request).unwrap(), line);
        let limits = r#","limits":[{"vm":"db","most_permille":250}]}"#;
        let limited = line.strip_suffix('}').unwrap().to_owned() + limits;
        let request: CellRequest = serde_json::from_str(&limited).unwrap();
        let CellRequest::Windows(report) = &request else {
            panic!("{request:?}");
        };
        assert_eq!((report.limits.len(), report.limits[0].most_permille), (1, 250));
        assert_eq!(serde_json::to_string(&request).unwrap(), limited);
        let window = format!(r#"{{"vm":{json},"start_ns":3,"length_ns":4}}"#);
        let line = format!(r#"{{"answer":"windows","from_ns":1,"until_ns":2,"windows":[{window}]}}"#);
        let response: CellResponse = serde_json::from_str(&line).unwrap();
        let schedule = WindowSchedule {
            from_ns: 1,
            until_ns: 2,
            windows: vec![VmWindow {
                vm,
                start_ns: 3,
                length_ns: 4,
            }],
        };
        assert_eq!(response, CellResponse::Windows(schedule));
        assert_eq!(serde_json::to_string(&response).unwrap(), line);
    }
}
