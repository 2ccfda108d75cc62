//! Which cells of several hosts live: agreed on by an etcd.
//!
//! A cell that starts enters itself under a life that no cell has had, and keeps the entry by a lease. Who finds that
//! another host's cell has fallen silent removes that cell's entry, if it is still of this life; and whose entry is gone is
//! dead: all others see it there, and the cell itself, if it runs after all, starts anew. So of two that lose sight of each
//! other exactly one dies. While etcd does not answer nobody dies and nobody joins, and VMs run on.
//!
//! What is asked of etcd and what follows is decided in [`member`]; here it is asked.

mod etcd;
pub mod member;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use config::cluster::Site;
use protocol::CellId;

use etcd::{Etcd, Lease, Put};
use member::{Answer, Joining, Member, Progress, Question};

/// Where all is kept.
const PREFIX: &str = "/mirrorball/cells/";
/// The last life of each cell.
const LIVES: &str = "/mirrorball/lives/";
/// How long an entry outlasts its cell's last word to etcd, at least; three times as long as a cell may be silent.
const LEASE_SECONDS_MIN: u64 = 5;
/// Minimum interval between two reads of the members.
pub const LOOK: Duration = Duration::from_millis(100);
/// Number of reads of the members in the silence that a cell is allowed.
const LOOKS_IN_SILENCE: u64 = 20;

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
    lease_seconds: u64,
    look: Duration,
    /// Who this is.
    pub me: CellId,
    /// Who else lives.
    pub members: Members,
}

impl Membership {
    /// Enters a cell; waits for as long as etcd does not answer.
    pub fn join(site: &Site, number: u16) -> Self {
        let etcd = Etcd::new(&site.etcd);
        let lease_seconds = lease_seconds(site.silence_ms);
        let mut joining = Joining::new(number);
        let mut told = false;
        loop {
            let answer = ask(&etcd, joining.question(), lease_seconds);
            if let Err(error) = &answer
                && !std::mem::replace(&mut told, true)
            {
                eprintln!("cell {number}: waits for membership: {error}");
            }
            match joining.answered(answer.ok()) {
                Progress::GoesOn => {}
                Progress::Waits => std::thread::sleep(LOOK),
                Progress::In(me, lease, members) => {
                    return Self {
                        etcd,
                        lease,
                        lease_seconds,
                        look: look(site.silence_ms),
                        me,
                        members,
                    };
                }
            }
        }
    }

    /// Keeps the entry, removes those of `suspects`, and tells `news`, until the other end of `suspects` is dropped.
    pub fn run(self, suspects: &Receiver<CellId>, mut news: impl FnMut(News)) {
        let mut member = Member::new(self.me, self.lease, &self.members);
        let mut begun = Instant::now();
        loop {
            match suspects.recv_timeout(self.look) {
                Ok(cell) => member.suspect(cell),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            member.begin_round(begun.elapsed());
            begun = Instant::now();
            while let Some(question) = member.question() {
                let answer = ask(&self.etcd, question, self.lease_seconds);
                member.answered(answer.ok()).into_iter().for_each(&mut news);
            }
        }
    }
}

/// How long an entry outlasts its cell's last word to etcd.
pub fn lease_seconds(silence_ms: u64) -> u64 {
    LEASE_SECONDS_MIN.max(3 * silence_ms / 1000)
}

/// Interval between two reads of the members. Each costs etcd a linearizable read, and more of them detect no death sooner
/// where a long silence is allowed.
pub fn look(silence_ms: u64) -> Duration {
    LOOK.max(Duration::from_millis(silence_ms / LOOKS_IN_SILENCE))
}

fn ask(etcd: &Etcd, question: Question<Lease>, lease_seconds: u64) -> io::Result<Answer<Lease>> {
    Ok(match question {
        Question::LastLife(number) => {
            let last = etcd.get(&format!("{LIVES}{number}"))?;
            Answer::LastLife(
                last.as_deref()
                    .map(str::parse)
                    .transpose()
                    .map_err(io::Error::other)?,
            )
        }
        Question::Lease => Answer::Lease(etcd.lease(lease_seconds)?),
        Question::Enter { me, last, lease } => {
            let counter = format!("{LIVES}{}", me.number);
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
            Answer::Entered(etcd.put_if(&counter, last.as_deref(), &puts)?)
        }
        Question::Members => Answer::Members(members(etcd)?),
        Question::Keep(lease) => {
            // One that has ended is seen in the list.
            etcd.keep(&lease)?;
            Answer::Done
        }
        Question::Remove { cell, accuser } => {
            let ((key, life), (own_key, own_life)) = (entry(cell), entry(accuser));
            etcd.remove_if((&key, &life), (&own_key, &own_life))?;
            Answer::Done
        }
    })
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
