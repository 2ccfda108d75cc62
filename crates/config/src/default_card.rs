//! The card of a VM whose description lists none, and the networks that commands choose for it.

use crate::vm::{NetKind, NetSpec, VmSpec};

/// Start of the name of a command's network. Eight hexadecimal digits follow.
const COMMAND_NETWORK_START: &str = "run-";
const COMMAND_NETWORK_DIGITS: usize = 8;

impl VmSpec {
    /// Lists the default card if no cards are listed: one of a subnet.
    ///
    /// A program that starts a VM calls this, so that the VM's record has its cards. A record or a snapshot
    /// without a list is of a release whose default was a card in user mode, which [`Self::cards`] returns.
    pub fn list_default_card(&mut self) {
        self.nets
            .get_or_insert_with(|| vec![NetSpec::of(NetKind::Subnet)]);
    }

    /// Returns the cards of a VM that was started.
    pub fn cards(&self) -> Vec<NetSpec> {
        let listed = self.nets.clone();
        listed.unwrap_or_else(|| vec![NetSpec::of(NetKind::User)])
    }
}

/// Returns the name of a network for the VMs of one command.
pub fn command_network(number: u32) -> String {
    format!("{COMMAND_NETWORK_START}{number:08x}")
}

/// Whether a network has the name of one for the VMs of one command. Such a network is no choice of a user.
pub fn is_command_network(name: &str) -> bool {
    let is_digit = |c: char| matches!(c, '0'..='9' | 'a'..='f');
    let digits = name.strip_prefix(COMMAND_NETWORK_START);
    digits.is_some_and(|digits| digits.len() == COMMAND_NETWORK_DIGITS && digits.chars().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(text: &str) -> Vec<NetKind> {
        let mut spec = crate::parse("vm.toml", &format!("image = \"debian-12\"\n{text}")).unwrap();
        spec.list_default_card();
        let cards = spec.nets.clone().unwrap();
        assert_eq!(cards.len(), spec.cards().len());
        cards.iter().map(|card| card.kind).collect()
    }

    #[test]
    fn default_card_is_one_of_a_subnet() {
        assert_eq!(listed(""), [NetKind::Subnet]);
        assert_eq!(listed("warm = true"), [NetKind::Subnet]);
        assert_eq!(listed("nets = []"), []);
        assert_eq!(listed("[[nets]]\nkind = \"user\""), [NetKind::User]);
    }

    #[test]
    fn record_without_a_list_of_cards_has_one_in_user_mode() {
        let spec = crate::parse("vm.toml", "image = \"debian-12\"").unwrap();
        assert_eq!(spec.cards()[0].kind, NetKind::User);
    }

    #[test]
    fn names_of_command_networks_are_known_again() {
        for number in [0, 7, u32::MAX] {
            assert!(is_command_network(&command_network(number)));
        }
        for name in [
            "run-",
            "run-0000000",
            "run-000000000",
            "run-0000000g",
            "run-0000000A",
            "web",
        ] {
            assert!(!is_command_network(name), "{name}");
        }
    }
}
