//! Monotonic time, and CPU time of a thread.

use nix::time::{ClockId, clock_gettime};

/// Returns the monotonic time, nanoseconds since an arbitrary moment.
pub fn now_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock")
}

/// Returns the CPU time of a thread of this process, nanoseconds; `None` if the thread is gone.
pub fn ran_ns(thread: libc::pid_t) -> Option<u64> {
    // The kernel's encoding of a thread's clock: `CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED`.
    const OF_A_THREAD: i32 = 4 | 2;
    nanoseconds(ClockId::from_raw(!thread << 3 | OF_A_THREAD))
}

fn nanoseconds(clock: ClockId) -> Option<u64> {
    let time = clock_gettime(clock).ok()?;
    Some(time.tv_sec().cast_unsigned() * 1_000_000_000 + time.tv_nsec().cast_unsigned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn cpu_time_of_a_blocked_thread_does_not_advance() {
        let (number, number_came) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            number.send(nix::unistd::gettid().as_raw()).unwrap();
            may_go_on.recv().unwrap();
            let before = now_ns();
            while now_ns() - before < 20_000_000 {}
            number.send(0).unwrap();
            may_go_on.recv().unwrap();
        });
        let number = number_came.recv().unwrap();
        // On a busy machine the thread blocks a while after its message.
        let mut pauses = std::iter::repeat_with(|| {
            let before = ran_ns(number).unwrap();
            std::thread::sleep(Duration::from_millis(20));
            (before, ran_ns(number).unwrap())
        });
        let (ran, _) = pauses
            .by_ref()
            .take(500)
            .find(|(before, after)| before == after)
            .expect("the thread's CPU time stands still");
        go_on.send(()).unwrap();
        number_came.recv().unwrap();
        assert!(ran_ns(number).unwrap() - ran > 1_000_000);
        go_on.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(ran_ns(number), None);
    }
}
