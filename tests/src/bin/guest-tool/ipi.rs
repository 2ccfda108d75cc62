//! Interrupts between CPUs, through Linux's uses of them: barriers, signals, wake-ups. Sent and received ones
//! are counted; where one is missing, a thread waits forever, and the alarm ends the program.

use std::cell::Cell;
use std::fs;
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Fault;
use crate::pinned::{alarm_after, pin, sleep_while, wake};

const CPUS_MAX: usize = 16;
/// Time that a test may take beyond its given time.
const SPARE_S: u64 = 240;

/// Signals by receiver and sender.
static RECEIVED: [[AtomicU32; CPUS_MAX]; CPUS_MAX] =
    [const { [const { AtomicU32::new(0) }; CPUS_MAX] }; CPUS_MAX];

thread_local! {
    /// The CPU of this thread.
    static ME: Cell<usize> = const { Cell::new(0) };
}

/// Runs for `seconds` in all, on CPUs 0 to `cpus` - 1 at the same time: barriers, then signals, then bytes in
/// pipes.
pub fn storm(cpus: usize, seconds: u64) -> Result<String, Fault> {
    if !(2..=CPUS_MAX).contains(&cpus) {
        return Err(format!("{cpus} CPUs instead of 2 to {CPUS_MAX}").into());
    }
    alarm_after(seconds + SPARE_S);
    let part = Duration::from_millis(seconds * 1000 / 3);
    let before = function_calls()?;
    let barriers = barriers(cpus, part)?;
    let (signals_sent, signals) = signals(cpus, part)?;
    let (bytes_sent, bytes) = pipes(cpus, part)?;
    let calls = function_calls()? - before;
    let said = format!(
        "barriers={barriers} signals_sent={signals_sent} signals={signals} bytes_sent={bytes_sent} \
         bytes={bytes} function_calls={calls}"
    );
    if signals != signals_sent || bytes != bytes_sent {
        return Err(said.into());
    }
    Ok(said)
}

/// Runs `work` on each CPU at the same time; returns the results by CPU.
fn on_each<T: Send>(cpus: usize, work: impl Fn(usize) -> Result<T, String> + Sync) -> Result<Vec<T>, String> {
    thread::scope(|scope| {
        let start = |cpu| {
            let work = &work;
            scope.spawn(move || {
                pin(cpu)?;
                work(cpu)
            })
        };
        let threads: Vec<_> = (0..cpus).map(start).collect();
        let ends = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
        ends.collect()
    })
}

/// Each thread interrupts every CPU that runs a thread of this process, and waits until all have seen it.
fn barriers(cpus: usize, time: Duration) -> Result<u64, String> {
    let call = |command: i32| {
        // SAFETY: takes two numbers; it orders memory and does nothing else.
        let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0) };
        if result == 0 {
            return Ok(());
        }
        Err(format!("membarrier: {}", std::io::Error::last_os_error()))
    };
    call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)?;
    let counts = on_each(cpus, |_| {
        let (start, mut count) = (Instant::now(), 0);
        while start.elapsed() < time {
            call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)?;
            count += 1;
        }
        Ok(count)
    })?;
    Ok(counts.iter().sum())
}

extern "C" fn received(signal: libc::c_int) {
    let from = (signal - libc::SIGRTMIN()) as usize;
    let counter = &RECEIVED[ME.get()][from];
    counter.fetch_add(1, Ordering::AcqRel);
    wake(counter);
}

