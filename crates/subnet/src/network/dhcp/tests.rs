use super::*;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 9);
const DISCOVER: u8 = 1;
const REQUEST: u8 = 3;
const OPTIONS_AT: usize = 240;

/// Returns a message as `udhcpc` and others send it, with these options.
fn message(kind: u8, options: &[(u8, &[u8])]) -> Vec<u8> {
    let mut message = vec![0; OPTIONS_AT];
    message[..4].copy_from_slice(&[1, 1, 6, 0]);
    message[4..8].copy_from_slice(&[0xde, 0xad, 0xbe, 0xef]);
    message[28..34].copy_from_slice(&MAC);
    message[236..].copy_from_slice(&[0x63, 0x82, 0x53, 0x63]);
    message.extend([53, 1, kind]);
    for (number, data) in options {
        message.extend([*number, data.len() as u8]);
        message.extend(*data);
    }
    message.push(255);
    message
}

fn answer(message: &[u8], settings: &Settings) -> Option<Reply> {
    let client = Client {
        mac: MAC,
        address: ADDRESS,
        name: "web-1",
        outside: settings.outside,
    };
    reply(message, client, settings)
}

fn default_answer(message: &[u8]) -> Option<Reply> {
    answer(message, &Settings::new("test"))
}

fn option(reply: &Reply, number: u8) -> Option<Vec<u8>> {
    let packet = DhcpPacket::new_checked(&reply.message[..]).unwrap();
    let mut options = packet.options();
    options
        .find(|option| option.kind == number)
        .map(|option| option.data.to_vec())
}

fn kind(reply: &Reply) -> u8 {
    option(reply, 53).unwrap()[0]
}

#[test]
fn offer_names_all_that_a_guest_needs() {
    let settings = Settings {
        mtu: 9000,
        ..Settings::new("test")
    };
    let reply = answer(&message(DISCOVER, &[]), &settings).unwrap();
    assert_eq!((kind(&reply), reply.destination), (2, ADDRESS));
    let packet = DhcpPacket::new_checked(&reply.message[..]).unwrap();
    assert_eq!(packet.transaction_id(), 0xdead_beef);
    assert_eq!(packet.your_ip(), ADDRESS);
    assert_eq!(packet.client_hardware_address(), EthernetAddress(MAC));
    let expected: [(u8, &[u8]); 9] = [
        (1, &[255, 255, 0, 0]),
        (3, &[10, 213, 0, 1]),
        (6, &[10, 213, 0, 1]),
        (12, b"web-1"),
        (15, b"vm.internal"),
        (26, &[0x23, 0x28]),
        (51, &[0, 1, 0x51, 0x80]),
        (54, &[10, 213, 0, 1]),
        (53, &[2]),
    ];
    for (number, data) in expected {
        assert_eq!(option(&reply, number).as_deref(), Some(data), "option {number}");
    }
    assert!(reply.message.len() >= 300);
}

#[test]
fn request_of_another_address_is_refused() {
    let wanted = ADDRESS.octets();
    let reply = default_answer(&message(REQUEST, &[(50, &wanted), (54, &[10, 213, 0, 1])])).unwrap();
    assert_eq!((kind(&reply), reply.destination), (5, ADDRESS));
    let reply = default_answer(&message(REQUEST, &[(50, &[10, 213, 0, 8])])).unwrap();
    assert_eq!((kind(&reply), reply.destination), (6, Ipv4Addr::BROADCAST));
    assert_eq!(reply.message[16..20], [0; 4], "no address");
    assert_eq!(option(&reply, 51), None);
    // Without any address, it is refused too.
    assert_eq!(kind(&default_answer(&message(REQUEST, &[])).unwrap()), 6);
}

#[test]
fn renewal_and_information_go_to_the_clients_address() {
    let mut renewal = message(REQUEST, &[]);
    renewal[12..16].copy_from_slice(&ADDRESS.octets());
    // A client with an address needs no broadcast.
    renewal[10] = 0x80;
    let reply = default_answer(&renewal).unwrap();
    assert_eq!((kind(&reply), reply.destination), (5, ADDRESS));
    let mut information = message(8, &[]);
    information[12..16].copy_from_slice(&ADDRESS.octets());
    let reply = default_answer(&information).unwrap();
    assert_eq!((kind(&reply), reply.destination), (5, ADDRESS));
    assert_eq!(reply.message[16..20], [0; 4]);
    assert_eq!(option(&reply, 51), None);
}

#[test]
fn client_that_requests_a_broadcast_gets_one_and_its_identifier_back() {
    let mut discover = message(DISCOVER, &[(61, &[255, 1, 2, 3, 4, 5, 6, 7, 8])]);
    discover[10] = 0x80;
    let reply = default_answer(&discover).unwrap();
    assert_eq!(reply.destination, Ipv4Addr::BROADCAST);
    assert_eq!(option(&reply, 61).unwrap(), [255, 1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn messages_that_are_not_for_this_server_get_no_reply() {
    let good = message(DISCOVER, &[]);
    let changed = |at: usize, byte: u8| {
        let mut message = good.clone();
        message[at] = byte;
        default_answer(&message)
    };
    assert_eq!(changed(0, 2), None, "a reply");
    assert_eq!(changed(1, 6), None, "other hardware");
    assert_eq!(changed(2, 16), None, "a longer address");
    assert_eq!(changed(33, 2), None, "another card's");
    assert_eq!(changed(236, 0), None, "no DHCP");
    let other = message(REQUEST, &[(50, &ADDRESS.octets()), (54, &[10, 213, 0, 2])]);
    assert_eq!(default_answer(&other), None, "another server's");
    for kind in [0, 2, 4, 5, 6, 7, 9] {
        assert_eq!(default_answer(&message(kind, &[])), None, "kind {kind}");
    }
    for end in 0..OPTIONS_AT + 3 {
        assert_eq!(default_answer(&good[..end]), None);
    }
}
