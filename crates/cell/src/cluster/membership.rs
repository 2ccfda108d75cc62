//! Which cells of several hosts live: agreed on by an etcd.
//!
//! A cell that starts enters itself under a life that no cell has had, and keeps the entry by a lease. Who finds that
//! another host's cell has fallen silent removes that cell's entry, if it is still of this life; and whose entry is gone is
//! dead: all others see it there, and the cell itself, if it runs after all, starts anew. So of two that lose sight of each
//! other exactly one dies. While etcd does not answer nobody dies and nobody joins, and VMs run on.

mod etcd;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use config::cluster::Site;
use protocol::CellId;

use etcd::{Etcd, Lease, Put};

/// Where all is kept.
const PREFIX: &str = "/mirrorball/cells/";
/// The last life of each cell.
const LIVES: &str = "/mirrorball/lives/";
/// How long an entry outlasts its cell's last word to etcd, at least; three times as long as a cell may be silent.
const LEASE_SECONDS_MIN: u64 = 5;
/// Between two words.
const KEEP: Duration = Duration::from_secs(1);
/// Between two looks at who lives.
const LOOK: Duration = Duration::from_millis(100);

/// The cells that live, and their lives.
pub type Members = BTreeMap<u16, u32>;

/// What has changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum News {
    /// This life of a cell is over.
    Over(CellId),
    /// This cell's own.
    Outcast,
}

/// A cell's place among the members.
#[derive(Debug)]
pub struct Membership {
    etcd: Etcd,
    lease: Lease,
    /// Who this is.
    pub me: CellId,
    /// Who else lives.
    pub members: Members,
}

impl Membership {
    /// Enters a cell; waits for as long as etcd does not answer.
    pub fn join(site: &Site, number: u16) -> Self {
        let etcd = Etcd::new(&site.etcd);
        let lease_seconds = LEASE_SECONDS_MIN.max(3 * site.silence_ms / 1000);
        let mut told = false;
        loop {
            match Self::try_join(&etcd, number, lease_seconds) {
                Ok(Some((lease, me, members))) => {
                    return Self {
                        etcd,
                        lease,
                        me,
                        members,
                    };
                }
                // Somebody else was quicker.
                Ok(None) => {}
                Err(error) => {
                    if !told {
                        eprintln!("cell {number}: waits for membership: {error}");
                    }
                    told = true;
                    std::thread::sleep(LOOK);
                }
            }
        }
    }

    fn try_join(
        etcd: &Etcd,
        number: u16,
        lease_seconds: u64,
    ) -> io::Result<Option<(Lease, CellId, Members)>> {
        let counter = format!("{LIVES}{number}");
        let last = etcd.get(&counter)?;
        let life = last
            .as_deref()
            .map_or(Ok(0), str::parse::<u32>)
            .map_err(io::Error::other)?
            + 1;
        let lease = etcd.lease(lease_seconds)?;
        let me = CellId { number, life };
        let (key, value) = entry(me);
        let puts = [
            Put {
                key: &counter,
                value: &value,
                lease: None,
            },
            Put {
                key: &key,
                value: &value,
                lease: Some(&lease),
            },
        ];
        if !etcd.put_if(&counter, last.as_deref(), &puts)? {
            return Ok(None);
        }
        let members = members(etcd)?;
        Ok(Some((lease, me, members)))
    }

    /// Keeps the entry, removes those of `suspects`, and tells `news`, until the other end of `suspects` is dropped.
    pub fn run(self, suspects: &Receiver<CellId>, mut news: impl FnMut(News)) {
        let Self {
            etcd,
            lease,
            me,
            members: mut known,
        } = self;
        let mut pending: Vec<CellId> = Vec::new();
        let mut kept = Instant::now();
        loop {
            match suspects.recv_timeout(LOOK) {
                Ok(cell) => pending.push(cell),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if kept.elapsed() >= KEEP && etcd.keep(&lease).is_ok() {
                kept = Instant::now();
            }
            let (own_key, own_life) = entry(me);
            pending.retain(|cell| {
                let (key, life) = entry(*cell);
                // Who is dead itself accuses nobody: it was cut off, and they weren't.
                etcd.remove_if((&key, &life), (&own_key, &own_life)).is_err()
            });
            if let Ok(now) = members(&etcd) {
                for changed in changes(me, &known, &now) {
                    news(changed);
                }
                known = now;
            }
        }
    }
}

/// A cell's key and value.
fn entry(cell: CellId) -> (String, String) {
    (format!("{PREFIX}{}", cell.number), cell.life.to_string())
}

fn members(etcd: &Etcd) -> io::Result<Members> {
    let entries = etcd.list(PREFIX)?.into_iter();
    let parsed = entries.map(|(key, value)| Some((key.parse().ok()?, value.parse().ok()?)));
    // What is none of this program's is left alone.
    Ok(parsed.flatten().collect())
}

/// What of `before` is over `now`.
fn changes(me: CellId, before: &Members, now: &Members) -> Vec<News> {
    let over = before
        .iter()
        .filter(|(number, life)| now.get(number) != Some(life));
    let other = over.filter(|(number, _)| **number != me.number);
    let mut news: Vec<News> = other
        .map(|(number, life)| {
            News::Over(CellId {
                number: *number,
                life: *life,
            })
        })
        .collect();
    if now.get(&me.number) != Some(&me.life) {
        news.push(News::Outcast);
    }
    news
}
