//! Network cards that a VM file may have.

#[test]
fn tcp_and_udp_may_share_a_port_number() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forward = ["5353:53", "udp:5353:53", "tcp:8080:80"]
"#;
    crate::parse("vm.toml", text).unwrap();
}

#[test]
fn user_card_reaches_the_host_only_on_request() {
    let card = |more: &str| {
        let text = format!("image = \"debian-12\"\n[[nets]]\nkind = \"user\"\n{more}");
        crate::parse("vm.toml", &text).unwrap().nets.unwrap()[0].host
    };
    assert!(!card(""));
    assert!(card("host = true\n"));
}

fn card(text: &str) -> Result<crate::vm::NetSpec, String> {
    let text = format!("image = \"debian-12\"\n[[nets]]\n{text}\n");
    let spec = crate::parse("vm.toml", &text).map_err(|error| error.to_string())?;
    Ok(spec.nets.unwrap().remove(0))
}

#[test]
fn card_of_a_subnet_has_a_network_an_address_and_limits() {
    let net = card(
        "kind = \"subnet\"\nnetwork = \"db.1\"\naddress = \"10.1.2.3\"\nbandwidth = \"10M\"\npackets = 500\n\
         forward = [\"8080:80\"]\nhost = true",
    )
    .unwrap();
    assert_eq!(net.network.as_deref(), Some("db.1"));
    assert_eq!(net.address.map(|address| address.octets()), Some([10, 1, 2, 3]));
    assert_eq!(
        (net.bandwidth.map(|size| size.0), net.packets),
        (Some(10 << 20), Some(500))
    );
    card("kind = \"subnet\"").unwrap();
}

#[test]
fn settings_of_a_subnet_are_refused_where_they_mean_nothing() {
    for setting in [
        "network = \"a\"",
        "address = \"10.0.0.1\"",
        "bandwidth = \"1M\"",
        "packets = 5",
    ] {
        for kind in ["kind = \"user\"", "kind = \"tap\"\ntap = \"tap0\""] {
            let error = card(&format!("{kind}\n{setting}")).unwrap_err();
            assert!(error.contains("has no `"), "{kind} {setting}: {error}");
        }
    }
    for setting in [
        "tap = \"tap0\"",
        "queues = 2",
        "network = \"\"",
        "network = \"-a\"",
        "network = \"a/b\"",
        "network = \"a b\"",
        "address = \"10.0.0\"",
        "bandwidth = \"1023\"",
        "packets = 0",
    ] {
        assert!(
            card(&format!("kind = \"subnet\"\n{setting}")).is_err(),
            "{setting}"
        );
    }
    let long = "n".repeat(64);
    assert!(card(&format!("kind = \"subnet\"\nnetwork = \"{long}\"")).is_err());
    card(&format!("kind = \"subnet\"\nnetwork = \"{}\"", &long[1..])).unwrap();
}
