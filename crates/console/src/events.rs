//! Changes of VMs and cells, as a stream of server-sent events.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_core::Stream;
use registry::journal::{Journal, Reader, Token};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::SendError;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::ToSchema;

use crate::api::{Context, blocking, cells, records};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::views::{Cell, Vm};

/// Header that a reconnecting client sends.
const LAST_EVENT_ID: &str = "last-event-id";
/// Type of the journal's events in the stream. Events without a type are unchanged from before the journal
/// existed.
const JOURNAL_TYPE: &str = "journal";
/// Maximum events of the journal per read.
const BATCH_MAX: usize = 256;
/// Poll interval, and so the maximum delay of an event.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Queue length for a slow reader; then the reader waits for this host.
const WAITING_MAX: usize = 64;

/// A change of a VM or a cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Change {
    /// A VM exists when the stream begins, has appeared, or has changed: starting, running, rebooted, with a
    /// full disk.
    Vm(Vm),
    /// A VM has ended.
    VmEnded {
        /// Name of the VM.
        name: String,
    },
    /// A cell exists when the stream begins, has appeared, or has changed.
    Cell(Cell),
    /// A cell is no longer in the cluster.
    CellGone {
        /// Number of the cell.
        number: u16,
    },
}

/// VMs and cells at a moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HostState {
    vms: BTreeMap<String, Vm>,
    cells: BTreeMap<u16, Cell>,
}

impl HostState {
    /// Creates the state from VMs and cells.
    pub fn new(vms: impl IntoIterator<Item = Vm>, cells: impl IntoIterator<Item = Cell>) -> Self {
        Self {
            vms: vms.into_iter().map(|vm| (vm.name.clone(), vm)).collect(),
            cells: cells.into_iter().map(|cell| (cell.number, cell)).collect(),
        }
    }

    /// Returns the changes since `before`.
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

/// Start of a stream of events.
#[derive(Debug, PartialEq)]
enum Begin {
    /// With the whole current state.
    Whole,
    /// After an event that the client has.
    After(Token),
    /// With a gap, because the client's event is unknown, and then the whole current state.
    Lost,
}

impl Begin {
    /// Parses the header of a reconnecting client (HTML Standard, section 9.2, "Last-Event-ID").
    fn of(headers: &HeaderMap) -> Self {
        match headers.get(LAST_EVENT_ID) {
            None => Self::Whole,
            Some(id) if id.is_empty() => Self::Whole,
            Some(id) => id
                .to_str()
                .ok()
                .and_then(|id| id.parse().ok())
                .map_or(Self::Lost, Self::After),
        }
    }
}

/// Streams every current VM and cell, and then each change; also each event of the journal, with its token as
/// `id`. A client that reconnects with `Last-Event-ID` receives the events of the journal since then, and
/// only later changes of VMs and cells.
#[utoipa::path(get, path = "/v1/events", params(
    ("Last-Event-ID" = Option<String>, Header,
        description = "The `id` of the last event that the client has.")),
    responses((status = 200, content_type = "text/event-stream", body = Change, description =
        "A `data:` line of JSON for each. Those of the journal have the type `journal` and an `id`."),
        (status = 429, body = Problem, description = "The user has as many streams as one user may have.")))]
pub(crate) async fn events(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let slot = context.streams.take(caller)?;
    let begin = Begin::of(&headers);
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    // Ends when the client disconnects.
    tokio::spawn(async move {
        let _ = stream(begin, sender).await;
        drop(slot);
    });
    Ok(Sse::new(ReceiverStream::new(receiver)).keep_alive(KeepAlive::default()))
}

/// Next events to send, and the reader that continues.
type Batch = (Vec<Event>, Option<Reader>);

async fn stream(
    begin: Begin,
    sender: Sender<Result<Event, Infallible>>,
) -> Result<(), SendError<Result<Event, Infallible>>> {
    let (mut reader, mut known) = (None, HostState::default());
    if let Begin::After(token) = begin {
        // The client has the current state, or receives it from the journal.
        let Ok(after) = blocking(move || Ok(Reader::after(journal()?, token))).await else {
            // The client reconnects with the same token.
            return Ok(());
        };
        reader = Some(after);
        known = blocking(host_state).await.unwrap_or_default();
    } else if begin == Begin::Lost {
        let why = "the Last-Event-ID is none of this journal".to_owned();
        let gap = serde_json::json!({ "event": "gap", "why": why });
        sender.send(Ok(journal_event(&gap))).await?;
    }
    let mut is_first = true;
    while !sender.is_closed() {
        // Reads the journal first, so that its position precedes the observed state. A failed read is
        // repeated.
        let taken = reader.take();
        let (events, next) = blocking(move || read(taken)).await.unwrap_or_default();
        reader = next;
        for event in events {
            sender.send(Ok(event)).await?;
        }
        if let Ok(now) = blocking(host_state).await {
            for change in now.changes(&known) {
                let mut event = Event::default().json_data(&change).unwrap_or_default();
                if let (true, Some(token)) = (is_first, reader.as_ref().and_then(Reader::token)) {
                    // A client that disconnects during the first burst misses nothing when it reconnects.
                    event = event.id(token.to_string());
                }
                sender.send(Ok(event)).await?;
            }
            known = now;
            is_first = false;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

fn host_state() -> Result<HostState, Problem> {
    Ok(HostState::new(records()?.iter().map(Vm::from), cells()?))
}

fn journal() -> Result<Journal, Problem> {
    Journal::open().map_err(Problem::internal)
}

/// Returns the journal's new events. Without a reader there are none, and the new reader starts after them.
fn read(reader: Option<Reader>) -> Result<Batch, Problem> {
    let Some(mut reader) = reader else {
        let reader = Reader::from_end(journal()?).map_err(Problem::internal)?;
        return Ok((Vec::new(), Some(reader)));
    };
    let mut events = Vec::new();
    // A failed read is repeated at the next poll.
    while events.len() < BATCH_MAX
        && let Ok(Some(entry)) = reader.next_entry()
    {
        events.push(journal_event(&Value::Object(entry.event)).id(entry.token.to_string()));
    }
    Ok((events, Some(reader)))
}

fn journal_event(event: &Value) -> Event {
    let event = Event::default().event(JOURNAL_TYPE).json_data(event);
    event.unwrap_or_default()
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
    fn stream_begins_behind_the_clients_last_event_if_there_is_such_a_place() {
        let begin = |id: Option<&str>| {
            let header = id.map(|id| (LAST_EVENT_ID.parse().unwrap(), id.parse().unwrap()));
            Begin::of(&header.into_iter().collect())
        };
        assert_eq!(begin(None), Begin::Whole);
        assert_eq!(begin(Some("")), Begin::Whole);
        assert_eq!(begin(Some("1f-2-300")), Begin::After("1f-2-300".parse().unwrap()));
        assert_eq!(begin(Some("7")), Begin::Lost);
    }

    #[test]
    fn only_changes_are_reported() {
        let before = HostState::new([vm("a", 1), vm("b", 1), vm("c", 1)], []);
        let after = HostState::new([vm("b", 1), vm("c", 2), vm("d", 1)], []);
        let changes = after.changes(&before);
        let ended = Change::VmEnded { name: "a".to_owned() };
        assert_eq!(changes, [ended, Change::Vm(vm("c", 2)), Change::Vm(vm("d", 1))]);
        assert!(after.changes(&after).is_empty());
    }
}
