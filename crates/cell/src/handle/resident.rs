//! The limit of a paged VM's memory in the host's memory, as the watch of memory sets it.

use std::io;

use config::{Size, VmSpec};
use registry::vms::Record;
use serde_json::{Value, json};
use shard_api::launch::{Answer, Order, OrderId};

use super::VmHandle;
use crate::control_group::ControlGroup;
use crate::oom;

/// The limit that the watch wants, and the order that carries it.
#[derive(Debug, Default)]
pub(super) struct ResidentOrder {
    /// The limit that the watch wants, bytes; none while no watch has decided.
    wanted: Option<u64>,
    /// The limit of the last order to the home that runs.
    sent: Option<u64>,
    /// The order that is not answered yet. A home that does not answer gets no second one: it would be killed
    /// for orders that it leaves unread.
    asked: Option<OrderId>,
}

impl ResidentOrder {
    /// Forgets the orders to a home that has ended. The limit that is wanted stays.
    pub(super) fn start(&mut self) {
        (self.sent, self.asked) = (None, None);
    }

    /// Takes an answer; returns whether it answers the order.
    pub(super) fn note_answer(&mut self, to: OrderId) -> bool {
        let is_asked = self.asked == Some(to);
        if is_asked {
            self.asked = None;
        }
        is_asked
    }

    /// The limit of a VM whose user limits it to `most` bytes.
    fn limit(&self, most: u64) -> u64 {
        self.wanted.map_or(most, |wanted| wanted.min(most))
    }
}

/// A VM that can be trimmed, as its record and the host show it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrimmableVm {
    /// Its address on the socket device, which no two VMs share.
    pub(crate) cid: u32,
    /// The process of its shard, if that runs.
    pub(crate) shard: Option<i32>,
    /// The user's limit, bytes.
    pub(crate) limit_bytes: u64,
    /// Memory that is promised, bytes.
    pub(crate) promised_bytes: u64,
    /// Weight when the host is short of memory.
    pub(crate) weight: u16,
}

impl VmHandle {
    /// The VM as the watch of memory sees it; none if it can't be trimmed, or has ended.
    pub(crate) fn trimmable(&self) -> Option<TrimmableVm> {
        let of_record = |record: &Record| {
            let spec = &record.spec;
            spec.is_trimmable().then(|| TrimmableVm {
                cid: record.cid,
                shard: None,
                limit_bytes: spec.resident_max().0,
                promised_bytes: spec.promised().0,
                weight: spec.weight_of_memory(),
            })
        };
        let vm = self.recorder().read(of_record).flatten()?;
        let state = self.state();
        let home = state.home.as_ref().filter(|home| !home.has_ended());
        let shard = home.map(|home| home.pid);
        Some(TrimmableVm { shard, ..vm })
    }

    /// Limits the VM's memory in the host's memory from now on, also after a reboot. Sends an order if that
    /// changes something, and never blocks: while the shard has not answered the last order, the next one
    /// waits for a later call.
    pub(crate) fn limit_resident_to(&self, bytes: u64) {
        let mut state = self.state();
        state.resident.wanted = Some(bytes);
        let is_ready = state.runs && state.orders.is_some() && state.resident.asked.is_none();
        if !is_ready || state.resident.sent == Some(bytes) {
            return;
        }
        // A shard that is gone ends the VM.
        if let Ok(id) = state.order(&Order::Resident { bytes }) {
            (state.resident.asked, state.resident.sent) = (Some(id), Some(bytes));
        }
    }

    /// The limit of guest memory in the host's memory, bytes: the user's, or a lower one while the host is
    /// short of memory.
    pub(crate) fn resident_limit(&self, users: Size) -> u64 {
        self.state().resident.limit(users.0)
    }

    /// Changes the user's limit. A limit that is lowered by the watch stays lower.
    pub(super) fn limit_resident(&self, record: &Record, resident: Size) -> io::Result<()> {
        if record.spec.resident.is_none() {
            return Err(io::Error::other(
                "its memory is not paged, and can't be from now on; help: start it with `resident`",
            ));
        }
        check_place(record, resident)?;
        let is_trimmed = |limit: u64| limit < record.spec.resident_max().0;
        let lowered = self.state().resident.wanted.filter(|limit| is_trimmed(*limit));
        let bytes = lowered.map_or(resident.0, |limit| limit.min(resident.0));
        let answer = self.act(&Order::Resident { bytes })?;
        if answer != Answer::Done {
            return Err(super::not_an_answer(&answer));
        }
        // The watch may have ordered another limit meanwhile: it orders its own again.
        self.state().resident.sent = None;
        self.recorder()
            .change(|record| record.spec.resident = Some(resident));
        Ok(())
    }

    /// The VM's promise of the host's memory, and the means that keep it; none for a VM without a promise of
    /// its own, and without paging.
    pub(super) fn promise_status(&self) -> Option<Value> {
        let spec = self.recorder().read(|record| record.spec.clone())?;
        if spec.memory_min.is_none() && spec.resident.is_none() {
            return None;
        }
        let (limit, group, shard) = {
            let state = self.state();
            let limit = state.resident.limit(spec.resident_max().0);
            let shard = state.home.as_ref().map(|home| home.pid);
            (limit, state.group.clone(), shard)
        };
        let mut status = json!({
            "promised_bytes": spec.promised().0,
            "worst_bytes": spec.worst().0,
            "limit_bytes": limit,
            "is_trimmed": limit < spec.resident_max().0,
            "oom_score_adj": shard.and_then(|pid| oom::score(pid).ok()),
        });
        if let Some(kept_by) = kept_by(&spec, group.as_deref()) {
            let (kept_by, why) = match kept_by {
                Ok(()) => ("memory.min", None),
                Err(why) => ("best effort", Some(why)),
            };
            status["kept_by"] = kept_by.into();
            status["why"] = why.into();
        }
        Some(status)
    }
}

/// Checks that the control group of a place in the host's cluster has room for a limit.
fn check_place(record: &Record, resident: Size) -> io::Result<()> {
    let most = record.host_place.and_then(|place| place.resident_max_bytes);
    let wanted = resident.min(record.spec.memory);
    match most.map(Size) {
        Some(most) if wanted > most => Err(io::Error::other(format!(
            "its place in the host's cluster has memory for {most}, not for {wanted}; help: start the VM \
             with a larger `resident`"
        ))),
        _ => Ok(()),
    }
}

/// Whether the kernel keeps the promise against programs outside, or why not; none without a promise of the
/// VM's own.
fn kept_by(spec: &VmSpec, group: Option<&ControlGroup>) -> Option<Result<(), String>> {
    let promised = spec.memory_min?;
    let none = || Err("the VM has no control group of its own, which takes root and cgroup v2".to_owned());
    Some(group.map_or_else(none, |group| group.keeps(promised)))
}
