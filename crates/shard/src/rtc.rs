//! The real-time clock of an MC146818 (Motorola, 1984). It returns the host's time, for guests without a
//! paravirtual clock. It has no alarm, interrupts or memory; the guest can't set it.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::bus::BusDevice;

/// Number of ports: index and data.
pub const RTC_PORTS: u64 = 2;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const STATUS_A: u8 = 0x0A;
const STATUS_B: u8 = 0x0B;
const STATUS_D: u8 = 0x0D;
/// Index of the century on PCs.
const CENTURY: u8 = 0x32;
/// The usual time base and rate; no update is in progress.
const TIME_BASE: u8 = 0x26;
/// Binary numbers, 24-hour format.
const BINARY_24_HOURS: u8 = 0x06;
const POWER_IS_GOOD: u8 = 0x80;

/// Clock registers of a MC146818. They hold no time: each read takes the host's.
#[derive(Debug, Default)]
pub struct Rtc {
    index: AtomicU8,
}

/// A moment in UTC.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Moment {
    year: u64,
    month: u8,
    day: u8,
    day_of_week: u8,
    seconds_of_day: u32,
}

impl Moment {
    /// Converts seconds since 1970 by H. Hinnant's days-to-civil algorithm: years begin in March, so that a
    /// leap day is a year's last day.
    fn of(unix_s: u64) -> Self {
        let days = unix_s / 86_400;
        // Day 0 of the algorithm's calendar is 0000-03-01.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        Self {
            year,
            month: month as u8,
            day: day as u8,
            // 1970-01-01 was a Thursday; Sunday is 1.
            day_of_week: ((days + 4) % 7 + 1) as u8,
            seconds_of_day: (unix_s % 86_400) as u32,
        }
    }

    fn register(self, index: u8) -> u8 {
        match index {
            SECONDS => (self.seconds_of_day % 60) as u8,
            MINUTES => (self.seconds_of_day / 60 % 60) as u8,
            HOURS => (self.seconds_of_day / 3600) as u8,
            DAY_OF_WEEK => self.day_of_week,
            DAY => self.day,
            MONTH => self.month,
            YEAR => (self.year % 100) as u8,
            CENTURY => (self.year / 100) as u8,
            STATUS_A => TIME_BASE,
            STATUS_B => BINARY_24_HOURS,
            STATUS_D => POWER_IS_GOOD,
            _ => 0,
        }
    }
}

impl BusDevice for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let (1, [byte]) = (offset, data) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            *byte = Moment::of(now.as_secs()).register(self.index.load(Ordering::Relaxed));
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, &[byte]) = (offset, data) {
            // The upper bit masks NMIs.
            self.index.store(byte & 0x7F, Ordering::Relaxed);
        }
    }
}

/// Ports of an absent timer chip. Its counters read as zero, so that a kernel does not wait for them.
pub struct NoTimer;

/// Ports of the 8254.
pub const TIMER_PORTS: u64 = 4;

impl BusDevice for NoTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn is(unix_s: u64, (year, month, day): (u64, u8, u8), day_of_week: u8, time: [u8; 3]) {
        let moment = Moment::of(unix_s);
        assert_eq!((moment.year, moment.month, moment.day), (year, month, day));
        assert_eq!(moment.day_of_week, day_of_week);
        assert_eq!(
            [HOURS, MINUTES, SECONDS].map(|index| moment.register(index)),
            time
        );
    }

    #[test]
    fn moments_match_the_calendar() {
        is(0, (1970, 1, 1), 5, [0, 0, 0]);
        is(951_782_399, (2000, 2, 28), 2, [23, 59, 59]);
        is(951_782_400, (2000, 2, 29), 3, [0, 0, 0]);
        is(951_868_800, (2000, 3, 1), 4, [0, 0, 0]);
        is(4_107_542_399, (2100, 2, 28), 1, [23, 59, 59]);
        is(4_107_542_400, (2100, 3, 1), 2, [0, 0, 0]);
        is(1_795_564_800 + 3_661, (2026, 11, 25), 4, [1, 1, 1]);
        assert_eq!(Moment::of(4_107_542_400).register(CENTURY), 21);
        assert_eq!(Moment::of(4_107_542_400).register(YEAR), 0);
    }

    #[test]
    fn guest_reads_the_clock_through_an_index() {
        let rtc = Rtc::default();
        rtc.write(0, &[0x80 | STATUS_D]);
        let mut data = [0xFF];
        rtc.read(1, &mut data);
        assert_eq!(data, [POWER_IS_GOOD]);
        rtc.write(1, &[0x12]);
        rtc.write(0, &[STATUS_B]);
        rtc.read(1, &mut data);
        assert_eq!(data, [BINARY_24_HOURS]);
    }

    #[test]
    fn each_index_selects_its_part_of_the_date() {
        let moment = Moment::of(1_795_564_800);
        let read = |indices: [u8; 4]| indices.map(|index| moment.register(index));
        assert_eq!(read([CENTURY, YEAR, MONTH, DAY]), [20, 26, 11, 25]);
        assert_eq!(moment.register(DAY_OF_WEEK), 4);
        assert_eq!(moment.register(STATUS_A), TIME_BASE);
        for absent in [0x01, 0x03, 0x0C, 0x0E, 0x7F] {
            assert_eq!(moment.register(absent), 0, "{absent:#x}");
        }
    }

    #[test]
    fn months_end_as_in_the_calendar() {
        let lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut unix_s = 1_798_761_600;
        for (month, length) in (1..).zip(lengths) {
            for day in 1..=length {
                let moment = Moment::of(unix_s);
                assert_eq!((moment.year, moment.month, moment.day), (2027, month, day));
                unix_s += 86_400;
            }
        }
        assert_eq!(Moment::of(unix_s).year, 2028);
    }

    #[test]
    fn accesses_of_other_ports_and_sizes_change_nothing() {
        let rtc = Rtc::default();
        rtc.write(0, &[STATUS_D]);
        rtc.write(0, &[STATUS_B, STATUS_B]);
        rtc.write(1, &[STATUS_B]);
        let mut byte = [0];
        rtc.read(1, &mut byte);
        assert_eq!(byte, [POWER_IS_GOOD]);
        let (mut index, mut wide) = ([0xFF], [0xFF; 2]);
        rtc.read(0, &mut index);
        rtc.read(1, &mut wide);
        assert_eq!((index, wide), ([0xFF], [0xFF; 2]));
    }

    #[test]
    fn absent_timer_reads_as_zero() {
        let mut data = [0xFF; 2];
        NoTimer.write(0, &[0x34]);
        NoTimer.read(0, &mut data);
        assert_eq!(data, [0, 0]);
    }
}
