//! A network between a lab's hosts, and its deliberate impairments.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longer than a frame's round trip to any place on earth, many times over.
const DELAY_MAX_US: u64 = 10_000_000;
/// All frames, in parts per million.
const LOSS_ALL_PPM: u32 = 1_000_000;
/// Maximum decimals of a percentage in parts per million.
const LOSS_DECIMALS_MAX: usize = 4;

/// A private network: host `i` in the list has address `10.77.LINK.(i+1)`, links counted from 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Hosts on the network.
    pub hosts: Vec<String>,
    /// Delay of each frame from one host to another; none when absent.
    #[serde(default)]
    pub delay: Delay,
    /// Loss rate of frames from one host to another; none when absent.
    #[serde(default)]
    pub loss: Loss,
}

impl LinkSpec {
    /// Quality from each host to each other.
    pub fn quality(&self) -> Quality {
        Quality {
            delay: self.delay,
            loss: self.loss,
        }
    }
}

/// Quality from one host to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quality {
    /// Delay of each frame.
    pub delay: Delay,
    /// Loss rate of frames.
    pub loss: Loss,
}

impl fmt::Display for Quality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "delay {}, loss {}", self.delay, self.loss)
    }
}

/// One-way delay in microseconds, 10 s at most; written as `2ms`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Delay(u64);

impl Delay {
    /// As a duration.
    pub fn duration(self) -> std::time::Duration {
        std::time::Duration::from_micros(self.0)
    }
}

/// A text that is not a [`Delay`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DelayError {
    /// No whole number with a unit.
    #[error("{0:?} is not a delay: write a whole number and us, ms or s, as \"2ms\"")]
    NotADelay(String),
    /// More than 10 s.
    #[error("a delay of {0}: write \"10s\" at most")]
    TooLong(String),
}

impl FromStr for Delay {
    type Err = DelayError;

    fn from_str(text: &str) -> Result<Self, DelayError> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let scale_us = match unit {
            "us" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            _ => 0,
        };
        let number: Option<u64> = number.parse().ok();
        match number.and_then(|number| number.checked_mul(scale_us)) {
            _ if scale_us == 0 || digits == 0 => Err(DelayError::NotADelay(text.to_owned())),
            Some(us) if us <= DELAY_MAX_US => Ok(Self(us)),
            _ => Err(DelayError::TooLong(text.to_owned())),
        }
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            us if us != 0 && us.is_multiple_of(1_000_000) => write!(f, "{}s", us / 1_000_000),
            us if us.is_multiple_of(1_000) => write!(f, "{}ms", us / 1_000),
            us => write!(f, "{us}us"),
        }
    }
}

/// Random, independent loss of each frame, in parts per million; written as `1%`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Loss(u32);

impl Loss {
    /// Loses all frames.
    pub const ALL: Self = Self(LOSS_ALL_PPM);

    /// Whether a frame with this random number below a million is lost.
    pub fn takes(self, drawn: u32) -> bool {
        drawn < self.0
    }
}

/// A text that is not a [`Loss`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a loss: write a percentage from 0% to 100%, as \"1%\" or \"0.0001%\"")]
pub struct LossError(String);

impl FromStr for Loss {
    type Err = LossError;

    fn from_str(text: &str) -> Result<Self, LossError> {
        let wrong = || LossError(text.to_owned());
        let number = text.strip_suffix('%').ok_or_else(wrong)?;
        let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || !digits(decimals) || decimals.len() > LOSS_DECIMALS_MAX {
            return Err(wrong());
        }
        let ppm = format!("{whole}{decimals:0<LOSS_DECIMALS_MAX$}").parse();
        match ppm {
            Ok(ppm @ ..=LOSS_ALL_PPM) => Ok(Self(ppm)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Exact: a quotient with four decimals has fewer digits than a double.
        write!(f, "{}%", f64::from(self.0) / 10_000.0)
    }
}

macro_rules! as_text {
    ($kind:ty) => {
        impl TryFrom<String> for $kind {
            type Error = <$kind as FromStr>::Err;
            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> Self {
                value.to_string()
            }
        }
    };
}
as_text!(Delay);
as_text!(Loss);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn delays_are_whole_numbers_of_a_unit() {
        let delay = |text: &str| text.parse::<Delay>().map(Delay::duration);
        assert_eq!(delay("2ms"), Ok(Duration::from_millis(2)));
        assert_eq!(delay("500us"), Ok(Duration::from_micros(500)));
        assert_eq!(delay("10s"), Ok(Duration::from_secs(10)));
        for text in ["", "ms", "2", "2 ms", "-2ms", "0.5ms", "2m", "2MS"] {
            let error = delay(text).unwrap_err().to_string();
            assert!(error.contains("is not a delay: write a whole number"), "{error}");
        }
        for text in ["10001ms", "11s", "99999999999999999999s", "18446744073709551615s"] {
            let error = delay(text).unwrap_err().to_string();
            assert!(error.ends_with("write \"10s\" at most"), "{error}");
        }
    }

    #[test]
    fn losses_are_percentages() {
        let loss = |text: &str| text.parse::<Loss>();
        assert_eq!(loss("1%"), Ok(Loss(10_000)));
        assert_eq!(loss("0.5%"), Ok(Loss(5_000)));
        assert_eq!(loss("0.0001%"), Ok(Loss(1)));
        assert_eq!(loss("100%"), Ok(Loss::ALL));
        for text in [
            "",
            "%",
            "1",
            "101%",
            "100.0001%",
            "-1%",
            "1e1%",
            "0.00001%",
            ".5%",
            "1.%",
            "nan%",
        ] {
            let error = loss(text).unwrap_err().to_string();
            assert!(error.contains("is not a loss: write a percentage"), "{error}");
        }
    }

    #[test]
    fn loss_drops_its_share_of_the_drawn_numbers() {
        assert!(!Loss::default().takes(0));
        assert!(Loss(1).takes(0) && !Loss(1).takes(1));
        assert!(Loss::ALL.takes(LOSS_ALL_PPM - 1));
    }

    proptest! {
        #[test]
        fn delay_and_loss_survive_a_round_trip_through_text(us in 0..=DELAY_MAX_US, ppm in 0..=LOSS_ALL_PPM) {
            prop_assert_eq!(Delay(us).to_string().parse(), Ok(Delay(us)));
            prop_assert_eq!(Loss(ppm).to_string().parse(), Ok(Loss(ppm)));
        }
    }
}
