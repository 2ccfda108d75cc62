//! A session: node 0 sends jobs to the nodes and receives their results.

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dsm::{End, Meter, Node, NodeError, Settings, Shape, prepare_server_thread};
use serde::{Deserialize, Serialize};

use crate::baseline::{self, WaitMode};
use crate::rendezvous::{self, Joined, join};
use crate::stream::{self, Peer, StreamError, StreamOptions};
use crate::work::{self, Job, JobResult};

/// Longest time of a job.
const JOB_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for which a node may take to confirm the end of the session.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Serialize, Deserialize)]
enum Command {
    Run(Job),
    Close,
}

/// Reason why a session can't start, or a job fails.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// A stream failed.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// This node failed.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// A node sends no result.
    #[error("{0} gives no answer ({1})")]
    Silent(String, #[source] io::Error),
    /// A job failed.
    #[error("{0}: {1}")]
    Failed(String, String),
}

/// A session at node 0.
#[derive(Debug)]
pub struct Session {
    node: Node,
    others: Vec<OwnedFd>,
    names: Vec<String>,
    closing: Arc<AtomicBool>,
}

impl Session {
    /// Joins the session as node 0. `lost` is called once if a node is lost. It is to end the process, as
    /// threads that wait for that node's pages wait forever.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn coordinate<'a>(
        shape: Shape,
        peers: &[Peer],
        options: impl Into<StreamOptions<'a>>,
        settings: &Settings,
        lost: fn(&End),
    ) -> Result<Self, SessionError> {
        let joined = rendezvous::coordinate(shape, peers, options.into())?;
        let (node, others, names, closing) = start(joined, settings, lost)?;
        Ok(Self {
            node,
            others,
            names,
            closing,
        })
    }

    /// Returns this node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Runs a job on each of the first nodes at the same time, this one included.
    ///
    /// # Errors
    /// If a node sends no result, or its job fails.
    pub fn run_all(&self, jobs: &[Job]) -> Result<Vec<JobResult>, SessionError> {
        for (index, job) in jobs.iter().enumerate().skip(1) {
            self.ask(index, Command::Run(job.clone()))?;
        }
        let mut answers = Vec::new();
        if let Some(job) = jobs.first() {
            answers.push(self.checked(0, work::run(&self.node, job))?);
        }
        for index in 1..jobs.len() {
            answers.push(self.answer(index)?);
        }
        Ok(answers)
    }

    /// Runs a job on one node.
    ///
    /// # Errors
    /// As [`Session::run_all`].
    pub fn run_on(&self, index: u16, job: Job) -> Result<JobResult, SessionError> {
        let index = usize::from(index);
        if index == 0 {
            return self.checked(0, work::run(&self.node, &job));
        }
        self.ask(index, Command::Run(job))?;
        self.answer(index)
    }

    /// Returns the sum of all nodes' counters.
    ///
    /// # Errors
    /// As [`Session::run_all`].
    pub fn meter(&self) -> Result<Meter, SessionError> {
        let mut sum = Meter::default();
        for answer in self.run_all(&vec![Job::Meter; self.others.len() + 1])? {
            if let JobResult::Meter(meter) = answer {
                sum += meter;
            }
        }
        Ok(sum)
    }

    /// Measures `count` requests for a page on the stream to node 1, which does nothing else. Returns the
    /// time of each, nanoseconds.
    ///
    /// # Errors
    /// As [`Session::run_all`].
    pub fn requests_ns(&self, count: u32, waits: WaitMode, realtime: bool) -> Result<Vec<u64>, SessionError> {
        let job = Job::ServeRequests {
            count,
            waits,
            realtime,
        };
        self.ask(1, Command::Run(job))?;
        let stream = &self.others[0];
        let times = at_server_priority(realtime, || baseline::requests_ns(stream, count, waits));
        let times = times.map_err(|error| SessionError::Silent(self.names[1].clone(), error))?;
        self.answer(1)?;
        Ok(times)
    }

    /// Ends the session and the memory on all nodes.
    pub fn close(self) {
        self.closing.store(true, Ordering::SeqCst);
        for index in 1..=self.others.len() {
            // A node that is gone needs no command.
            let _ = self.ask(index, Command::Close);
        }
        for stream in &self.others {
            let _: io::Result<JobResult> = stream::receive(stream, Some(CLOSE_TIMEOUT));
        }
    }

    fn ask(&self, index: usize, order: Command) -> Result<(), SessionError> {
        stream::send(&self.others[index - 1], &order)
            .map_err(|error| SessionError::Silent(self.names[index].clone(), error))
    }

    fn answer(&self, index: usize) -> Result<JobResult, SessionError> {
        let answer = stream::receive(&self.others[index - 1], Some(JOB_TIMEOUT))
            .map_err(|error| SessionError::Silent(self.names[index].clone(), error))?;
        self.checked(index, answer)
    }

    fn checked(&self, index: usize, answer: JobResult) -> Result<JobResult, SessionError> {
        match answer {
            JobResult::Failed(why) => Err(SessionError::Failed(self.names[index].clone(), why)),
            answer => Ok(answer),
        }
    }
}

/// Joins a session as another node and serves it until node 0 ends it. `lost` as in [`Session::coordinate`];
/// `met` is called with the started node, for its notes.
///
/// # Errors
/// [`SessionError`].
pub fn serve<'a>(
    listener: &TcpListener,
    options: impl Into<StreamOptions<'a>>,
    settings: &Settings,
    lost: fn(&End),
    met: fn(&Node),
) -> Result<(), SessionError> {
    let (node, commands, _, closing) = start(join(listener, options.into())?, settings, lost)?;
    met(&node);
    let gone = |error| SessionError::Silent("node 0".into(), error);
    loop {
        let answer = match stream::receive(&commands[0], None).map_err(gone)? {
            Command::Close => break,
            Command::Run(Job::ServeRequests {
                count,
                waits,
                realtime,
            }) => {
                match at_server_priority(realtime, || baseline::answer_requests(&commands[0], count, waits)) {
                    Ok(()) => JobResult::Done,
                    Err(error) => return Err(gone(error)),
                }
            }
            Command::Run(job) => work::run(&node, &job),
        };
        stream::send(&commands[0], &answer).map_err(gone)?;
    }
    closing.store(true, Ordering::SeqCst);
    let _ = stream::send(&commands[0], &JobResult::Done);
    // The page servers serve until node 0 has received all confirmations.
    let _: io::Result<Command> = stream::receive(&commands[0], Some(CLOSE_TIMEOUT));
    Ok(())
}

type Started = (Node, Vec<OwnedFd>, Vec<String>, Arc<AtomicBool>);

fn start(joined: Joined, settings: &Settings, lost: fn(&End)) -> Result<Started, SessionError> {
    let closing = Arc::new(AtomicBool::new(false));
    let is_closing = closing.clone();
    let hook = Box::new(move |end: &End| {
        if *end != End::Closed && !is_closing.load(Ordering::SeqCst) {
            lost(end);
        }
    });
    let Joined {
        me,
        shape,
        links,
        commands,
        names,
    } = joined;
    let node = Node::start(me, shape, links, names.clone(), settings, hook)?;
    Ok((node, commands, names, closing))
}

/// Runs `work` on a thread with the priority of page servers.
fn at_server_priority<T: Send>(realtime: bool, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            prepare_server_thread(None, realtime);
            work()
        });
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
