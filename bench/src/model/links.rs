//! Assumed costs of links between hosts. None of them was measured by us; each has the source of its numbers.

use serde::Serialize;

/// A link, and the software that drives it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Link {
    /// Its usual name.
    pub name: &'static str,
    /// A small message from a thread of one host to one of another, software of both ends included,
    /// microseconds. None: as measured here over the loopback.
    pub message_us: Option<f64>,
    /// Additional time of a page of 4 KiB, microseconds.
    pub page_us: f64,
    /// CPU time of the replying node for a message and its reply, microseconds. None: that of a message over
    /// the loopback, which is software only.
    pub answer_cpu_us: Option<f64>,
    /// Origin of the numbers.
    pub source: &'static str,
}

/// All links.
pub const LINKS: [Link; 5] = [
    Link {
        name: "loopback, as here",
        message_us: None,
        page_us: 0.0,
        answer_cpu_us: None,
        source: "bare requests with 4 KiB back in bench/results/dsm.json; the page is in it",
    },
    Link {
        name: "1 Gb/s Ethernet",
        message_us: Some(17.0),
        page_us: 32.9,
        answer_cpu_us: None,
        source: "12 us from program to program over TCP without a switch (Feng and others, SC 2003, on a \
                 10 Gb/s adapter), 5 us for a switch of that time (EMP's figures, pw.padd.com/emp/raw); \
                 4,112 bytes at 1 Gb/s",
    },
    Link {
        name: "25 Gb/s Ethernet",
        message_us: Some(9.0),
        page_us: 1.3,
        answer_cpu_us: None,
        source: "18 us there and back on a ConnectX-6 with busy polling and without interrupt coalescing; \
                 120 us as distributions set it up \
                 (nikhilpadala.com/blog/network-optimization-linux-latency); 4,112 bytes at 25 Gb/s",
    },
    Link {
        name: "RDMA",
        message_us: Some(0.9),
        page_us: 1.4,
        answer_cpu_us: Some(0.5),
        source: "ib_send_lat, reliable connection: 0.83 us for 32 bytes, 2.26 for 4 KiB (D. Potter, \
                 master's thesis, table of latency by MTU); CPU: a guess",
    },
    Link {
        name: "CXL memory for both",
        message_us: Some(0.7),
        page_us: 0.4,
        answer_cpu_us: Some(0.5),
        source: "a store and a load that misses, of 350 ns each: two to five times a DRAM's 100 ns \
                 (arXiv 2405.14209); the page written and read at 20 GB/s of the 32 of PCIe 5 x8; \
                 CPU: a guess",
    },
];
