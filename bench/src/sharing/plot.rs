//! The table as a picture: virtual against machine footprint by the number of VMs, as in Disco's Figure 6
//! (SOSP '97).

use bench::svg::{Anchor, COLOURS, Picture, nice};

/// A line of the picture.
pub struct Series {
    /// Label beside the line.
    pub name: String,
    /// Number of VMs and MB, in order.
    pub points: Vec<(usize, f64)>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 30.0;
const PLOT_WIDTH: f64 = 380.0;
const PLOT_HEIGHT: f64 = 330.0;

/// The picture of `series`, the first of which is drawn dashed, with a title.
pub fn svg(title: &str, series: &[Series]) -> String {
    let points = || series.iter().flat_map(|series| &series.points);
    let vms_max = points().map(|point| point.0).max().unwrap_or(1).max(2);
    let mb_max = nice(points().map(|point| point.1).fold(1.0, f64::max));
    let x = |vms: usize| LEFT + PLOT_WIDTH * vms as f64 / vms_max as f64;
    let y = |mb: f64| TOP + PLOT_HEIGHT * (1.0 - mb / mb_max);
    let mut picture = Picture::new(WIDTH, HEIGHT, title);
    for step in 0..=5 {
        let mb = mb_max * f64::from(step) / 5.0;
        picture.line((LEFT, y(mb)), (LEFT + PLOT_WIDTH, y(mb)), "\"#dddddd\"");
        picture.text((LEFT - 6.0, y(mb) + 4.0), Anchor::End, &format!("{mb:.0}"));
    }
    let mut counts: Vec<usize> = points().map(|point| point.0).collect();
    counts.sort_unstable();
    counts.dedup();
    let bottom = TOP + PLOT_HEIGHT;
    for vms in counts {
        picture.text((x(vms), bottom + 18.0), Anchor::Middle, &vms.to_string());
    }
    picture.text((LEFT + PLOT_WIDTH / 2.0, bottom + 36.0), Anchor::Middle, "VMs");
    picture.add(&format!(
        "<text x=\"14\" y=\"{}\" transform=\"rotate(-90 14 {0})\">MB</text>",
        TOP + PLOT_HEIGHT / 2.0
    ));
    for (number, series) in series.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let path: Vec<String> = series
            .points
            .iter()
            .map(|(vms, mb)| format!("{:.1},{:.1}", x(*vms), y(*mb)))
            .collect();
        let dash = if number == 0 {
            " stroke-dasharray=\"6 4\""
        } else {
            ""
        };
        let stroke = format!("\"{colour}\" stroke-width=\"2\"{dash}");
        picture.add(&format!(
            "<polyline points=\"{}\" fill=\"none\" stroke={stroke}/>",
            path.join(" ")
        ));
        for point in &path {
            let (cx, cy) = point.split_once(',').unwrap_or_default();
            picture.add(&format!(
                "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"3\" fill=\"{colour}\"/>"
            ));
        }
        let (at, legend) = (TOP + 14.0 + 20.0 * number as f64, LEFT + PLOT_WIDTH + 20.0);
        picture.line((legend, at - 4.0), (legend + 22.0, at - 4.0), &stroke);
        picture.text((legend + 28.0, at), Anchor::Start, &series.name);
    }
    picture.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_is_drawn_inside_the_picture() {
        let series = [
            Series {
                name: "virtual".into(),
                points: vec![(1, 537.0), (8, 4295.0)],
            },
            Series {
                name: "a & b".into(),
                points: vec![(1, 300.0), (8, 420.0)],
            },
        ];
        let text = svg("title", &series);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert!(text.contains("a &amp; b"));
        for point in text.split("cx=\"").skip(1) {
            let x: f64 = point.split('"').next().unwrap().parse().unwrap();
            assert!((0.0..=WIDTH).contains(&x));
        }
    }
}
