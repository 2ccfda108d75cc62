//! Membership of cells on several hosts: agreed on by an etcd.
//!
//! A cell that starts enters itself under an incarnation that no cell has had, and keeps the entry by a
//! lease. A cell that finds another host's cell silent removes that cell's entry, if it is still of this
//! incarnation. A cell whose entry is gone is dead: all others see that in etcd, and the cell itself, if it
//! still runs, starts anew. So of two cells that lose their link exactly one dies. While etcd does
//! not answer, no cell dies and none joins, and VMs run on. When etcd has lost the entries, cells that have
//! their leases and links write them back.
//!
//! [`member`] decides the requests to etcd and their consequences; this module sends them.

mod etcd;
pub mod member;
pub mod server;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use config::cluster::{OnLost, Site};
use protocol::CellId;

use etcd::{Etcd, Lease, Put};
pub use member::Records;
use member::{EtcdAnswer, EtcdRequest, Joining, Member, Progress, RETIRED};
use urpc::tls::KeyFiles;

/// Prefix of all keys.
const PREFIX: &str = "/mirrorball/";
/// Prefix of the entries, below [`PREFIX`].
const CELLS: &str = "cells/";
/// Prefix of the last incarnation of each cell.
const LIVES: &str = "lives/";
/// Prefix of the last incarnation of each cell that another cell has removed.
const REMOVED: &str = "removed/";
/// Minimum time for which an entry outlasts its cell's last request to etcd, in seconds; otherwise it is
/// three times as long as a cell may be silent.
const LEASE_SECONDS_MIN: u64 = 5;
/// Minimum interval between two reads of the members.
pub const POLL_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Time limit for the host of a lost cell to end its VMs once the lease would have ended. Its guard checks
/// every 100 ms, and a VM that does not end by order is killed after 1 s.
pub const LAPSE_MARGIN: Duration = Duration::from_secs(5);
/// Number of reads of the members in the silence that a cell is allowed.
const POLLS_IN_SILENCE: u64 = 20;

/// The live cells, and their incarnations.
pub type Members = BTreeMap<u16, u32>;

/// A change of the membership.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MembershipEvent {
    /// This incarnation of a cell is dead.
    Died(CellId),
    /// This cell itself has been removed.
    Evicted,
    /// A cell has been no member for so long that its host has ended its VMs, where hosts do so
    /// ([`super::lost`]).
    Lapsed(u16),
}

/// A cell's place among the members.
#[derive(Debug)]
pub struct Membership {
    etcd: Etcd,
    lease: Lease,
    lease_seconds: u64,
    look: Duration,
    /// Number and incarnation of this cell.
    pub me: CellId,
    /// The other live cells.
    pub members: Members,
    /// The last incarnation of each cell.
    pub lives: Members,
    lapse: Option<Duration>,
    /// The last time at which this incarnation was a member for certain: the time of the request that etcd
    /// confirmed.
    pub since: Instant,
}

impl Membership {
    /// Enters a cell, in an incarnation after `floor`. Blocks while etcd does not answer, unless the cell
    /// `is_to_end`; returns none then.
    ///
    /// # Errors
    /// If the host's keys can't be read.
    pub fn join(
        site: &Site,
        number: u16,
        floor: u32,
        is_to_end: impl Fn() -> bool,
    ) -> io::Result<Option<Self>> {
        let etcd = Etcd::new(&site.etcd, &KeyFiles::of(&site.keys, &site.here))?;
        let lease_seconds = lease_seconds(site.silence_ms);
        let mut joining = Joining::new(number, floor);
        let mut told = false;
        loop {
            let asked = Instant::now();
            let answer = ask(&etcd, joining.request(), lease_seconds);
            if let Err(error) = &answer
                && !std::mem::replace(&mut told, true)
            {
                tracing::warn!(%error, "the cell waits for membership");
            }
            match joining.answered(answer.ok()) {
                Progress::GoesOn => {}
                Progress::Waits if is_to_end() => return Ok(None),
                Progress::Waits => std::thread::sleep(POLL_INTERVAL_MIN),
                Progress::In(me, lease, records) => {
                    return Ok(Some(Self {
                        etcd,
                        lease,
                        lease_seconds,
                        look: poll_interval(site.silence_ms),
                        me,
                        members: records.members,
                        lives: records.lives,
                        lapse: lapse(site),
                        since: asked,
                    }));
                }
            }
        }
    }

