//! What changes, as a stream of server-sent events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use futures_core::Stream;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::ToSchema;

use crate::api::{blocking, cells, records};
use crate::views::{Cell, Vm};

/// How often is looked: an event is that late at most.
const LOOK: Duration = Duration::from_millis(200);
/// Events that wait for a slow reader; then it waits no longer for this host than the host for it.
const WAITING_MAX: usize = 64;

/// What has changed.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Change {
    /// A VM is there, or was when the stream began, or is otherwise than before: starting, running, rebooted, with a full disk.
    Vm(Vm),
    /// A VM has ended.
    VmEnded {
        /// Its name.
        name: String,
    },
    /// A cell is there, or was when the stream began, or is otherwise than before.
    Cell(Cell),
    /// A cell is no longer in the cluster.
    CellGone {
        /// Its number.
        number: u16,
    },
}

/// What there is at a moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Scene {
    vms: BTreeMap<String, Vm>,
    cells: BTreeMap<u16, Cell>,
}

impl Scene {
    /// Of these.
    pub fn new(vms: impl IntoIterator<Item = Vm>, cells: impl IntoIterator<Item = Cell>) -> Self {
        Self {
            vms: vms.into_iter().map(|vm| (vm.name.clone(), vm)).collect(),
            cells: cells.into_iter().map(|cell| (cell.number, cell)).collect(),
        }
    }

    /// What has changed since `before`.
    pub fn changes(&self, before: &Self) -> Vec<Change> {
        let ended = before.vms.keys().filter(|name| !self.vms.contains_key(*name));
        let ended = ended.map(|name| Change::VmEnded { name: name.clone() });
        let new = self
            .vms
            .iter()
            .filter(|(name, vm)| before.vms.get(*name) != Some(*vm));
        let new = new.map(|(_, vm)| Change::Vm(vm.clone()));
        let gone = before
            .cells
            .keys()
            .filter(|number| !self.cells.contains_key(number));
        let gone = gone.map(|number| Change::CellGone { number: *number });
        let cells = self
            .cells
            .iter()
            .filter(|(number, cell)| before.cells.get(number) != Some(*cell));
        let cells = cells.map(|(_, cell)| Change::Cell(cell.clone()));
        ended.chain(new).chain(gone).chain(cells).collect()
    }
}

/// Tells of every VM and cell that there is, and then of each change.
#[utoipa::path(get, path = "/v1/events", responses(
    (status = 200, content_type = "text/event-stream", body = Change, description = "A `data:` line of JSON for each.")))]
pub(crate) async fn events() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    tokio::spawn(async move {
        let mut known = Scene::default();
        // Ends when nobody listens.
        while !sender.is_closed() {
            // What can't be read now is looked at again.
            if let Ok(now) = blocking(|| Ok(Scene::new(records()?.iter().map(Vm::from), cells()?))).await {
                for change in now.changes(&known) {
                    let event = Event::default().json_data(&change).unwrap_or_default();
                    if sender.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                known = now;
            }
            tokio::time::sleep(LOOK).await;
        }
    });
    Sse::new(ReceiverStream::new(receiver)).keep_alive(KeepAlive::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::views::VmState;

    fn vm(name: &str, boots: u32) -> Vm {
        Vm {
            name: name.to_owned(),
            labels: Default::default(),
            state: VmState::Running,
            cell: None,
            span: Vec::new(),
            cpus: 1,
            memory_bytes: 1,
            image: None,
            pid: None,
            boots,
            started_unix_s: 0,
            full_disks: Vec::new(),
        }
    }

    #[test]
    fn only_what_has_changed_is_told() {
        let before = Scene::new([vm("a", 1), vm("b", 1), vm("c", 1)], []);
        let after = Scene::new([vm("b", 1), vm("c", 2), vm("d", 1)], []);
        let changes = after.changes(&before);
        let ended = Change::VmEnded { name: "a".to_owned() };
        assert_eq!(changes, [ended, Change::Vm(vm("c", 2)), Change::Vm(vm("d", 1))]);
        assert!(after.changes(&after).is_empty());
    }
}
