//! A packet between a monitor and a VM's keeper, of which either may have been replaced by another program.

use keeper::message::{Message, PACKET_BYTES_MAX};

pub fn fuzz(packet: &[u8]) {
    let Ok((request, message)) = Message::read(packet) else {
        return;
    };
    assert!(packet.len() <= PACKET_BYTES_MAX);
    let written = message.write(request).expect("a message that was read");
    let read = Message::read(&written).expect("a message that was written");
    // The texts of errors are shortened.
    if !matches!(message, Message::Failed { .. }) {
        assert_eq!(written, packet, "{message:?}");
        assert_eq!(read, (request, message));
    }
}
