//! Alternating runs and their medians.

use crate::Outcome;
use crate::guest_files::GuestFiles;
use crate::vmm::{self, Vmm};

/// The samples of one program.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Whose they are.
    pub name: String,
    /// In the order taken.
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

/// Takes `runs` samples of each, A B C A B C …, after one of each that is not counted.
pub fn alternate(
    runs: usize,
    vmms: &[Vmm],
    mut sample: impl FnMut(Vmm) -> Outcome<f64>,
) -> Outcome<Vec<Measurement>> {
    let mut measurements: Vec<_> = vmms
        .iter()
        .map(|vmm| Measurement::of(vmm.name(), Vec::new()))
        .collect();
    for run in 0..=runs {
        for (vmm, measurement) in vmms.iter().zip(&mut measurements) {
            let value = sample(*vmm)?;
            if run > 0 || runs == 1 {
                measurement.samples.push(value);
            }
        }
        if runs == 1 {
            break;
        }
    }
    Ok(measurements)
}

/// The JSON answers of every run of a task: one list for each VMM.
pub type Answers = Vec<(Vmm, Vec<serde_json::Value>)>;

/// Runs a task `runs` times under each, alternating, after one run of each that is not counted.
pub fn answers(runs: usize, vmms: &[Vmm], task: &str, files: &GuestFiles) -> Outcome<Answers> {
    let mut answers: Answers = vmms.iter().map(|vmm| (*vmm, Vec::new())).collect();
    for run in 0..=runs {
        for (vmm, list) in &mut answers {
            let answer = vmm::task(*vmm, task, files)?;
            if run > 0 {
                list.push(answer);
            }
        }
    }
    Ok(answers)
}

/// One figure of every answer.
pub fn column(answers: &Answers, key: &str) -> Outcome<Vec<Measurement>> {
    answers
        .iter()
        .map(|(vmm, list)| {
            let samples: Outcome<Vec<f64>> = list.iter().map(|json| number(json, key)).collect();
            Ok(Measurement::of(vmm.name(), samples?))
        })
        .collect()
}

/// One figure of an answer.
pub fn number(json: &serde_json::Value, key: &str) -> Outcome<f64> {
    json[key]
        .as_f64()
        .ok_or_else(|| format!("the guest answered {json}").into())
}
