//! Another host whose counter this process simulates, and real rounds with it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Instant;

use shard_api::relation::Ratio;

use super::super::leader::Clock;
use super::super::{answer_by, relate};
use super::*;

const SOON: Duration = Duration::from_secs(20);

/// This host's counter is assumed to have so many ticks in a millisecond, whatever its frequency is.
const KHZ: u32 = 2_000_000;

/// A counter that runs faster by so many parts of a million, and was so far ahead at `start`.
fn made_up(start: u64, ahead: u64, ppm: u64) -> impl Fn() -> u64 + Copy {
    move || {
        let now = counter();
        let gained = u128::from(now.wrapping_sub(start)) * u128::from(ppm) / 1_000_000;
        now.wrapping_add(ahead).wrapping_add(gained as u64)
    }
}

/// The home, and a shard on a host with that counter.
fn two(their: impl Fn() -> u64 + Send + 'static) -> (Clocks, Vec<(usize, Rounds)>) {
    let (near, far) = UnixStream::pair().unwrap();
    std::thread::spawn(|| answer_by(far, their));
    let mut rounds = Rounds::new(near.into());
    let relation = relate(&mut rounds).unwrap();
    let there = Clock::there(relation, 0, Ratio::ONE, KHZ);
    let leader = Leader::new(KHZ, vec![Clock::new(0, None), there]);
    (Clocks::new(leader), vec![(1, rounds)])
}

fn offsets(clocks: &Clocks) -> Vec<u64> {
    let state = clocks.lock();
    state.leader.clocks().iter().map(|clock| clock.offset).collect()
}

/// The home is slower by 400 parts of a million, and follows.
#[test]
fn home_that_falls_behind_is_ordered_to_step_until_the_clocks_end() {
    let their = made_up(counter(), 1 << 40, 400);
    let (clocks, rounds) = two(their);
    let first = offsets(&clocks);
    let (told, orders) = mpsc::channel();
    let keeper = ClockKeeper::start(clocks.clone(), rounds, move |step| _ = told.send(step)).unwrap();
    assert!(
        orders.recv_timeout(Duration::from_millis(50)).is_err(),
        "no shard takes orders yet"
    );
    keeper.begin();
    let mut offsets = first.clone();
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        let step = orders.recv_timeout(SOON).expect("it falls behind");
        let offset = &mut offsets[step.shard];
        assert!((step.offset.wrapping_sub(*offset) as i64) > 0, "time goes on");
        *offset = step.offset;
    }
    // By the error of the estimate the other may step, too, where the machine is busy.
    let gone = |shard: usize| offsets[shard].wrapping_sub(first[shard]);
    assert!(gone(0) > gone(1), "the other leads");
    // The two readings differ by the reported error at most.
    let (here, there) = (
        counter().wrapping_add(offsets[0]),
        their().wrapping_add(offsets[1]),
    );
    let known = clocks.lock().leader.lead(1, counter());
    let apart = there.wrapping_sub(here) as i64;
    let drifted = u64::from(KHZ) * 20;
    assert!(apart.unsigned_abs() <= known.error + drifted, "{apart} {known:?}");
    assert!(
        known.rate_ppb.abs_diff(400_000) <= known.rate_error_ppb,
        "{known:?}"
    );
    let status = clocks.status();
    assert!(status[0]["steps"]["ordered"].as_u64().unwrap() > 0, "{status:?}");
    assert_eq!(status[1]["refused"], 0);
    drop(keeper);
    while orders.try_recv().is_ok() {}
    assert_eq!(
        orders.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
}

/// Invalid readings of another host move no clock, and are reported with a reason.
#[test]
fn garbage_is_refused_with_a_reason() {
    let is_mad = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mad = is_mad.clone();
    let (clocks, rounds) = two(move || match mad.load(std::sync::atomic::Ordering::SeqCst) {
        false => counter(),
        true => counter().wrapping_mul(0x9E37_79B9_7F4A_7C15),
    });
    let first = offsets(&clocks);
    is_mad.store(true, std::sync::atomic::Ordering::SeqCst);
    let (told, orders) = mpsc::channel();
    let keeper = ClockKeeper::start(clocks.clone(), rounds, move |step| _ = told.send(step)).unwrap();
    keeper.begin();
    let deadline = Instant::now() + SOON;
    while clocks.status()[1]["refused"].as_u64().unwrap() < 40 {
        assert!(Instant::now() < deadline, "{:?}", clocks.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(offsets(&clocks), first);
    assert!(orders.try_recv().is_err());
    let why = clocks.status()[1]["why"].clone();
    assert!(
        why.as_str().unwrap().contains("ms off what it must read"),
        "{why}"
    );
    drop(keeper);
}

/// A host that ends its rounds is reported; the others go on.
#[test]
fn host_that_does_not_answer_any_more_is_reported() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let answering = std::thread::spawn(move || -> io::Result<()> {
        for _ in 0..500 {
            let mut echo = [0; 8];
            far.read_exact(&mut echo)?;
            far.write_all(&echo)?;
            far.write_all(&counter().to_le_bytes())?;
        }
        Ok(())
    });
    let mut rounds = Rounds::new(near.into());
    let relation = relate(&mut rounds).unwrap();
    let there = Clock::there(relation, 0, Ratio::ONE, KHZ);
    let clocks = Clocks::new(Leader::new(KHZ, vec![Clock::new(0, None), there]));
    let keeper = ClockKeeper::start(clocks.clone(), vec![(1, rounds)], |_| ()).unwrap();
    keeper.begin();
    answering.join().unwrap().unwrap();
    let deadline = Instant::now() + SOON;
    while clocks.status()[1]["lost"].is_null() {
        assert!(Instant::now() < deadline, "{:?}", clocks.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(keeper);
}
