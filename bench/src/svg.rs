//! Pictures beside the tables.

use std::fmt::Write as _;

/// Colours of series, in order; the first is that of the reference.
pub const COLOURS: [&str; 9] = [
    "#888888", "#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#00798c", "#a44a3f", "#30323d",
];

/// Position of a text relative to its point.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    /// The text begins at the point.
    Start,
    /// The text's middle is at the point.
    Middle,
    /// The text ends at the point.
    End,
}

/// A picture under construction. All lengths are pixels, from the upper left corner.
#[derive(Debug)]
pub struct Picture(String);

impl Picture {
    /// An empty one with a title.
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        let mut picture = Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ));
        picture.add(&format!(
            "<text x=\"60\" y=\"18\" font-size=\"14\">{}</text>",
            escaped(title)
        ));
        picture
    }

    /// Adds an element.
    pub fn add(&mut self, element: &str) {
        let _ = writeln!(self.0, "{element}");
    }

    /// Adds a text.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        self.add(&format!(
            "<text x=\"{x}\" y=\"{y}\"{anchor}>{}</text>",
            escaped(text)
        ));
    }

    /// Adds a line with a stroke: its colour, and more of its attributes.
    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), stroke: &str) {
        self.add(&format!(
            "<line x1=\"{x1}\" x2=\"{x2}\" y1=\"{y1}\" y2=\"{y2}\" stroke={stroke}/>"
        ));
    }

    /// The whole, as a file holds it.
    pub fn finish(self) -> String {
        self.0 + "</svg>\n"
    }
}

/// A round number not below `value`.
pub fn nice(value: f64) -> f64 {
    let magnitude = 10_f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0];
    let factor = steps.into_iter().find(|step| step * magnitude >= value);
    factor.unwrap_or(10.0) * magnitude
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_no_elements() {
        let mut picture = Picture::new(10.0, 10.0, "a < b");
        picture.text((1.0, 2.0), Anchor::End, "c & <d>");
        let text = picture.finish();
        assert!(text.contains("a &lt; b") && text.contains("c &amp; &lt;d>"));
        assert_eq!(text.matches('<').count(), 7, "{text}");
    }

    #[test]
    fn a_round_number_is_not_below() {
        assert_eq!((nice(4295.0), nice(0.9)), (5000.0, 1.0));
    }
}
