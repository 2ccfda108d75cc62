mod model;

use super::*;

const ONE_SHOT: u32 = 0x0_0040;
const PERIODIC: u32 = 0x2_0040;
const DEADLINE: u32 = 0x4_0040;
const DIVIDE_BY_1: u32 = 0b1011;

/// Divides by 1, a tick is 10 of the TSC.
fn timer(lvt: u32) -> Timer {
    let mut timer = Timer::new(10);
    timer.set_divide(DIVIDE_BY_1, 0);
    assert!(Timer::is_lvt(lvt));
    timer.set_lvt(lvt);
    timer
}

/// SDM 11.5.4, figure of the divide configuration register
#[test]
fn divisor_is_a_power_of_two_up_to_128() {
    let divisors = [2, 4, 8, 16, 32, 64, 128, 1];
    for (bits, divisor) in (0_u32..).zip(divisors) {
        let mut timer = timer(ONE_SHOT);
        timer.set_divide(bits & 3 | (bits & 4) << 1, 0);
        timer.set_initial_count(5, 100);
        assert_eq!(timer.due(), Some(100 + 5 * 10 * divisor));
    }
    assert!(!Timer::is_divide(0b100));
    assert!(!Timer::is_divide(0b10000));
}

/// SDM 11.5.4: counts down from the initial count to 0, once.
#[test]
fn one_shot_timer_expires_once() {
    let mut timer = timer(ONE_SHOT);
    timer.set_initial_count(5, 100);
    assert_eq!(timer.current_count(100), 5);
    assert_eq!(timer.current_count(109), 5);
    assert_eq!(timer.current_count(110), 4);
    assert_eq!(timer.current_count(149), 1);
    assert_eq!(timer.current_count(150), 0);
    assert_eq!(timer.expire(149), None);
    assert_eq!(timer.expire(150), Some(0x40));
    assert_eq!(
        (timer.due(), timer.expire(u64::MAX), timer.current_count(151)),
        (None, None, 0)
    );
    assert_eq!(timer.initial_count(), 5);
}

/// SDM 11.5.4: the timer counts by its own clock, whatever the guest writes to the TSC; a deadline is a value
/// of that clock.
#[test]
fn tsc_step_keeps_the_count_and_approaches_a_deadline() {
    for by in [1000_u64, 90_u64.wrapping_neg()] {
        let mut counting = timer(ONE_SHOT);
        counting.set_initial_count(5, 100);
        counting.counter_moved(by);
        let now = 110_u64.wrapping_add(by);
        assert_eq!(counting.current_count(now), 4);
        assert_eq!(counting.due(), Some(now + 40));
        let mut armed = timer(DEADLINE);
        armed.set_deadline(500);
        armed.counter_moved(by);
        assert_eq!(armed.due(), Some(500));
    }
}

/// SDM 11.5.4: the count is reloaded when it reaches 0; a new initial count restarts it, and 0 stops it.
#[test]
fn periodic_timer_reloads() {
    let mut timer = timer(PERIODIC);
    timer.set_initial_count(5, 100);
    assert_eq!(timer.expire(150), Some(0x40));
    assert_eq!(
        (timer.due(), timer.current_count(150), timer.current_count(160)),
        (Some(200), 5, 4)
    );
    timer.set_initial_count(7, 160);
    assert_eq!(timer.due(), Some(230));
    timer.set_initial_count(0, 170);
    assert_eq!((timer.due(), timer.current_count(170)), (None, 0));
}

/// A late call raises one interrupt, and the next is at a multiple of the period.
#[test]
fn late_periodic_timer_sends_one_interrupt() {
    let mut timer = timer(PERIODIC);
    timer.set_initial_count(5, 100);
    assert_eq!(timer.current_count(1_000_015), 4, "late, but on the beat");
    assert_eq!(timer.expire(1_000_015), Some(0x40));
    assert_eq!(timer.expire(1_000_015), None);
    assert_eq!(timer.due(), Some(1_000_050));
    assert_eq!(timer.expire(1_000_050), Some(0x40));
    assert_eq!(timer.due(), Some(1_000_100));
}

