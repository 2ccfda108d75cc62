//! The table that all cells have (`protocol::agreement`), in two processes: claims of names, and changes of
//! entries.

use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use protocol::CellId;
use protocol::agreement::{Effect, Message, Node};

use super::link::{Link, PAUSE, Waiting, with_other};

const CLAIMS: u64 = 10_000;
const CHANGES: u64 = 20_000;
/// Claims with a pause before each.
const CLAIMS_BLOCKED: u64 = 100;
/// Number of claims or changes in progress, when there are several.
const WINDOW: u64 = 16;

/// Resources of a VM: vCPUs and bytes.
type Share = (u32, u64);
const SHARE: Share = (4, 8 << 30);

/// One cell and its link to the other.
struct Cell {
    node: Node<String, Share>,
    link: Link,
    other: CellId,
}

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

impl Cell {
    /// Begins, and sends the greeting.
    fn start(number: u16, other: u16, link: Link) -> Outcome<Self> {
        let mut cell = Self {
            node: Node::new(id(number)),
            link,
            other: id(other),
        };
        let effects = cell.node.link(cell.other);
        cell.act(effects)?;
        Ok(cell)
    }

    /// Sends the messages among the effects; returns how many of the rest are a claim that won or a change
    /// that all have received.
    fn act(&mut self, effects: Vec<Effect<String, Share>>) -> Outcome<u64> {
        let mut done = 0;
        for effect in effects {
            match effect {
                // There is one other cell, and no relay.
                Effect::Send(_, message) | Effect::Tell(message) | Effect::Reply { message, .. } => {
                    self.link.send(&message)?;
                }
                Effect::Won(_) | Effect::Heard(_) => done += 1,
                Effect::Lost { .. } | Effect::Inherited(_) => {
                    return Err("a claim is lost without a winner".into());
                }
            }
        }
        Ok(done)
    }

    fn take(&mut self, message: Message<String, Share>) -> Outcome<u64> {
        let effects = self.node.take(self.other, message, None);
        self.act(effects)
    }

    /// Receives messages until `count` more are done.
    fn wait(&mut self, count: u64) -> Outcome<()> {
        let mut done = 0;
        while done < count {
            let message = self.link.expect()?;
            done += self.take(message)?;
        }
        Ok(())
    }

    fn claim(&mut self, number: u64) -> Outcome<()> {
        let (_, effects) = self.node.claim(name(number), SHARE);
        self.act(effects).map(|_| ())
    }

    fn change(&mut self, number: u64) -> Outcome<()> {
        let change = self.node.change(&name(0), Some((4, number)));
        let (_, effects) = change.ok_or("the entry is not there")?;
        self.act(effects).map(|_| ())
    }
}

fn name(number: u64) -> String {
    format!("build-server-{number}")
}

/// Measures with another cell that has met this one, and with one name claimed.
fn with_cell(waiting: Waiting, here: impl FnOnce(Cell) -> Outcome<f64> + Send) -> Outcome<f64> {
    with_other("cell", waiting, |link| {
        let mut cell = Cell::start(0, 1, link)?;
        cell.claim(0)?;
        cell.wait(1)?;
        here(cell)
    })
}

/// Runs `count` operations, of which always [`WINDOW`] are in progress.
fn window_full(mut cell: Cell, count: u64, begin: fn(&mut Cell, u64) -> Outcome<()>) -> Outcome<f64> {
    let mut number = 0;
    let mut begin_next = |cell: &mut Cell| {
        number += 1;
        begin(cell, number)
    };
    (0..WINDOW).try_for_each(|_| begin_next(&mut cell))?;
    let measured = per_second(count, || {
        cell.wait(1)?;
        begin_next(&mut cell)
    })?;
    cell.wait(WINDOW)?;
    Ok(measured)
}

pub fn claim() -> Outcome<f64> {
    with_cell(Waiting::Polling, |mut cell| {
        each_ns(CLAIMS, |number| {
            cell.claim(number + 1)?;
            cell.wait(1)
        })
    })
}

pub fn claims() -> Outcome<f64> {
    with_cell(Waiting::Polling, |cell| window_full(cell, CLAIMS, Cell::claim))
}

pub fn claim_blocked() -> Outcome<f64> {
    with_cell(Waiting::AsCells, |mut cell| {
        let mut all = Duration::ZERO;
        for number in 1..=CLAIMS_BLOCKED {
            thread::sleep(PAUSE);
            let start = Instant::now();
            cell.claim(number)?;
            cell.wait(1)?;
            all += start.elapsed();
        }
        Ok(all.as_nanos() as f64 / CLAIMS_BLOCKED as f64)
    })
}

pub fn change() -> Outcome<f64> {
    with_cell(Waiting::Polling, |mut cell| {
        each_ns(CHANGES, |number| {
            cell.change(number)?;
            cell.wait(1)
        })
    })
}

pub fn changes() -> Outcome<f64> {
    with_cell(Waiting::Polling, |cell| window_full(cell, CHANGES, Cell::change))
}

/// Runs the other cell: it votes and sends receipts.
pub fn role(words: &[String]) -> Outcome<()> {
    let mut cell = Cell::start(1, 0, Link::of(words)?)?;
    while let Some(message) = cell.link.receive()? {
        cell.take(message)?;
    }
    Ok(())
}
