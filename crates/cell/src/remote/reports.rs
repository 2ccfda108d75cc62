//! The reports of a part's shard on their way to the home, and the answers that the home waits for.

use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use locks::IgnorePoison;
use shard_api::launch::{Answer, Order, OrderId, Report};

use super::part::is_awaited;
use super::protocol::FromPart;
use crate::cluster::link::stream::write_to;
use crate::shard_process::ShardProcess;

/// The orders whose answers the home or this monitor waits for, in one boot.
#[derive(Default)]
pub struct AwaitedAnswers {
    /// Numbers of the home's orders.
    of_home: Mutex<Vec<OrderId>>,
    /// This monitor's order for files of statistics, and the receiver of them.
    statistics: Mutex<Option<(OrderId, SyncSender<Vec<File>>)>>,
}

impl AwaitedAnswers {
    /// Sends an order to the shard. The watcher finds its number, however soon the answer is there.
    ///
    /// # Errors
    /// If the shard is gone, or reads no orders.
    pub fn order(&self, shard: &ShardProcess, order: &Order) -> io::Result<()> {
        let mut awaited = self.of_home.lock().ignore_poison();
        let id = shard.order(order)?;
        if is_awaited(order) {
            awaited.push(id);
        }
        Ok(())
    }

    /// Whether the home waits for the answer to this order, which has come now.
    fn take(&self, to: OrderId) -> bool {
        let mut awaited = self.of_home.lock().ignore_poison();
        let at = awaited.iter().position(|id| *id == to);
        at.map(|at| awaited.remove(at)).is_some()
    }

    /// The files of statistics of the shard's vCPUs, beginning with `first`, which may be of any type. None
    /// if the shard passes none within `limit`. One caller at a time waits for them.
    pub fn statistics(&self, shard: &ShardProcess, first: u8, limit: Duration) -> Vec<File> {
        let (told, passed) = sync_channel(1);
        {
            // Under the lock, so that the watcher finds the order, however soon the answer is there.
            let mut statistics = self.statistics.lock().ignore_poison();
            let sent = shard.order(&Order::VcpuStatistics { first });
            *statistics = sent.ok().map(|id| (id, told));
        }
        let files = passed.recv_timeout(limit).unwrap_or_default();
        *self.statistics.lock().ignore_poison() = None;
        files
    }

    /// Passes the files of an answer on, of which a refusal has none. Returns whether this monitor waited for
    /// that answer.
    fn pass(&self, to: OrderId, files: Vec<File>) -> bool {
        let mut statistics = self.statistics.lock().ignore_poison();
        let Some((_, told)) = statistics.take_if(|(id, _)| *id == to) else {
            return false;
        };
        // One that does not wait any more needs none.
        let _ = told.try_send(files);
        true
    }

    /// The shard has ended: no answer follows.
    fn end(&self) {
        *self.statistics.lock().ignore_poison() = None;
    }
}

/// Passes a shard's reports to the home, and finally its end. Calls `gone` when the process has ended, before
/// the home knows it.
///
/// # Errors
/// If this process has no threads or descriptors left.
pub fn watch(
    process: Arc<ShardProcess>,
    home: Arc<Mutex<UnixStream>>,
    awaited: Arc<AwaitedAnswers>,
    gone: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let mut reports = process.link.reports()?;
    std::thread::Builder::new().name("shard".into()).spawn(move || {
        let (mut has_ended, mut unlike) = (false, None);
        while let Some(report) = reports.next_report() {
            if let Report::Unlike { versions } = &report {
                unlike = Some(process.program.unlike(*versions).to_string());
                break;
            }
            let files = reports.take_files();
            if let Report::Answer { to, .. } = &report
                && awaited.pass(*to, files)
            {
                continue;
            }
            let said = match report {
                Report::Answer { to, answer } if awaited.take(to) => FromPart::Answered(answer),
                // The home waits for no confirmation of its other orders.
                Report::Answer {
                    answer: Answer::Done, ..
                } => continue,
                report => FromPart::Report(report),
            };
            has_ended |= matches!(said, FromPart::Report(Report::Ended(_)));
            if tell(&home, &said).is_err() || has_ended {
                break;
            }
        }
        awaited.end();
        // A broken shard sends no further reports.
        let why = if has_ended { process.wait() } else { process.kill() };
        let why = unlike.unwrap_or(why);
        drop(process);
        // This side is first, so that the next boot finds it done.
        gone();
        let _ = tell(&home, &FromPart::Gone(why));
    })?;
    Ok(())
}

