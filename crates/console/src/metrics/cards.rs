//! Metrics of cards of a subnet.

use registry::subnet::{CardReport, NetworkReport};

use super::{Labels, Metrics};

impl Metrics {
    /// Adds the counters of each card, and its dropped frames by reason.
    pub(super) fn add_networks(&mut self, networks: &[NetworkReport]) {
        let cards = || {
            networks
                .iter()
                .flat_map(|network| network.cards.iter().map(move |card| (network, card)))
        };
        for (name, unit, help) in [
            (
                "card_frames",
                "frames",
                "Frames of a card's guest, dropped ones included",
            ),
            (
                "card_bytes",
                "bytes",
                "Bytes of a card's frames, dropped ones included",
            ),
        ] {
            let values = cards().flat_map(|(network, card)| {
                let directions = ["from_guest", "to_guest"].into_iter();
                directions.filter_map(move |direction| {
                    let count = card.counters.get(&format!("{direction}_{unit}"))?;
                    Some((labels(network, card, "direction", direction), *count))
                })
            });
            self.add_counters(name, help, values);
        }
        let dropped = cards().flat_map(|(network, card)| {
            let reasons = card.dropped.iter();
            reasons.map(move |(reason, count)| (labels(network, card, "reason", reason), *count))
        });
        self.add_counters("card_dropped", "Frames and packets that were dropped", dropped);
        let opened = cards().filter_map(|(network, card)| {
            let count = card.counters.get("outside_opened")?;
            Some((of_card(network, card), *count))
        });
        self.add_counters(
            "card_outside_opened",
            "Connections and exchanges with the outside",
            opened,
        );
        for (name, key, help) in [
            (
                "card_outside_connections",
                "outside_connections",
                "Connections of a card with the outside now",
            ),
            (
                "card_outside_exchanges",
                "outside_exchanges",
                "Exchanges of datagrams of a card with the outside now",
            ),
        ] {
            let values = cards()
                .filter_map(|(network, card)| Some((of_card(network, card), *card.counters.get(key)?)));
            self.add(name, help, values);
        }
    }
}

fn of_card(network: &NetworkReport, card: &CardReport) -> Labels {
    vec![
        ("network", network.name.clone()),
        ("vm", card.vm.clone()),
        ("card", card.card.to_string()),
    ]
}

fn labels(network: &NetworkReport, card: &CardReport, name: &'static str, value: &str) -> Labels {
    let mut labels = of_card(network, card);
    labels.push((name, value.to_owned()));
    labels
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// A network with one card.
    pub(crate) fn network() -> NetworkReport {
        let counts = |pairs: &[(&str, u64)]| -> BTreeMap<String, u64> {
            pairs
                .iter()
                .map(|(name, count)| ((*name).to_owned(), *count))
                .collect()
        };
        NetworkReport {
            name: "lab".to_owned(),
            ranges: Vec::new(),
            gateway: Vec::new(),
            isolated: false,
            peers: true,
            cards: vec![CardReport {
                vm: "web".to_owned(),
                card: 1,
                names: Vec::new(),
                mac: "02:00:00:00:00:01".to_owned(),
                addresses: Vec::new(),
                forward: Vec::new(),
                host: false,
                offloads: false,
                outside: true,
                counters: counts(&[
                    ("from_guest_frames", 3),
                    ("from_guest_bytes", 300),
                    ("to_guest_frames", 4),
                    ("to_guest_bytes", 400),
                    ("outside_connections", 5),
                    ("outside_exchanges", 6),
                    ("outside_opened", 7),
                ]),
                dropped: counts(&[("from_guest_source_mac", 8), ("outside_barred", 9)]),
            }],
        }
    }

    #[test]
    fn each_counter_and_drop_reason_of_a_card_has_a_line() {
        let mut metrics = Metrics(prometheus_client::registry::Registry::with_prefix("mirrorball"));
        metrics.add_networks(&[network()]);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &metrics.0).unwrap();
        for (name, label, count) in [
            ("frames_total", ",direction=\"from_guest\"", 3),
            ("bytes_total", ",direction=\"from_guest\"", 300),
            ("frames_total", ",direction=\"to_guest\"", 4),
            ("bytes_total", ",direction=\"to_guest\"", 400),
            ("outside_connections", "", 5),
            ("outside_exchanges", "", 6),
            ("outside_opened_total", "", 7),
            ("dropped_total", ",reason=\"from_guest_source_mac\"", 8),
            ("dropped_total", ",reason=\"outside_barred\"", 9),
        ] {
            let line =
                format!("mirrorball_card_{name}{{network=\"lab\",vm=\"web\",card=\"1\"{label}}} {count}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
    }
}