    /// Keeps the entry, removes those of `suspects`, and reports `news`, until the other end of `suspects` is
    /// dropped. `confirmed` receives each time at which this incarnation was a member for certain.
    pub fn run(
        self,
        suspects: &Receiver<CellId>,
        mut news: impl FnMut(MembershipEvent),
        mut confirmed: impl FnMut(Instant),
    ) {
        confirmed(self.since);
        let mut member = Member::new(self.me, self.lease, &self.members).with_lapse(self.lapse);
        let mut begun = Instant::now();
        loop {
            match suspects.recv_timeout(self.look) {
                Ok(cell) => member.suspect(cell),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            member.begin_round(begun.elapsed());
            begun = Instant::now();
            while let Some(question) = member.request() {
                let asked = Instant::now();
                let answer = ask(&self.etcd, question, self.lease_seconds);
                if let Ok(EtcdAnswer::Records(records)) = &answer
                    && records.members.get(&self.me.number) == Some(&self.me.life)
                {
                    confirmed(asked);
                }
                member.answered(answer.ok()).into_iter().for_each(&mut news);
            }
        }
    }
}

/// The members, as etcd has them now.
///
/// # Errors
/// If the host's keys can't be read, or etcd does not answer.
pub fn members(site: &Site) -> io::Result<Members> {
    Ok(present(site)?.members)
}

/// All records of etcd.
///
/// # Errors
/// As [`members`].
pub fn present(site: &Site) -> io::Result<Records> {
    records(&Etcd::new(&site.etcd, &KeyFiles::of(&site.keys, &site.here))?)
}

/// Ends the membership of cells whose host leaves the cluster permanently: they get no further incarnation.
/// So such a cell accuses no other when links to it are refused.
///
/// # Errors
/// If the host's keys can't be read, or etcd does not answer.
pub fn retire(site: &Site, cells: &[u16]) -> io::Result<()> {
    let etcd = Etcd::new(&site.etcd, &KeyFiles::of(&site.keys, &site.here))?;
    let value = RETIRED.to_string();
    for cell in cells {
        let (life, mark) = (at(LIVES, *cell), at(REMOVED, *cell));
        let puts = [&life, &mark].map(|key| Put {
            key,
            value: &value,
            lease: None,
        });
        etcd.replace(&at(CELLS, *cell), &puts)?;
    }
    Ok(())
}

/// Time after which nothing of a cell that is no member runs, by the cluster's file; none where VMs of lost
/// hosts run on.
pub fn lapse(site: &Site) -> Option<Duration> {
    let stops = site.on_lost == OnLost::Stop;
    stops.then(|| Duration::from_secs(lease_seconds(site.silence_ms)) + LAPSE_MARGIN)
}

/// Time for which an entry outlasts its cell's last request to etcd, in seconds.
pub const fn lease_seconds(silence_ms: u64) -> u64 {
    let least = 3 * silence_ms / 1000;
    if least > LEASE_SECONDS_MIN {
        least
    } else {
        LEASE_SECONDS_MIN
    }
}

/// Interval between two reads of the members. Each costs etcd a linearizable read, and more of them detect no
/// death sooner where a long silence is allowed.
pub fn poll_interval(silence_ms: u64) -> Duration {
    POLL_INTERVAL_MIN.max(Duration::from_millis(silence_ms / POLLS_IN_SILENCE))
}

fn ask(etcd: &Etcd, question: EtcdRequest<Lease>, lease_seconds: u64) -> io::Result<EtcdAnswer<Lease>> {
    Ok(match question {
        EtcdRequest::LastLife(number) => {
            let last = etcd.get(&at(LIVES, number))?;
            EtcdAnswer::LastLife(
                last.as_deref()
                    .map(str::parse)
                    .transpose()
                    .map_err(io::Error::other)?,
            )
        }
        EtcdRequest::Lease => EtcdAnswer::Lease(etcd.lease(lease_seconds)?),
        EtcdRequest::Enter { me, last, lease } => {
            let counter = at(LIVES, me.number);
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
            let last = last.map(|life| life.to_string());
            EtcdAnswer::Entered(etcd.put_if(&counter, last.as_deref(), &puts)?)
        }
        EtcdRequest::Records => EtcdAnswer::Records(records(etcd)?),
        EtcdRequest::Keep(lease) => EtcdAnswer::Kept(etcd.keep(&lease)?),
        EtcdRequest::Remove { cell, accuser } => {
            let ((key, life), (own_key, own_life)) = (entry(cell), entry(accuser));
            let mark_key = at(REMOVED, cell.number);
            let mark = Put {
                key: &mark_key,
                value: &life,
                lease: None,
            };
            let own = (&own_key[..], &own_life[..]);
            if !etcd.remove_if((&key, &life), own, &mark)? {
                let counter = at(LIVES, cell.number);
                etcd.mark_if_absent(&key, &[own, (&counter, &life)], &mark)?;
            }
            EtcdAnswer::Done
        }
        EtcdRequest::Restore {
            me,
            lease,
            lives,
            revision,
        } => {
            let lives = lives.into_iter().map(|(number, life)| {
                let key = at(LIVES, number);
                (key, life.to_string(), None)
            });
            let (key, life) = entry(me);
            let writes: Vec<(String, String, Option<&Lease>)> =
                lives.chain([(key, life, Some(&lease))]).collect();
            let puts: Vec<Put<'_>> = writes
                .iter()
                .map(|(key, value, lease)| Put {
                    key,
                    value,
                    lease: *lease,
                })
                .collect();
            EtcdAnswer::Entered(etcd.put_if_unchanged(PREFIX, revision, &puts)?)
        }
    })
}

/// The key of a cell's entry, incarnation or removal.
fn at(what: &str, number: u16) -> String {
    format!("{PREFIX}{what}{number}")
}

/// A cell's key and value.
fn entry(cell: CellId) -> (String, String) {
    (at(CELLS, cell.number), cell.life.to_string())
}

fn records(etcd: &Etcd) -> io::Result<Records> {
    etcd.list(PREFIX).map(read)
}

/// The members, lives and removals in an answer of etcd, for `fuzz/`.
#[cfg(fuzzing)]
pub fn listed(answer: &serde_json::Value) -> io::Result<[Members; 3]> {
    let records = read(etcd::listed(answer, PREFIX)?);
    Ok([records.members, records.lives, records.removed])
}

fn read((all, revision): (BTreeMap<String, String>, u64)) -> Records {
    // Keys that are not this program's are left alone.
    let of = |what: &str| {
        let parsed = all
            .iter()
            .map(|(key, value)| Some((key.strip_prefix(what)?.parse().ok()?, value.parse().ok()?)));
        parsed.flatten().collect()
    };
    Records {
        members: of(CELLS),
        lives: of(LIVES),
        removed: of(REMOVED),
        revision,
    }
}
