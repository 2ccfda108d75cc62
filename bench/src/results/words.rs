//! Field names and figures in words.

use bench::tables::median;

use super::value::Value;

/// Endings of field names, and the unit that each stands for. Longer ones first.
const UNITS: [(&str, &str); 10] = [
    ("_mbit_s", "Mbit/s"),
    ("_mb_s", "MB/s"),
    ("_bytes", "bytes"),
    ("_permille", "permille"),
    ("_mib", "MiB"),
    ("_mb", "MB"),
    ("_us", "us"),
    ("_ms", "ms"),
    ("_ns", "ns"),
    ("_s", "s"),
];

/// Names that say more as other words. No sentence and no row has the subject `what` (`lint`).
const NAMES: [(&str, &str); 5] = [
    ("rows", "figures"),
    ("what", "measured"),
    ("of", "program"),
    ("load", "load of the host"),
    ("load_before", "load of the host before"),
];

/// Words of names that are not written in small letters.
const WORDS: [(&str, &str); 10] = [
    ("cpu", "CPU"),
    ("cpus", "CPUs"),
    ("vm", "VM"),
    ("vms", "VMs"),
    ("mb", "MB"),
    ("io", "I/O"),
    ("pss", "PSS"),
    ("ksm", "KSM"),
    ("mpi", "MPI"),
    ("linux", "Linux"),
];

/// Numbers of a list that is shown whole. A longer one is shown as median, least and greatest.
const SHOWN_MAX: usize = 8;

/// A field's name in words with its unit: `cold_mb_s` is "cold, MB/s".
pub fn heading(name: &str) -> String {
    let unit = UNITS.iter().find(|(ending, _)| name.ends_with(ending));
    let stem = unit
        .and_then(|(ending, _)| name.strip_suffix(ending))
        .unwrap_or(name);
    let words = match written(&NAMES, stem) {
        Some(words) => words.to_owned(),
        None => {
            let words = stem.split('_').map(|word| written(&WORDS, word).unwrap_or(word));
            words.collect::<Vec<_>>().join(" ")
        }
    };
    unit.map_or_else(|| words.clone(), |(_, unit)| format!("{words}, {unit}"))
}

fn written(list: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    let mut pairs = list.iter();
    pairs.find(|(from, _)| *from == name).map(|(_, written)| *written)
}

/// Whether the numbers of a list of this name are samples of one figure.
pub fn is_samples(name: &str) -> bool {
    name.starts_with("samples") || UNITS.iter().any(|(ending, _)| name.ends_with(ending))
}

/// A value in a cell of a table, or in a line of its own; empty for one that takes a table.
pub fn cell(name: &str, value: &Value) -> String {
    match value {
        Value::Null | Value::Object(_) => String::new(),
        Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
        Value::Integer(number) => grouped(&number.to_string()),
        Value::Float(number) => rounded(*number),
        Value::Text(text) => text_cell(text),
        Value::List(list) => list_cell(name, list),
    }
}

/// A text of a file. Names of code are set as such.
fn text_cell(text: &str) -> String {
    let text = text.replace('|', "\\|").replace('\n', " ");
    let is_name = text.contains("::") || (text.contains('_') && !text.contains(' '));
    if is_name && !text.contains('`') {
        format!("`{text}`")
    } else {
        text
    }
}

fn list_cell(name: &str, list: &[Value]) -> String {
    let numbers: Option<Vec<f64>> = list.iter().map(Value::number).collect();
    match numbers {
        Some(numbers) if numbers.len() > 1 && (is_samples(name) || numbers.len() > SHOWN_MAX) => {
            spread(&numbers).unwrap_or_default()
        }
        _ if list.len() > SHOWN_MAX => format!("{} entries", list.len()),
        _ => {
            let items: Vec<String> = list.iter().map(|item| cell("", item)).collect();
            let is_of_numbers = list.iter().all(|item| item.number().is_some());
            items.join(if is_of_numbers { ", " } else { "; " })
        }
    }
}

/// Median, least and greatest of samples. The median of an even number is the greater of the two in the
/// middle.
fn spread(numbers: &[f64]) -> Option<String> {
    let least = numbers.iter().copied().min_by(f64::total_cmp)?;
    let greatest = numbers.iter().copied().max_by(f64::total_cmp)?;
    let [median, least, greatest] = [median(numbers)?, least, greatest].map(rounded);
    Some(match least == greatest {
        true => median,
        false => format!("{median} ({least} to {greatest})"),
    })
}

/// A number with three digits that count, or all those before the point.
pub fn rounded(number: f64) -> String {
    let places = match number.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{number:.places$}");
    match text.split_once('.') {
        Some((whole, part)) => match part.trim_end_matches('0') {
            "" => grouped(whole),
            part => format!("{}.{part}", grouped(whole)),
        },
        None => grouped(&text),
    }
}

/// The digits of an integer with a comma before each three, if there are more than three.
fn grouped(number: &str) -> String {
    let (sign, digits) = match number.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", number),
    };
    if digits.len() < 4 {
        return number.to_owned();
    }
    let mut text = sign.to_owned();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_names_become_words_with_their_unit() {
        for (name, words) in [
            ("cold_mb_s", "cold, MB/s"),
            ("cold_boot_s", "cold boot, s"),
            ("sharing_cpu_s", "sharing CPU, s"),
            ("what", "measured"),
            ("base_resident_bytes", "base resident, bytes"),
            ("us_per_page", "us per page"),
            ("messages", "messages"),
        ] {
            assert_eq!(heading(name), words);
        }
    }

    #[test]
    fn numbers_keep_three_digits_that_count_and_all_before_the_point() {
        for (number, text) in [
            (38_000_377.34, "38,000,377"),
            (1935.918, "1,936"),
            (22.23, "22.2"),
            (1.2679, "1.27"),
            (0.787_46, "0.787"),
            (0.0446, "0.0446"),
            (1.0, "1"),
            (-9570.23, "-9,570"),
        ] {
            assert_eq!(rounded(number), text);
        }
        assert_eq!(cell("cell", &Value::Integer(0)), "0");
    }

    #[test]
    fn samples_are_shown_as_median_least_and_greatest() {
        let list = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(cell("samples", &list("[3, 1, 2]")), "2 (1 to 3)");
        assert_eq!(cell("pause_ms", &list("[4.0, 1.0, 2.0, 3.0]")), "3 (1 to 4)");
        assert_eq!(cell("samples", &list("[7.25]")), "7.25");
        assert_eq!(cell("samples", &list("[]")), "");
        assert_eq!(cell("counts", &list("[1, 2, 4]")), "1, 2, 4");
        assert_eq!(cell("pairs", &list("[[4, 2.5], [8, 3.5]]")), "4, 2.5; 8, 3.5");
        assert_eq!(cell("samples", &list("[0, 0, 0]")), "0");
        assert_eq!(cell("tests", &list("[[],[],[],[],[],[],[],[],[]]")), "9 entries");
    }

    #[test]
    fn names_of_code_are_set_as_code() {
        for (text, shown) in [
            ("cell tests::a_b", "`cell tests::a_b`"),
            ("one_node", "`one_node`"),
            ("a start: end_of_interrupt", "a start: end_of_interrupt"),
            ("a | b", "a \\| b"),
        ] {
            assert_eq!(cell("name", &Value::Text(text.to_owned())), shown);
        }
    }
}
