//! Use of the host's CPUs, from `/proc/stat` (proc(5)).

use bench::Outcome;

/// Ticks of some CPUs so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ticks {
    busy: u64,
    all: u64,
}

impl Ticks {
    /// Those of these CPUs now.
    pub fn now(cpus: &[usize]) -> Outcome<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat")?, cpus)
    }

    /// Adds up lines like `cpu0 10 0 5 80 5 0 0 0 0 0`: user, nice, system, idle, waiting for I/O, and more.
    /// The last two are in the first two already.
    fn parse(text: &str, cpus: &[usize]) -> Outcome<Self> {
        let mut ticks = Self { busy: 0, all: 0 };
        for cpu in cpus {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(&format!("cpu{cpu} ")))
                .ok_or_else(|| format!("/proc/stat has no CPU {cpu}"))?;
            let numbers: Result<Vec<u64>, _> = line.split_whitespace().take(8).map(str::parse).collect();
            let numbers = numbers?;
            let [_, _, _, idle, waiting, ..] = numbers[..] else {
                return Err(format!("/proc/stat: cpu{cpu} {line}").into());
            };
            let all: u64 = numbers.iter().sum();
            ticks.all += all;
            ticks.busy += all.saturating_sub(idle + waiting);
        }
        Ok(ticks)
    }

    /// Thousandths of the time between `before` and this in which the CPUs were used.
    pub fn permille_since(self, before: Self) -> Outcome<f64> {
        let all = self.all.saturating_sub(before.all);
        let busy = self.busy.saturating_sub(before.busy);
        match all {
            0 => Err("no time has passed".into()),
            all => Ok(busy as f64 * 1000.0 / all as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_that_of_the_named_cpus_without_idle_time() {
        let before = "cpu  1 1 1 1 1 1 1 1 1 1\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 10 0 0 0 0 0 0 0 10 0\n";
        let after = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 0 0 0 70 30 0 0 0 0 0\ncpu1 60 5 10 25 0 5 5 0 60 0\n";
        let between = |cpus: &[usize]| {
            let [before, after] = [before, after].map(|text| Ticks::parse(text, cpus).unwrap());
            after.permille_since(before).unwrap()
        };
        assert_eq!(between(&[0]), 0.0);
        assert_eq!(between(&[1]), 750.0);
        assert_eq!(between(&[0, 1]), 375.0);
        assert!(Ticks::parse(after, &[2]).is_err());
        let ticks = Ticks::parse(after, &[1]).unwrap();
        assert!(ticks.permille_since(ticks).is_err());
    }
}
