//! Uses of channels by cells in two processes: calls, a name that all agree on, a change that all receive.

pub mod agreement;
pub mod call;
mod link;

use bench::tables::{Column, Row, Table};

use crate::shootdown;

pub const CALLS: Table = Table {
    title: "a call between processes, one marshalled message each way",
    columns: &[
        Column::Ns("time, ns"),
        Column::Millions("64 at a time, million per second"),
    ],
    compared: false,
    rows: &[
        Row::new("both polling", &[Some(call::polling), Some(call::pipelined)]),
        Row::new("both blocked before", &[Some(call::blocked), None]),
    ],
};

pub const AGREEMENT: Table = Table {
    title: "two cells in two processes, beside Linux on the same two CPUs",
    columns: &[
        Column::Ns("time, ns"),
        Column::Millions("16 at a time, million per second"),
    ],
    compared: false,
    rows: &[
        Row::new(
            "a name claimed in two phases",
            &[Some(agreement::claim), Some(agreement::claims)],
        ),
        Row::new(
            "a name claimed, both blocked before",
            &[Some(agreement::claim_blocked), None],
        ),
        Row::new(
            "an entry changed in one phase, as a mapping is revoked",
            &[Some(agreement::change), Some(agreement::changes)],
        ),
        Row::new(
            "mprotect of a page that the other CPU has in its TLB",
            &[Some(shootdown::two_cpus), None],
        ),
        Row::new(
            "mprotect of a page that no other CPU has",
            &[Some(shootdown::one_cpu), None],
        ),
    ],
};
