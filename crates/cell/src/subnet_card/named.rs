//! Networks that the cluster's file names, and their settings for a card.

use registry::cluster::files::Files;
use registry::subnet::{Join, NetworkSettings};

use super::SubnetCardError;

/// Adds the settings of the cluster's file to the request of a card, if the file names its network.
///
/// # Errors
/// If the network is another host's, or the card is to reach a host that its network does not lead to.
pub(crate) fn configure(join: &mut Join, files: &Files) -> Result<(), SubnetCardError> {
    let mut networks = files.networks()?.into_iter();
    let Some(network) = networks.find(|network| network.name == join.network) else {
        return Ok(());
    };
    let name = &join.network;
    if let Some(host) = &network.host
        && files.site()?.is_none_or(|site| site.here != *host)
    {
        return Err(SubnetCardError::Refused(format!(
            "the network {name} is one of host {host}; start the VM there, or choose another network"
        )));
    }
    join.outside = network.reaches_outside(&join.vm);
    if join.host && !join.outside {
        return Err(SubnetCardError::Refused(format!(
            "the network {name} does not lead {} outside, and card {} has `host = true`; drop that, or \
             choose another network",
            join.vm, join.card
        )));
    }
    join.settings = Some(NetworkSettings {
        range: network.range,
        isolated: network.isolated,
        peers: network.peers,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use config::cluster::{ClusterSpec, NetworkSpec};
    use registry::subnet::HostFacts;

    use super::*;

    fn files(networks: &[NetworkSpec]) -> (tempfile::TempDir, Files) {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        files.set_networks(networks).unwrap();
        (directory, files)
    }

    fn parse(text: &str) -> ClusterSpec {
        ClusterSpec::parse("cluster.toml", text).unwrap()
    }

    fn card(network: &str, vm: &str, host: bool) -> Join {
        Join {
            network: network.to_owned(),
            vm: vm.to_owned(),
            card: 0,
            mac: [2, 0, 0, 0, 0, 1],
            address: None,
            forward: Vec::new(),
            host,
            bandwidth: None,
            packets: None,
            offloads: false,
            sandbox_required: false,
            outside: true,
            settings: None,
            facts: HostFacts::default(),
        }
    }

    #[test]
    fn card_gets_the_settings_of_its_network_in_the_file() {
        let spec = parse(
            "[[cells]]\ncpus = \"0\"\n[[networks]]\nname = \"front\"\nrange = \"10.20.0.0/24\"\noutside = \
             [\"web\"]\npeers = false\n[[networks]]\nname = \"back\"\nisolated = true\n",
        );
        let (_directory, files) = files(&spec.networks);
        let configured = |network: &str, vm: &str, host| {
            let mut join = card(network, vm, host);
            configure(&mut join, &files).map(|()| join)
        };
        let web = configured("front", "web", true).unwrap();
        let settings = web.settings.unwrap();
        assert_eq!(settings.range.as_deref(), Some("10.20.0.0/24"));
        assert!(web.outside && !settings.isolated && !settings.peers);
        assert!(!configured("front", "db", false).unwrap().outside);
        let back = configured("back", "web", false).unwrap();
        assert!(!back.outside && back.settings.unwrap().isolated);
        for (network, vm) in [("front", "db"), ("back", "web")] {
            let error = configured(network, vm, true).unwrap_err().to_string();
            assert!(error.contains("`host = true`"), "{error}");
        }
        let other = configured("other", "db", true).unwrap();
        assert!(other.outside && other.settings.is_none());
    }

    #[test]
    fn network_of_another_host_is_refused() {
        let spec = parse(
            "[[hosts]]\nname = \"alpha\"\naddress = \"192.0.2.1:7400\"\n\
             [[hosts]]\nname = \"beta\"\naddress = \"192.0.2.2:7400\"\n\
             [[cells]]\nhost = \"alpha\"\n[[cells]]\nhost = \"beta\"\n[[networks]]\nname = \
             \"a\"\nhost = \"alpha\"\n[[networks]]\nname = \"b\"\nhost = \"beta\"\n",
        );
        let (_directory, files) = files(&spec.networks);
        let site = spec.site("alpha", std::path::Path::new("/etc")).unwrap().unwrap();
        files.create(&[], Some(&site)).unwrap();
        configure(&mut card("a", "web", false), &files).unwrap();
        let error = configure(&mut card("b", "web", false), &files)
            .unwrap_err()
            .to_string();
        assert!(error.contains("is one of host beta"), "{error}");
    }
}
