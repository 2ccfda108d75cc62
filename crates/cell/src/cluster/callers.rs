//! Bounds on connections from callers that have not proven yet which host they are.
//!
//! Any machine on the network can open connections. A new caller therefore never waits for a slot: when its
//! address, or the whole listener, has too many, the oldest of them is closed. A host proves itself within
//! milliseconds, and leaves its slot then; one that takes longer than [`HANDSHAKE_LIMIT`] is closed in any
//! case. Callers that have proven who they are don't count here.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use locks::IgnorePoison;

/// Time limit for the handshake and the first message of a caller together.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);
/// Maximum number of unproven callers.
const UNPROVEN_MAX: usize = 256;
/// Maximum number of unproven callers from one address. It is less than [`UNPROVEN_MAX`], so that no address
/// takes the slots of the others.
const UNPROVEN_OF_ADDRESS_MAX: usize = 64;

/// The unproven callers of one listener.
#[derive(Clone, Debug, Default)]
pub struct Callers(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    /// The callers, oldest first.
    callers: BTreeMap<u64, (IpAddr, TcpStream)>,
}

/// A caller's slot until it has proven which host it is. Dropping it frees the slot.
#[derive(Debug)]
pub struct Unproven {
    callers: Callers,
    number: u64,
}

impl Callers {
    /// Takes a slot for a new caller. The connection whose slot it takes, if any, is closed.
    ///
    /// # Errors
    /// If the caller is gone, or this process has no file descriptor left.
    pub fn admit(&self, tcp: &TcpStream) -> io::Result<Unproven> {
        let (address, closer) = (tcp.peer_addr()?.ip(), tcp.try_clone()?);
        let mut waiting = self.lock();
        let addresses = waiting.callers.iter().map(|(number, (of, _))| (*number, *of));
        if let Some(oldest) = surplus(addresses, address)
            && let Some((_, closed)) = waiting.callers.remove(&oldest)
        {
            let _ = closed.shutdown(Shutdown::Both);
        }
        let number = waiting.next;
        waiting.next += 1;
        waiting.callers.insert(number, (address, closer));
        Ok(Unproven {
            callers: self.clone(),
            number,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().ignore_poison()
    }
}

impl Drop for Unproven {
    fn drop(&mut self) {
        self.callers.lock().callers.remove(&self.number);
    }
}

/// The caller that is closed for a new one from `new`: the oldest from that address if the address has its
/// maximum, the oldest of all if no slot is left. `callers` are sorted, the oldest first.
fn surplus(callers: impl Iterator<Item = (u64, IpAddr)>, new: IpAddr) -> Option<u64> {
    let (mut all, mut same) = (0, 0);
    let (mut oldest, mut oldest_same) = (None, None);
    for (number, address) in callers {
        all += 1;
        oldest = oldest.or(Some(number));
        if address == new {
            same += 1;
            oldest_same = oldest_same.or(Some(number));
        }
    }
    if same >= UNPROVEN_OF_ADDRESS_MAX {
        oldest_same
    } else {
        oldest.filter(|_| all >= UNPROVEN_MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn an_address_with_its_share_of_callers_loses_its_own_oldest() {
        let crowd = |count| (10..10 + count as u64).map(|number| (number, address(1)));
        let with_other = |count| std::iter::once((3, address(2))).chain(crowd(count));
        let share = UNPROVEN_OF_ADDRESS_MAX;
        assert_eq!(surplus(with_other(share - 1), address(1)), None);
        assert_eq!(surplus(with_other(share), address(1)), Some(10));
        assert_eq!(surplus(with_other(share), address(2)), None);
    }

    #[test]
    fn a_full_listener_loses_its_oldest_caller() {
        let all = |count: usize| (0..count).map(|number| (number as u64, address((number % 250) as u8)));
        assert_eq!(surplus(all(UNPROVEN_MAX - 1), address(251)), None);
        assert_eq!(surplus(all(UNPROVEN_MAX), address(251)), Some(0));
    }

    #[test]
    fn connection_whose_slot_is_taken_is_closed_and_slots_are_given_back() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let callers = Callers::default();
        let mut taken = Vec::new();
        for _ in 0..=UNPROVEN_OF_ADDRESS_MAX {
            let near = TcpStream::connect(address).unwrap();
            near.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let far = listener.accept().unwrap().0;
            let place = callers.admit(&far).unwrap();
            taken.push((near, far, place));
        }
        assert_eq!(taken[0].0.read(&mut [0]).unwrap(), 0, "the first one is closed");
        taken[1].0.set_nonblocking(true).unwrap();
        let error = taken[1].0.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(callers.lock().callers.len(), UNPROVEN_OF_ADDRESS_MAX);
        taken.clear();
        assert!(callers.lock().callers.is_empty());
    }
}
