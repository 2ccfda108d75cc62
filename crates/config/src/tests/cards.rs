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
