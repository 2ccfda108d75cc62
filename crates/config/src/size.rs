//! Sizes of memory, disks and files, with their units.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A size in bytes, written as a number with a unit: `K`, `M`, `G`, `T` (powers of 1,024), in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(value_type = String, example = "512M"))]
pub struct Size(pub u64);

/// A text that is not a [`Size`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The text does not start with a number of 64 bits.
    #[error("{0:?} is not a size: write a number and a unit, as \"512M\"")]
    NotASize(String),
    /// A number alone, or of bytes.
    #[error("the size {text:?} has no unit: write \"{number}M\" or \"{number}G\"")]
    NoUnit {
        /// The whole text.
        text: String,
        /// The number in it, for the help.
        number: u64,
    },
    /// Another unit than K, M, G and T.
    #[error("{0:?} is not a unit of size: use K, M, G or T")]
    UnknownUnit(String),
    /// More bytes than 64 bits count.
    #[error("the size {0:?} is too large for any machine: write a smaller one")]
    TooLarge(String),
}

impl Size {
    /// Parses a number with a unit. A number without one is refused: `512` could mean bytes or MiB.
    ///
    /// # Errors
    /// The first part that is wrong.
    pub fn parse(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| SizeError::NotASize(text.to_owned()))?;
        let shift = match unit.trim().to_ascii_uppercase().as_str() {
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            "T" | "TB" | "TIB" => 40,
            "" | "B" => {
                return Err(SizeError::NoUnit {
                    text: text.to_owned(),
                    number,
                });
            }
            _ => return Err(SizeError::UnknownUnit(unit.to_owned())),
        };
        number
            .checked_mul(1 << shift)
            .map(Size)
            .ok_or_else(|| SizeError::TooLarge(text.to_owned()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = [(40, "T"), (30, "G"), (20, "M"), (10, "K")]
            .into_iter()
            .find(|&(shift, _)| self.0 != 0 && self.0.is_multiple_of(1 << shift))
            .unwrap_or((0, "B"));
        write!(f, "{}{unit}", self.0 >> shift)
    }
}

impl std::str::FromStr for Size {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Self, SizeError> {
        Self::parse(text)
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with a unit, as \"512M\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                Size::parse(text).map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Size, E> {
                if number <= 0 {
                    return Err(E::custom(format!(
                        "{number} is not a size: write a number and a unit, as \"512M\""
                    )));
                }
                Err(E::custom(format!(
                    "the size {number} has no unit: write \"{number}M\" or \"{number}G\""
                )))
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}
