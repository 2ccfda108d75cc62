//! Bars on a logarithmic scale.

use crate::svg::{Anchor, COLOURS, Picture};

const LEFT: f64 = 330.0;
const PLOT_WIDTH: f64 = 400.0;
const RIGHT: f64 = 80.0;
const STEP: f64 = 20.0;

/// Groups of bars, each with a name and a length, whose logarithms are drawn.
pub fn bars(title: &str, groups: &[(&str, Vec<(&str, f64)>)]) -> String {
    let lengths = || {
        groups
            .iter()
            .flat_map(|(_, bars)| bars)
            .map(|(_, length)| *length)
    };
    let least = lengths().fold(f64::INFINITY, f64::min).log10().floor();
    let most = lengths()
        .fold(f64::NEG_INFINITY, f64::max)
        .log10()
        .ceil()
        .max(least + 1.0);
    let x = |length: f64| {
        let exact = LEFT + PLOT_WIDTH * (length.log10() - least) / (most - least);
        (exact * 10.0).round() / 10.0
    };
    let rows: usize = groups.iter().map(|(_, bars)| bars.len() + 1).sum();
    let (top, bottom) = (44.0, 44.0 + STEP * rows as f64);
    let mut picture = Picture::new(LEFT + PLOT_WIDTH + RIGHT, bottom + 10.0, title);
    for power in least as i32..=most as i32 {
        let at = x(10_f64.powi(power));
        picture.line((at, top - 8.0), (at, bottom), "\"#dddddd\"");
        picture.text((at, top - 12.0), Anchor::Middle, &10_f64.powi(power).to_string());
    }
    let mut y = top;
    for (number, (name, bars)) in groups.iter().enumerate() {
        y += STEP;
        picture.text((10.0, y - 6.0), Anchor::Start, name);
        let colour = COLOURS[(number + 1) % COLOURS.len()];
        for (what, length) in bars {
            y += STEP;
            picture.text((LEFT - 6.0, y - 6.0), Anchor::End, what);
            picture.add(&format!(
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"12\" fill=\"{colour}\"/>",
                y - 16.0,
                x(*length) - LEFT
            ));
            picture.text(
                (x(*length) + 4.0, y - 6.0),
                Anchor::Start,
                &format!("{length:.0}"),
            );
        }
    }
    picture.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_logarithms_and_inside_the_picture() {
        let text = bars(
            "title",
            &[(
                "ways",
                vec![("bare", 100.0), ("slow", 1000.0), ("slower", 10_000.0)],
            )],
        );
        let widths: Vec<f64> = text
            .split("width=\"")
            .skip(3)
            .map(|rest| {
                rest.split('"')
                    .next()
                    .and_then(|width| width.parse().ok())
                    .expect("a number")
            })
            .collect();
        assert_eq!(widths, [0.0, PLOT_WIDTH / 2.0, PLOT_WIDTH]);
    }
}
