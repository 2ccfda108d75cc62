//! Moves of a vCPU to a CPU by order of a person.
//!
//! Where drivers have the VM, the driver of the CPU takes the vCPU, or refuses. Elsewhere the order is a pin.

use std::io;

use registry::control::{PlacedBy, Placement};
use registry::update::{Pin, Update};
use registry::vms::Record;

use super::{VmChange, VmHandle};

impl VmHandle {
    /// Has a vCPU run on a CPU of the host.
    ///
    /// # Errors
    /// If the VM does not run, has no such vCPU, or may not use the CPU, or the CPU's driver refuses.
    pub fn place_vcpu(&self, vcpu: u8, cpu: usize) -> io::Result<Placement> {
        let _updating = self.begin_update();
        let record = self.recorder().read(Record::clone);
        let record = record.ok_or_else(|| io::Error::other("the VM is not running just now"))?;
        check_vcpu(&record, vcpu)?;
        if let Some(ordered) = self.0.observer.get().and_then(|drivers| drivers.order(vcpu, cpu)) {
            ordered.map_err(io::Error::other)?;
            return Ok(Placement {
                by: PlacedBy::Driver,
                ..Placement::default()
            });
        }
        let pin = Pin {
            vcpu,
            cpus: vec![cpu],
        };
        let update = Update {
            pins: vec![pin.clone()],
            ..Update::default()
        };
        self.check_pins(&record, &update)?;
        self.pin(&pin)?;
        self.report_change(VmChange::Updated);
        Ok(Placement::default())
    }
}

fn check_vcpu(record: &Record, vcpu: u8) -> io::Result<()> {
    let vcpus = record.spec.cpus;
    if vcpu < vcpus {
        return Ok(());
    }
    let known = match vcpus {
        1 => "0".to_owned(),
        _ => format!("0-{}", vcpus - 1),
    };
    Err(io::Error::other(format!(
        "the VM has no vCPU {vcpu}; help: name one of {known}"
    )))
}
