//! What the guest sends: its packets, and its requests to be connected to a socket of the host.

use super::*;

impl VsockHandler {
    /// Takes the guest's packets.
    pub(super) fn drain(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let mut packets = 0;
        if let Some(running) = &mut self.running {
            running
                .tx
                .queue
                .disable_notification(&*running.memory)
                .map_err(protocol)?;
        }
        loop {
            let Some(running) = &mut self.running else {
                return Ok(());
            };
            let memory = running.memory.clone();
            if packets >= PACKETS_PER_EVENT {
                running
                    .tx
                    .notify
                    .write(1)
                    .map_err(host("waking the device's thread"))?;
                break;
            }
            let tx = &mut running.tx.queue;
            let Some(chain) = tx.iter(&*memory).map_err(protocol)?.next() else {
                if tx.enable_notification(&*memory).map_err(protocol)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            self.chain.clear();
            self.chain.append(&memory, chain, Direction::FromDriver)?;
            let mut bytes = [0; HEADER_BYTES];
            if self.chain.read_at(0, &mut bytes) < HEADER_BYTES {
                return Err(DeviceError::Protocol(
                    "a packet without a whole header".to_owned(),
                ));
            }
            let header = Header::read(&bytes);
            let length = header.len as usize;
            if length > PAYLOAD_BYTES_MAX || self.chain.bytes() - HEADER_BYTES < length {
                return Err(DeviceError::Protocol(format!(
                    "a packet of {length} bytes does not fit its buffer"
                )));
            }
            self.chain.read_at(HEADER_BYTES, &mut self.scratch[..length]);
            tx.add_used(&*memory, head, 0).map_err(protocol)?;
            packets += 1;
            self.packet(header, length, sources)?;
        }
        if let Some(running) = &mut self.running
            && packets > 0
        {
            signal(&mut running.tx, &running.memory, &*running.interrupt)?;
        }
        Ok(())
    }

    /// Serves one packet; its payload is the first `length` bytes of the scratch buffer.
    fn packet(&mut self, header: Header, length: usize, sources: &Sources) -> Result<(), DeviceError> {
        let ports = (header.dst_port, header.src_port);
        if header.src_cid != self.cid {
            // Nobody to answer.
            return Ok(());
        }
        let known = self.by_ports.get(&ports).copied();
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            if header.op != op::RST {
                self.reset(ports);
            }
            return Ok(());
        }
        let index = match (known, header.op) {
            (None, op::REQUEST) => return self.open(ports, header, sources),
            (None, op::RST) => return Ok(()),
            (None, _) => {
                self.reset(ports);
                return Ok(());
            }
            (Some(index), _) => index,
        };
        let Some(Entry {
            stream,
            phase: Phase::Connected { connection, .. },
            deadline,
            ..
        }) = &mut self.entries[index]
        else {
            return Ok(());
        };
        let payload = &self.scratch[..length];
        match connection.receive(header.op, header.flags, header.buf_alloc, header.fwd_cnt, payload) {
            Ok(true) => {
                *deadline = None;
                add(&self.metrics.opened, 1);
                let line = format!("OK {}\n", ports.0);
                // The socket is fresh: a short line fits, or the client is gone.
                if !matches!(peer::send(stream, line.as_bytes()), Ok(count) if count == line.len()) {
                    self.refuse(index);
                    return Ok(());
                }
            }
            Ok(false) => {
                if header.op == op::RW {
                    add(&self.metrics.tx_bytes, length);
                }
            }
            Err(_) => {
                self.refuse(index);
                return Ok(());
            }
        }
        self.service(index, sources)
    }

    /// Connects the guest to a socket of the host.
    fn open(&mut self, ports: Ports, header: Header, sources: &Sources) -> Result<(), DeviceError> {
        let stream = self
            .ports
            .as_ref()
            .and_then(|directory| peer::connect(&directory.join(ports.0.to_string())).ok());
        let Some(stream) = stream else {
            self.reset(ports);
            return Ok(());
        };
        let connection = Connection::accept(header.buf_alloc, header.fwd_cnt);
        let Some(index) = self.insert(stream, Phase::Connected { ports, connection }, sources)? else {
            self.reset(ports);
            return Ok(());
        };
        if let Some(entry) = &mut self.entries[index] {
            entry.deadline = None;
        }
        add(&self.metrics.opened, 1);
        self.service(index, sources)
    }
}
