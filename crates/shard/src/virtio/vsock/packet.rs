//! The header of a packet (5.10.6), 44 bytes, little endian.

/// Ports of a connection: the host's and the guest's.
pub type Ports = (u32, u32);

/// Length of a packet's header, bytes (Virtio 1.2, section 5.10.6).
pub const HEADER_BYTES: usize = 44;
/// Greatest size of a packet's payload, bytes.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// The host's context id.
pub const HOST_CID: u64 = 2;
/// Stream sockets, the only type served.
pub const TYPE_STREAM: u16 = 1;

/// Operations of a packet (5.10.6).
pub mod op {
    /// Requests a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// Refuses or resets a connection.
    pub const RST: u16 = 3;
    /// Announces that the sender will not send, or not receive, from now on.
    pub const SHUTDOWN: u16 = 4;
    /// Carries payload.
    pub const RW: u16 = 5;
    /// Carries the sender's credit.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Requests the receiver's credit.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flag of SHUTDOWN: the sender stops receiving.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// Flag of SHUTDOWN: the sender stops sending.
pub const SHUTDOWN_SEND: u32 = 2;

/// Header of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the specification")]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

impl Header {
    /// Creates a connection's header to the guest `cid`; its operation is filled in later.
    pub fn to_guest(cid: u64, (host_port, guest_port): Ports) -> Self {
        Self {
            src_cid: HOST_CID,
            dst_cid: cid,
            src_port: host_port,
            dst_port: guest_port,
            kind: TYPE_STREAM,
            ..Self::default()
        }
    }

    /// Reads a header.
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Self {
        let mut rest = &bytes[..];
        let mut take = |count: usize| {
            let (field, after) = rest.split_at(count);
            rest = after;
            field
                .iter()
                .rev()
                .fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
        };
        // Each field has the width that `take` reads for it.
        Self {
            src_cid: take(8),
            dst_cid: take(8),
            src_port: take(4) as u32,
            dst_port: take(4) as u32,
            len: take(4) as u32,
            kind: take(2) as u16,
            op: take(2) as u16,
            flags: take(4) as u32,
            buf_alloc: take(4) as u32,
            fwd_cnt: take(4) as u32,
        }
    }

    /// Writes a header.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let fields: [&[u8]; 10] = [
            &self.src_cid.to_le_bytes(),
            &self.dst_cid.to_le_bytes(),
            &self.src_port.to_le_bytes(),
            &self.dst_port.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &self.op.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.buf_alloc.to_le_bytes(),
            &self.fwd_cnt.to_le_bytes(),
        ];
        bytes
            .iter_mut()
            .zip(fields.into_iter().flatten())
            .for_each(|(byte, field)| *byte = *field);
        bytes
    }
}
