//! The control queue. It has one command: the number of queue pairs in use (5.1.6.5.5).

use virtio_bindings::virtio_net as spec;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestMemoryMmap};

use crate::virtio::device::DeviceError;

const CTRL_MQ: u8 = 4;
const CTRL_MQ_PAIRS_SET: u8 = 0;

/// Serves the waiting commands. `set_pairs` returns whether it succeeded.
pub fn serve(
    memory: &GuestMemoryMmap<()>,
    queue: &mut Queue,
    mut set_pairs: impl FnMut(u16) -> bool,
) -> Result<bool, DeviceError> {
    let broken = |what: &str| DeviceError::Protocol(what.to_owned());
    let chains: Vec<_> = queue
        .iter(memory)
        .map_err(|error| broken(&error.to_string()))?
        .collect();
    for chain in &chains {
        let mut command = [0_u8; 4];
        let mut reader = chain
            .clone()
            .reader(memory)
            .map_err(|_| broken("a control buffer lies outside memory"))?;
        let known = std::io::Read::read_exact(&mut reader, &mut command).is_ok()
            && command[..2] == [CTRL_MQ, CTRL_MQ_PAIRS_SET]
            && set_pairs(u16::from_le_bytes([command[2], command[3]]));
        let status = chain
            .clone()
            .writable()
            .last()
            .filter(|descriptor| descriptor.len() > 0)
            .ok_or_else(|| broken("a control command without room for its status"))?;
        let answer = if known {
            spec::VIRTIO_NET_OK
        } else {
            spec::VIRTIO_NET_ERR
        } as u8;
        memory
            .write_obj(answer, status.addr())
            .map_err(|_| broken("a control status outside memory"))?;
        queue
            .add_used(memory, chain.head_index(), 1)
            .map_err(|error| broken(&error.to_string()))?;
    }
    Ok(!chains.is_empty())
}