/// SDM 11.5.4.1: "a transition between TSC-deadline mode and other modes also disarms the timer"; one between
/// the other two does not.
#[test]
fn entering_or_leaving_deadline_mode_disarms() {
    let mut timer = timer(ONE_SHOT);
    timer.set_initial_count(5, 100);
    timer.set_lvt(PERIODIC);
    assert_eq!(timer.due(), Some(150));
    timer.set_lvt(DEADLINE);
    assert_eq!(
        (timer.due(), timer.initial_count(), timer.deadline(0)),
        (None, 0, 0)
    );
    timer.set_deadline(500);
    timer.set_lvt(DEADLINE | 1);
    assert_eq!(timer.due(), Some(500), "the same mode");
    timer.set_lvt(PERIODIC);
    assert_eq!((timer.due(), timer.current_count(0)), (None, 0));
}

/// SDM 11.5.4.1: the registers of the other mode read 0, and writing them changes nothing.
#[test]
fn registers_of_the_other_timer_mode_read_zero() {
    let mut timer = timer(DEADLINE);
    timer.set_deadline(500);
    timer.set_initial_count(5, 100);
    timer.set_divide(0, 100);
    assert_eq!(
        (timer.due(), timer.initial_count(), timer.current_count(100)),
        (Some(500), 0, 0)
    );
    timer.set_lvt(ONE_SHOT);
    timer.set_initial_count(5, 100);
    timer.set_deadline(7);
    assert_eq!((timer.due(), timer.deadline(0)), (Some(200), 0));
}

/// SDM 11.5.4.1: 0 disarms; a deadline in the past is due at once, and the register is 0 from then on.
#[test]
fn deadline_expires_once() {
    let mut timer = timer(DEADLINE);
    timer.set_deadline(500);
    assert_eq!((timer.deadline(499), timer.deadline(500)), (500, 0));
    timer.set_deadline(0);
    assert_eq!(timer.due(), None);
    timer.set_deadline(3);
    assert_eq!(
        (timer.due(), timer.expire(1000), timer.expire(1000)),
        (Some(3), Some(0x40), None)
    );
    timer.set_deadline(u64::MAX);
    assert_eq!((timer.expire(u64::MAX - 1), timer.deadline(5)), (None, u64::MAX));
}

/// SDM 11.5.4: changing the divisor keeps the count.
#[test]
fn new_divisor_keeps_the_current_count() {
    let mut timer = timer(ONE_SHOT);
    timer.set_initial_count(5, 100);
    timer.set_divide(0, 125);
    assert_eq!((timer.current_count(125), timer.due()), (3, Some(125 + 3 * 20)));
}

/// Times beyond the TSC's range never expire.
#[test]
fn count_beyond_the_tsc_range_never_expires() {
    let mut timer = Timer::new(u32::MAX);
    timer.set_divide(0b1010, 0);
    timer.set_lvt(PERIODIC);
    timer.set_initial_count(u32::MAX, 0);
    assert_eq!((timer.due(), timer.expire(u64::MAX)), (None, None));
    let mut timer = self::timer(PERIODIC);
    timer.set_initial_count(2, u64::MAX - 15);
    assert_eq!((timer.due(), timer.expire(u64::MAX)), (None, None));
    timer.set_initial_count(1, u64::MAX - 15);
    assert_eq!(
        (timer.expire(u64::MAX), timer.expire(u64::MAX)),
        (Some(0x40), None)
    );
}

#[test]
fn zero_tick_length_counts_as_one() {
    assert_eq!(Timer::new(0), Timer::new(1));
}

#[test]
fn unreachable_states_are_rejected() {
    let spoils: [fn(&mut Timer); 7] = [
        |timer| timer.tsc_per_tick = 0,
        |timer| timer.lvt |= 0x6_0000,
        |timer| timer.lvt |= LVT_STATUS,
        |timer| timer.lvt |= 0x100,
        |timer| timer.divide = 0b100,
        |timer| timer.initial_count = 1,
        |timer| timer.due = Some(0),
    ];
    let sane = timer(DEADLINE);
    assert!(sane.is_sane());
    for (number, spoil) in spoils.iter().enumerate() {
        let mut timer = sane.clone();
        spoil(&mut timer);
        assert!(!timer.is_sane(), "{number}");
    }
    let mut timer = timer(PERIODIC);
    timer.due = Some(5);
    assert!(!timer.is_sane());
}
