//! What changes, as a stream of server-sent events.

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

/// The header of a client that comes back.
const LAST_EVENT_ID: &str = "last-event-id";
/// The type of the journal's events in the stream. Those without a type are as they were before there was a
/// journal.
const JOURNAL_TYPE: &str = "journal";
/// Events of the journal that are read at once.
const BATCH_MAX: usize = 256;
/// How often is looked: an event is that late at most.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Events that wait for a slow reader; then it waits no longer for this host than the host for it.
const WAITING_MAX: usize = 64;

/// What has changed.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Change {
    /// A VM is there, or was when the stream began, or is otherwise than before: starting, running, rebooted,
    /// with a full disk.
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
pub struct HostState {
    vms: BTreeMap<String, Vm>,
    cells: BTreeMap<u16, Cell>,
}

impl HostState {
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

/// Where a stream of events begins.
#[derive(Debug, PartialEq)]
enum Begin {
    /// With everything that there is.
    Whole,
    /// Behind an event that the client has.
    After(Token),
    /// With a gap, since the client's event is none, and then with everything.
    Lost,
}

impl Begin {
    /// By the header that a client sends that comes back (HTML Standard, section 9.2, "Last-Event-ID").
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

/// Tells of every VM and cell that there is, and then of each change; also of each event of the journal, with
/// its token as `id`. A client that comes back with `Last-Event-ID` gets the events of the journal since
/// then, and only what has changed from now on.
#[utoipa::path(get, path = "/v1/events", params(
    ("Last-Event-ID" = Option<String>, Header, description = "The `id` of the last event that the client has.")),
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
    // Ends when nobody listens.
    tokio::spawn(async move {
        let _ = tell(begin, sender).await;
        drop(slot);
    });
    Ok(Sse::new(ReceiverStream::new(receiver)).keep_alive(KeepAlive::default()))
}

/// What is sent next, and how to go on.
type Batch = (Vec<Event>, Option<Reader>);

async fn tell(
    begin: Begin,
    sender: Sender<Result<Event, Infallible>>,
) -> Result<(), SendError<Result<Event, Infallible>>> {
    let (mut reader, mut known) = (None, HostState::default());
    if let Begin::After(token) = begin {
        // What there is now the client knows, or learns from the journal.
        let Ok(after) = blocking(move || Ok(Reader::after(journal()?, token))).await else {
            // The client comes back with the same token.
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
        // The journal first: its place is then before what is seen. What can't be read now is looked at
        // again.
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
                    // A client that breaks off in the first burst misses nothing when it comes back.
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

/// The journal's new events. Without a reader there are none, and the reader begins behind them.
fn read(reader: Option<Reader>) -> Result<Batch, Problem> {
    let Some(mut reader) = reader else {
        let reader = Reader::from_end(journal()?).map_err(Problem::internal)?;
        return Ok((Vec::new(), Some(reader)));
    };
    let mut events = Vec::new();
    // What can't be read now is read the next time.
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
    fn only_what_has_changed_is_told() {
        let before = HostState::new([vm("a", 1), vm("b", 1), vm("c", 1)], []);
        let after = HostState::new([vm("b", 1), vm("c", 2), vm("d", 1)], []);
        let changes = after.changes(&before);
        let ended = Change::VmEnded { name: "a".to_owned() };
        assert_eq!(changes, [ended, Change::Vm(vm("c", 2)), Change::Vm(vm("d", 1))]);
        assert!(after.changes(&after).is_empty());
    }
}