/// Sends a message to the home.
///
/// # Errors
/// If the connection has ended.
pub fn tell(home: &Mutex<UnixStream>, said: &FromPart) -> io::Result<()> {
    write_to(home, &serde_json::to_vec(said)?)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;
    use std::os::fd::AsFd;
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;

    use shard_api::launch::NumberedOrder;

    use super::super::connections::receive;
    use super::*;

    #[test]
    fn files_of_statistics_are_for_this_monitor_and_the_home_gets_no_answer() {
        let limit = Duration::from_secs(20);
        let (process, shard) = ShardProcess::of(Command::new("sleep").arg("100"));
        let process = Arc::new(process);
        let (near, far) = UnixStream::pair().unwrap();
        let (home, awaited) = (Arc::new(Mutex::new(near)), Arc::<AwaitedAnswers>::default());
        let (told, gone) = mpsc::channel();
        watch(process.clone(), home, awaited.clone(), move || {
            told.send(()).unwrap()
        })
        .unwrap();
        let asked = |answer: Answer, files: usize| {
            std::thread::scope(|scope| {
                let passed = scope.spawn(|| awaited.statistics(&process, 3, limit).len());
                let (message, _) = shard.receive_with_files().unwrap();
                let NumberedOrder { id: to, order } = serde_json::from_slice(&message).unwrap();
                assert_eq!(order, Order::VcpuStatistics { first: 3 });
                let file = File::open("/dev/null").unwrap();
                let files = vec![file.as_fd(); files];
                shard.send(&Report::Answer { to, answer }, &files).unwrap();
                passed.join().unwrap()
            })
        };
        assert_eq!(asked(Answer::VcpuStatistics { files: 2 }, 2), 2);
        let why = "an older release".to_owned();
        assert_eq!(asked(Answer::Refused { why }, 0), 0);
        // A shard that ends passes none, and its caller does not wait for the limit.
        let begun = std::time::Instant::now();
        std::thread::scope(|scope| {
            let passed = scope.spawn(|| awaited.statistics(&process, 0, limit).len());
            shard.receive_with_files().unwrap();
            drop(shard);
            assert_eq!(passed.join().unwrap(), 0);
        });
        assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
        gone.recv_timeout(limit).unwrap();
        let told = receive::<FromPart>(&mut BufReader::new(far)).unwrap();
        assert!(matches!(told, FromPart::Gone(_)), "{told:?}");
    }

    #[test]
    fn home_gets_the_answers_to_the_orders_that_are_awaited_and_no_other_confirmation() {
        let (process, shard) = ShardProcess::of(Command::new("sleep").arg("100"));
        let process = Arc::new(process);
        let (near, far) = UnixStream::pair().unwrap();
        let (home, awaited) = (Arc::new(Mutex::new(near)), Arc::<AwaitedAnswers>::default());
        let (told, gone) = mpsc::channel();
        watch(process.clone(), home, awaited.clone(), move || {
            told.send(()).unwrap()
        })
        .unwrap();
        let refused = Answer::Refused {
            why: "its vCPUs do not leave the guest".to_owned(),
        };
        for (order, answer) in [
            (Order::Step { offset: 1 }, Answer::Done),
            (Order::Pause, refused.clone()),
            (Order::Step { offset: 2 }, Answer::Done),
            (Order::Resume, Answer::Done),
            (Order::StopVcpu { vcpu: 1, for_ms: 5 }, Answer::Done),
        ] {
            awaited.order(&process, &order).unwrap();
            let (message, _) = shard.receive_with_files().unwrap();
            let NumberedOrder { id: to, order: got } = serde_json::from_slice(&message).unwrap();
            assert_eq!(got, order);
            shard.send(&Report::Answer { to, answer }, &[]).unwrap();
        }
        drop(shard);
        gone.recv_timeout(Duration::from_secs(20)).unwrap();
        let mut far = BufReader::new(far);
        let mut next = || receive::<FromPart>(&mut far).unwrap();
        assert!(matches!(next(), FromPart::Answered(answer) if answer == refused));
        assert!(matches!(next(), FromPart::Answered(Answer::Done)));
        assert!(matches!(next(), FromPart::Answered(Answer::Done)), "of the stop");
        assert!(matches!(next(), FromPart::Gone(_)));
    }
}
