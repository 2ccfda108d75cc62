//! Invalid network cards. Each text is refused with exactly this error.

use super::refused;

#[test]
fn tap_card_without_a_device_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "tap"
"#;
    let shown = r#"
  × which TAP device?
   ╭─[vm.toml:4:8]
 3 │ [[nets]]
 4 │ kind = "tap"
   ·        ──┬──
   ·          ╰── here
   ╰────
  help: add `tap = "NAME"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn device_for_a_user_card_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
tap = "tap0"
"#;
    let shown = r#"
  × user networking has no TAP device
   ╭─[vm.toml:5:7]
 4 │ kind = "user"
 5 │ tap = "tap0"
   ·       ───┬──
   ·          ╰── here
   ╰────
  help: drop `tap`, or use `kind = "tap"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn invalid_device_name_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "tap"
tap = "a/b"
"#;
    let shown = r#"
  × "a/b" can't name a TAP device
   ╭─[vm.toml:5:7]
 4 │ kind = "tap"
 5 │ tap = "a/b"
   ·       ──┬──
   ·         ╰── here
   ╰────
  help: 1 to 15 characters, no `/` or space
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn group_address_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
mac = "03:00:00:00:00:01"
"#;
    let shown = r#"
  × "03:00:00:00:00:01" is not a card's address
   ╭─[vm.toml:5:7]
 4 │ kind = "user"
 5 │ mac = "03:00:00:00:00:01"
   ·       ─────────┬─────────
   ·                ╰── here
   ╰────
  help: write six bytes, not all zero and not a group's, as "02:00:00:00:00:01"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn address_of_five_bytes_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
mac = "02:00:00:00:01"
"#;
    let shown = r#"
  × "02:00:00:00:01" is not a card's address
   ╭─[vm.toml:5:7]
 4 │ kind = "user"
 5 │ mac = "02:00:00:00:01"
   ·       ────────┬───────
   ·               ╰── here
   ╰────
  help: write six bytes, not all zero and not a group's, as "02:00:00:00:00:01"
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn forward_of_one_port_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forward = ["80"]
"#;
    let shown = r#"
  × "80" is not a port forward
   ╭─[vm.toml:5:12]
 4 │ kind = "user"
 5 │ forward = ["80"]
   ·            ──┬─
   ·              ╰── here
   ╰────
  help: write HOST:GUEST, as "8080:80", or udp:HOST:GUEST, ports from 1 to 65535
"#;
    assert_eq!(refused(text), shown);
}

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
fn forward_of_another_protocol_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forward = ["sctp:80:80"]
"#;
    assert!(refused(text).starts_with("\n  × \"sctp:80:80\" is not a port forward\n"));
}

#[test]
fn forward_past_the_last_port_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forward = ["8080:80", "8081:65536"]
"#;
    let shown = r#"
  × "8081:65536" is not a port forward
   ╭─[vm.toml:5:23]
 4 │ kind = "user"
 5 │ forward = ["8080:80", "8081:65536"]
   ·                       ──────┬─────
   ·                             ╰── here
   ╰────
  help: write HOST:GUEST, as "8080:80", or udp:HOST:GUEST, ports from 1 to 65535
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn port_forwarded_twice_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
forward = ["8080:80", "8080:81"]
"#;
    let shown = r#"
  × port 8080 of the host is forwarded twice
   ╭─[vm.toml:5:23]
 4 │ kind = "user"
 5 │ forward = ["8080:80", "8080:81"]
   ·                       ────┬────
   ·                           ╰── here
   ╰────
  help: forward it once
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn forward_of_a_tap_card_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "tap"
tap = "tap0"
forward = ["8080:80"]
"#;
    let shown = r#"
  × a TAP device forwards no ports
   ╭─[vm.toml:6:11]
 5 │ tap = "tap0"
 6 │ forward = ["8080:80"]
   ·           ─────┬─────
   ·                ╰── here
   ╰────
  help: drop `forward`, or use `kind = "user"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn host_for_a_tap_card_is_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "tap"
tap = "tap0"
host = true
"#;
    let shown = r#"
  × a TAP device reaches what the host lets it
   ╭─[vm.toml:6:8]
 5 │ tap = "tap0"
 6 │ host = true
   ·        ──┬─
   ·          ╰── here
   ╰────
  help: drop `host`, or use `kind = "user"`
"#;
    assert_eq!(refused(text), shown);
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

#[test]
fn two_queue_pairs_of_a_user_card_are_refused() {
    let text = r#"image = "debian-12"

[[nets]]
kind = "user"
queues = 2
"#;
    let shown = r#"
  × user networking has one queue pair
   ╭─[vm.toml:5:10]
 4 │ kind = "user"
 5 │ queues = 2
   ·          ┬
   ·          ╰── here
   ╰────
  help: drop `queues`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn five_network_cards_are_refused() {
    let card = r#"{ kind = "user" }"#;
    let text = format!("nets = [{}]\nimage = \"debian-12\"\n", [card; 5].join(", "));
    let shown = r#"
  × 5 network cards
   ╭─[vm.toml:1:8]
 1 │ nets = [{ kind = "user" }, { kind = "user" }, { kind = "user" }, { kind = "user" }, { kind = "user" }]
   ·        ───────────────────────────────────────────────┬───────────────────────────────────────────────
   ·                                                       ╰── here
 2 │ image = "debian-12"
   ╰────
  help: 4 at most
"#;
    assert_eq!(refused(&text), shown);
}
