//! Bars with numbers beside them.

use serde::Deserialize;

use crate::svg::{Anchor, COLOURS, Picture, nice};

const LEFT: f64 = 330.0;
const PLOT_WIDTH: f64 = 400.0;
const RIGHT: f64 = 80.0;
const STEP: f64 = 20.0;

/// Scale of the lengths of bars.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// From 0.
    #[default]
    Linear,
    /// By the logarithm; from a power of ten that no length is below. Lengths are above 0.
    Logarithmic,
}

/// Bars with one name and one colour.
#[derive(Debug)]
pub struct Group<'a> {
    /// Its name, above its bars.
    pub name: &'a str,
    /// The name and the length of each bar.
    pub bars: Vec<(&'a str, f64)>,
}

/// The way from a length to a place in the picture, and the lengths that have a line.
struct Axis {
    scale: Scale,
    least: f64,
    most: f64,
    marks: Vec<f64>,
}

impl Axis {
    fn of(scale: Scale, lengths: &[f64]) -> Self {
        let least = lengths.iter().copied().fold(f64::INFINITY, f64::min);
        let most = lengths.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        match scale {
            Scale::Linear => {
                let most = nice(most);
                let marks = (0..=4).map(|quarter| most * f64::from(quarter) / 4.0).collect();
                let least = 0.0;
                Self {
                    scale,
                    least,
                    most,
                    marks,
                }
            }
            Scale::Logarithmic => {
                let least = least.min(most).max(f64::MIN_POSITIVE).log10().floor();
                let most = most.log10().ceil().max(least + 1.0);
                let marks = (least as i32..=most as i32)
                    .map(|power| 10_f64.powi(power))
                    .collect();
                Self {
                    scale,
                    least,
                    most,
                    marks,
                }
            }
        }
    }

    /// The place of a length, rounded to tenths of a pixel.
    fn place(&self, length: f64) -> f64 {
        let length = match self.scale {
            Scale::Linear => length,
            Scale::Logarithmic => length.log10(),
        };
        let exact = LEFT + PLOT_WIDTH * (length - self.least) / (self.most - self.least);
        (exact * 10.0).round() / 10.0
    }
}

/// A number of at most three digits behind the point, fewer where it is large.
fn shown(length: f64) -> String {
    match length.abs() {
        large if large >= 100.0 => format!("{length:.0}"),
        middle if middle >= 10.0 => format!("{length:.1}"),
        _ => format!("{length:.2}"),
    }
}

/// A picture of groups of bars.
pub fn bars(title: &str, scale: Scale, groups: &[Group]) -> String {
    let lengths: Vec<f64> = groups
        .iter()
        .flat_map(|group| &group.bars)
        .map(|(_, length)| *length)
        .collect();
    let axis = Axis::of(scale, &lengths);
    let rows: usize = groups.iter().map(|group| group.bars.len() + 1).sum();
    let (top, bottom) = (44.0, 44.0 + STEP * rows as f64);
    let mut picture = Picture::new(LEFT + PLOT_WIDTH + RIGHT, bottom + 10.0, title);
    for mark in &axis.marks {
        let at = axis.place(*mark);
        picture.line((at, top - 8.0), (at, bottom), "\"#dddddd\"");
        picture.text((at, top - 12.0), Anchor::Middle, &mark.to_string());
    }
    let mut y = top;
    for (number, group) in groups.iter().enumerate() {
        y += STEP;
        picture.text((10.0, y - 6.0), Anchor::Start, group.name);
        let colour = COLOURS[(number + 1) % COLOURS.len()];
        for (what, length) in &group.bars {
            y += STEP;
            picture.text((LEFT - 6.0, y - 6.0), Anchor::End, what);
            picture.add(&format!(
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"12\" fill=\"{colour}\"/>",
                y - 16.0,
                axis.place(*length) - LEFT
            ));
            picture.text(
                (axis.place(*length) + 4.0, y - 6.0),
                Anchor::Start,
                &shown(*length),
            );
        }
    }
    picture.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widths(scale: Scale, lengths: &[f64]) -> Vec<f64> {
        let bars = lengths.iter().map(|length| ("bar", *length)).collect();
        let text = super::bars("title", scale, &[Group { name: "group", bars }]);
        let rest = text.split("width=\"").skip(3);
        rest.map(|rest| {
            rest.split('"')
                .next()
                .and_then(|width| width.parse().ok())
                .expect("a number")
        })
        .collect()
    }

    #[test]
    fn bars_are_as_long_as_their_logarithms() {
        let widths = widths(Scale::Logarithmic, &[100.0, 1000.0, 10_000.0]);
        assert_eq!(widths, [0.0, PLOT_WIDTH / 2.0, PLOT_WIDTH]);
    }

    #[test]
    fn bars_are_as_long_as_their_lengths() {
        let widths = widths(Scale::Linear, &[0.0, 2.5, 10.0]);
        assert_eq!(widths, [0.0, PLOT_WIDTH / 4.0, PLOT_WIDTH]);
    }

    #[test]
    fn picture_without_lengths_or_with_zeroes_alone_has_places() {
        for lengths in [&[][..], &[0.0]] {
            let axis = Axis::of(Scale::Linear, lengths);
            assert!(axis.place(0.0).is_finite(), "{lengths:?}");
        }
    }
}