/// Each thread sends a signal to every other one, and the next when all have come. Returns the numbers of
/// sent and received signals.
fn signals(cpus: usize, time: Duration) -> Result<(u64, u64), String> {
    for number in 0..cpus {
        // SAFETY: all zeroes is a valid sigaction; the handler touches atomics and makes a system call.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = received as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(libc::SIGRTMIN() + number as i32, &action, std::ptr::null_mut())
        };
        if result != 0 {
            return Err(format!("sigaction: {}", std::io::Error::last_os_error()));
        }
    }
    let threads: Vec<AtomicU32> = (0..cpus).map(|_| AtomicU32::new(0)).collect();
    let done = AtomicU32::new(0);
    let sent: u64 = on_each(cpus, |me| {
        ME.set(me);
        threads[me].store(nix::unistd::gettid().as_raw() as u32, Ordering::Release);
        wake(&threads[me]);
        for thread in &threads {
            sleep_until(thread, |number| number != 0);
        }
        let (start, mut rounds) = (Instant::now(), 0);
        while start.elapsed() < time {
            rounds += 1;
            for (to, thread) in threads.iter().enumerate().filter(|(to, _)| *to != me) {
                let target = thread.load(Ordering::Acquire) as i32;
                let signal = libc::SIGRTMIN() + me as i32;
                // SAFETY: a signal with a handler, to a thread of this process.
                let result = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), target, signal) };
                if result != 0 {
                    return Err(format!("tgkill to CPU {to}: {}", std::io::Error::last_os_error()));
                }
            }
            for to in (0..cpus).filter(|to| *to != me) {
                sleep_until(&RECEIVED[to][me], |count| count >= rounds);
            }
        }
        // Others may still send to this one.
        done.fetch_add(1, Ordering::AcqRel);
        wake(&done);
        sleep_until(&done, |count| count as usize == cpus);
        Ok(u64::from(rounds) * (cpus as u64 - 1))
    })?
    .iter()
    .sum();
    let received = RECEIVED
        .iter()
        .flatten()
        .map(|count| u64::from(count.load(Ordering::Acquire)));
    Ok((sent, received.sum()))
}

fn sleep_until(word: &AtomicU32, ready: impl Fn(u32) -> bool) {
    loop {
        let value = word.load(Ordering::Acquire);
        if ready(value) {
            return;
        }
        sleep_while(word, value);
    }
}

/// Passes a number back and forth between each two CPUs, which grows by one each way. Returns the numbers of
/// sent and received bytes.
fn pipes(cpus: usize, time: Duration) -> Result<(u64, u64), String> {
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let pairs = (0..cpus).flat_map(|a| (a + 1..cpus).map(move |b| (a, b)));
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for (a, b) in pairs {
            let open = || pipe().map_err(|error| format!("pipe: {error}"));
            let ((from_a, to_b), (from_b, to_a)) = (open()?, open()?);
            let (sent, received) = (&sent, &received);
            threads.push(scope.spawn(move || {
                pin(a)?;
                let start = Instant::now();
                let end = Ends {
                    from: from_b,
                    to: to_b,
                };
                end.play(0, || start.elapsed() < time, sent, received)
            }));
            threads.push(scope.spawn(move || {
                pin(b)?;
                let end = Ends {
                    from: from_a,
                    to: to_a,
                };
                end.play(1, || true, sent, received)
            }));
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })?;
    Ok((sent.into_inner(), received.into_inner()))
}

/// A thread's ends of the two pipes of a pair.
struct Ends {
    from: PipeReader,
    to: PipeWriter,
}

impl Ends {
    /// The first thread (0) sends 0, the other answers 1, and so on while `goes_on`; then the pipe is closed,
    /// which ends the other.
    fn play(
        mut self,
        first: u64,
        goes_on: impl Fn() -> bool,
        sent: &AtomicU64,
        received: &AtomicU64,
    ) -> Result<(), String> {
        let mut next = first;
        loop {
            if next > 0 {
                let mut bytes = [0; 8];
                match self.from.read(&mut bytes) {
                    Ok(8) => {}
                    Ok(0) => return Ok(()),
                    other => return Err(format!("{other:?} from a pipe of numbers")),
                }
                received.fetch_add(8, Ordering::Relaxed);
                let came = u64::from_le_bytes(bytes);
                if came + 1 != next {
                    return Err(format!("{came} came instead of {}", next - 1));
                }
            }
            if !goes_on() {
                return Ok(());
            }
            let writing = self.to.write_all(&next.to_le_bytes());
            writing.map_err(|error| format!("to a pipe: {error}"))?;
            sent.fetch_add(8, Ordering::Relaxed);
            next += 2;
        }
    }
}

/// Number of interrupts for function calls that all CPUs have had.
fn function_calls() -> Result<u64, Fault> {
    let text = fs::read_to_string("/proc/interrupts")?;
    let line = text
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("CAL:"));
    let counts = line.ok_or("no CAL in /proc/interrupts")?.split_whitespace();
    Ok(counts.map_while(|word| word.parse::<u64>().ok()).sum())
}
