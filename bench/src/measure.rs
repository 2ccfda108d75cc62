//! Alternating runs and their medians.

use crate::Outcome;
use crate::vmm::Vmm;

/// The samples of one program.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The name of the program.
    pub name: String,
    /// The samples, in the order taken.
    pub samples: Vec<f64>,
}

impl Measurement {
    /// Names samples.
    pub fn of(name: &str, samples: Vec<f64>) -> Self {
        Self {
            name: name.to_owned(),
            samples,
        }
    }

    /// The middle sample; the mean of the two middle ones of an even number.
    pub fn median(&self) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        if sorted.len() % 2 == 1 {
            sorted[half]
        } else {
            (sorted[half - 1] + sorted[half]) / 2.0
        }
    }

    /// The smallest and the largest sample.
    pub fn range(&self) -> (f64, f64) {
        self.samples
            .iter()
            .fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)))
    }
}

/// The samples of every VMM, in the order taken.
pub type Samples<T> = Vec<(Vmm, Vec<T>)>;

/// Takes `runs` samples of each, A B C A B C ...
pub fn alternate<T>(
    runs: usize,
    vmms: &[Vmm],
    mut sample: impl FnMut(Vmm) -> Outcome<T>,
) -> Outcome<Samples<T>> {
    let mut samples: Samples<T> = vmms.iter().map(|vmm| (*vmm, Vec::new())).collect();
    for _ in 0..runs {
        for (vmm, list) in &mut samples {
            // In emulation a nested guest dies occasionally, under any VMM. The run is repeated then.
            let value = sample(*vmm).or_else(|error| {
                eprintln!("bench: {} failed and is repeated: {error}", vmm.name());
                sample(*vmm)
            })?;
            list.push(value);
        }
    }
    Ok(samples)
}

/// One figure of every sample.
pub fn column<T>(samples: &Samples<T>, figure: impl Fn(&T) -> Outcome<f64>) -> Outcome<Vec<Measurement>> {
    samples
        .iter()
        .map(|(vmm, list)| {
            let figures: Outcome<Vec<f64>> = list.iter().map(&figure).collect();
            Ok(Measurement::of(vmm.name(), figures?))
        })
        .collect()
}

/// One figure of a guest's answer.
pub fn number(json: &serde_json::Value, key: &str) -> Outcome<f64> {
    json[key]
        .as_f64()
        .ok_or_else(|| format!("the guest answered {json}").into())
}
