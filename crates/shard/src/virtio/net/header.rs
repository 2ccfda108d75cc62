//! The header before each frame, and the sizes that follow from it.

/// Bytes of `virtio_net_hdr_v1`, which Virtio 1 always uses (5.1.6).
pub const HEADER_BYTES: usize = 12;
/// Offset of `num_buffers` in the header.
pub const NUM_BUFFERS_OFFSET: usize = 10;
/// Bytes of destination, source and type of an Ethernet frame.
pub const ETHERNET_BYTES: usize = 14;
/// Bytes of the largest frame: an IP packet of 64 KiB with an Ethernet header and a VLAN tag.
pub const FRAME_BYTES_MAX: usize = ETHERNET_BYTES + 4 + 65_535;
/// Bytes of the largest frame without segmentation offload at the usual MTU of 1,500.
pub const FRAME_BYTES_PLAIN: usize = ETHERNET_BYTES + 4 + 1_500;
