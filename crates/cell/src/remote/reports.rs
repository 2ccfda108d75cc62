//! The reports of a part's shard on their way to the home, and the answers that the home waits for.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use locks::IgnorePoison;
use shard_api::launch::{Answer, Order, OrderId, Report};

use super::part::is_awaited;
use super::protocol::FromPart;
use crate::cluster::link::stream::write_to;
use crate::shard_process::ShardProcess;

/// The numbers of the orders whose answers the home waits for, in one boot.
#[derive(Default)]
pub struct AwaitedAnswers(Mutex<Vec<OrderId>>);

impl AwaitedAnswers {
    /// Sends an order to the shard. The watcher finds its number, however soon the answer is there.
    ///
    /// # Errors
    /// If the shard is gone, or reads no orders.
    pub fn order(&self, shard: &ShardProcess, order: &Order) -> io::Result<()> {
        let mut awaited = self.0.lock().ignore_poison();
        let id = shard.order(order)?;
        if is_awaited(order) {
            awaited.push(id);
        }
        Ok(())
    }

    /// Whether the home waits for the answer to this order, which has come now.
    fn take(&self, to: OrderId) -> bool {
        let mut awaited = self.0.lock().ignore_poison();
        let at = awaited.iter().position(|id| *id == to);
        at.map(|at| awaited.remove(at)).is_some()
    }
}

/// Passes a shard's reports to the home, and at last its end. Calls `gone` when the process has ended, before
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
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;

    use shard_api::launch::NumberedOrder;

    use super::super::connections::receive;
    use super::*;

    #[test]
    fn home_gets_the_answers_to_pauses_and_resumes_and_no_other_confirmation() {
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
        assert!(matches!(next(), FromPart::Gone(_)));
    }
}
