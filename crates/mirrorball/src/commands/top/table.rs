//! The tables of `mirrorball top`: rows of cells, CPUs, VMs and vCPUs, for the screen and for plain text.
//!
//! A figure that is unknown is a dash, and sorts behind all others.

use std::cmp::Ordering;

use config::cpulist;
use operations::usage::{CellReading, CpuUse, MovedBy, Sample, VcpuUse, VmUse};
use registry::cluster::interface::{CpuLending, LentMemory};

/// Text of a figure that is unknown, or of a thing that is not there.
const NONE: &str = "-";

/// Kind of a table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Vcpus,
    Vms,
    Cpus,
    Cells,
}

impl Kind {
    /// All kinds, in the order of the screen.
    pub(super) const ALL: [Self; 4] = [Self::Vcpus, Self::Vms, Self::Cpus, Self::Cells];

    /// The word for its rows.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Vcpus => "vCPUs",
            Self::Vms => "VMs",
            Self::Cpus => "CPUs",
            Self::Cells => "cells",
        }
    }

    /// The columns of its table.
    pub(super) fn columns(self) -> &'static [Column] {
        match self {
            Self::Vcpus => VCPUS,
            Self::Vms => VMS,
            Self::Cpus => CPUS,
            Self::Cells => CELLS,
        }
    }

    /// The rows of its table, in the order of the sample.
    pub(super) fn rows(self, sample: &Sample) -> Vec<Row> {
        match self {
            Self::Vcpus => sample.vcpus.iter().map(vcpu).collect(),
            Self::Vms => sample.vms.iter().map(vm).collect(),
            Self::Cpus => sample.cpus.iter().map(cpu).collect(),
            Self::Cells => sample.cells.iter().map(cell).collect(),
        }
    }
}

/// Title, width and order of a table's column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// Whether its entries begin at the left.
    pub(super) is_left: bool,
    /// Whether sorting by it begins with the greatest.
    pub(super) is_descending: bool,
    /// Smallest width, in characters.
    width: usize,
}

/// Width of figures: columns stay where they are while a figure changes.
const FIGURE_COLUMNS: usize = 6;

/// A column of names.
const fn name(title: &'static str) -> Column {
    Column {
        title,
        is_left: true,
        is_descending: false,
        width: 0,
    }
}

/// A column of numbers that name something.
const fn number(title: &'static str) -> Column {
    Column {
        title,
        is_left: false,
        is_descending: false,
        width: 0,
    }
}

/// A column of figures.
const fn figure(title: &'static str) -> Column {
    Column {
        title,
        is_left: false,
        is_descending: true,
        width: FIGURE_COLUMNS,
    }
}

const VCPUS: &[Column] = &[
    name("VM"),
    number("VCPU"),
    number("CELL"),
    number("CPU"),
    name("CPUS"),
    figure("RUN%"),
    figure("WAIT%"),
    figure("SPIN%"),
    figure("HALT%"),
    figure("HALTS/S"),
    figure("EXITS/S"),
    figure("MIGR"),
];

const VMS: &[Column] = &[
    name("VM"),
    name("STATE"),
    number("CELL"),
    figure("VCPUS"),
    figure("RUN%"),
    figure("WAIT%"),
    figure("SPIN%"),
    figure("HALT%"),
    figure("MIGR"),
    figure("LIMIT"),
    figure("RESV"),
    figure("WEIGHT"),
    figure("MEMORY"),
    figure("HOST"),
    figure("SWAPPED"),
    name("BORROWED"),
];

const CPUS: &[Column] = &[
    number("CPU"),
    number("CELL"),
    figure("BUSY%"),
    name("GANG"),
    figure("QUEUE"),
    figure("LOAD%"),
    figure("MOVES"),
    figure("REFUSED"),
    name("VCPUS"),
];

const CELLS: &[Column] = &[
    number("CELL"),
    name("HOST"),
    name("STATE"),
    name("CPUS"),
    figure("VCPUS"),
    figure("MEMORY"),
    figure("GIVEN"),
    figure("FREE"),
    figure("SOUGHT"),
    figure("MOVED"),
    figure("RETURNED"),
    figure("RECALLED"),
    figure("REFUSED"),
    name("LENT"),
    name("BORROWED"),
    name("VMS"),
];

/// The thing that a row is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RowId {
    /// A vCPU, by its VM's name and its number.
    Vcpu(String, u8),
    /// A VM, by its name.
    Vm(String),
    /// A CPU of the host, by its number.
    Cpu(usize),
    /// A cell, by its number.
    Cell(u16),
}

/// Place of an entry among those of its column.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Number(u64),
    Text(String),
    Unknown,
}

/// Text of a row in a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) text: String,
    rank: Rank,
}

impl Entry {
    fn text(text: impl Into<String>) -> Self {
        let text = text.into();
        let rank = match &text[..] {
            "" | NONE => Rank::Unknown,
            _ => Rank::Text(text.clone()),
        };
        let text = if text.is_empty() { NONE.to_owned() } else { text };
        Self { text, rank }
    }

    fn number(number: Option<u64>, write: impl Fn(u64) -> String) -> Self {
        match number {
            Some(number) => Self {
                text: write(number),
                rank: Rank::Number(number),
            },
            None => Self::text(NONE),
        }
    }

    fn count(number: Option<impl Into<u64>>) -> Self {
        Self::number(number.map(Into::into), |number| number.to_string())
    }

    /// A share of time, as a percentage of one CPU.
    fn share(milli: Option<u64>) -> Self {
        Self::number(milli, percent)
    }

    fn bytes(bytes: Option<u64>) -> Self {
        Self::number(bytes, mib)
    }
}

/// A row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// The thing that it is about.
    pub(super) id: RowId,
    /// Its entries, one for each column.
    pub(super) entries: Vec<Entry>,
    /// The text that a filter looks into.
    pub(super) subject: String,
}

impl Row {
    /// Orders rows by a column: unknown figures are the last, whatever the direction.
    pub(super) fn compare(&self, other: &Self, column: usize, is_descending: bool) -> Ordering {
        match (&self.entries[column].rank, &other.entries[column].rank) {
            (Rank::Unknown, Rank::Unknown) => Ordering::Equal,
            (Rank::Unknown, _) => Ordering::Greater,
            (_, Rank::Unknown) => Ordering::Less,
            (one, other) if is_descending => other.cmp(one),
            (one, other) => one.cmp(other),
        }
    }
}

/// Formats a share of time as a percentage.
pub(super) fn percent(milli: u64) -> String {
    format!("{}.{}", milli / 10, milli % 10)
}

/// Formats milliseconds as seconds, rounded to a tenth.
pub(super) fn tenths(ms: u64) -> String {
    let tenths = ms.saturating_add(50) / 100;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// Formats bytes in MiB.
pub(super) fn mib(bytes: u64) -> String {
    format!("{}M", bytes >> 20)
}

/// Formats loans: `64M to 1`, with `word` before the cell.
pub(super) fn loans(loans: &[LentMemory], word: &str) -> String {
    let loan = |loan: &LentMemory| format!("{} {word} {}", mib(loan.bytes), loan.cell);
    loans.iter().map(loan).collect::<Vec<_>>().join(", ")
}

fn vcpu(vcpu: &VcpuUse) -> Row {
    let read = &vcpu.reading;
    let cell = Entry::count(read.cell);
    let cell = match vcpu.moved_from {
        Some(from) => Entry {
            text: format!("{from}>{}", cell.text),
            ..cell
        },
        None => cell,
    };
    let mark = if read.is_pinned { "*" } else { "" };
    let cpus = read
        .cpus
        .as_deref()
        .map(|cpus| format!("{}{mark}{}", cpulist::write(cpus), mover(read.moved_by)));
    Row {
        entries: vec![
            Entry::text(&read.vm),
            Entry::count(Some(read.vcpu)),
            cell,
            Entry::count(read.last_cpu.map(|cpu| cpu as u64)),
            Entry::text(cpus.unwrap_or_default()),
            Entry::share(vcpu.run_milli),
            Entry::share(vcpu.wait_milli),
            Entry::share(vcpu.spin_milli),
            Entry::share(vcpu.halt_milli),
            Entry::count(vcpu.halts_per_s),
            Entry::count(vcpu.exits_per_s),
            Entry::count(vcpu.migrated),
        ],
        subject: format!("{}/{}", read.vm, read.vcpu),
        id: RowId::Vcpu(read.vm.clone(), read.vcpu),
    }
}

/// Formats the reason why a vCPU is on a CPU of another cell, behind that CPU.
fn mover(moved_by: Option<MovedBy>) -> &'static str {
    match moved_by {
        Some(MovedBy::Decision) => " by decision",
        Some(MovedBy::Command) => " by command",
        None => "",
    }
}

fn vm(vm: &VmUse) -> Row {
    let read = &vm.reading;
    let cell = match &read.span[..] {
        [] => Entry::count(read.cell.or(read.host_cell)),
        cells => Entry {
            text: numbers(cells),
            ..Entry::count(read.cell)
        },
    };
    // Thousandths of a CPU, for the order.
    let permille = |cpus: Option<f64>| cpus.map(|cpus| (cpus * 1000.0) as u64);
    let (limit, reserved) = (permille(read.cpu_limit), permille(read.cpu_reservation));
    Row {
        entries: vec![
            Entry::text(&read.vm),
            Entry::text(read.state.word()),
            cell,
            Entry::count(Some(read.vcpus)),
            Entry::share(vm.run_milli),
            Entry::share(vm.wait_milli),
            Entry::share(vm.spin_milli),
            Entry::share(vm.halt_milli),
            Entry::count(vm.migrated),
            Entry::number(limit, |_| read.cpu_limit.unwrap_or_default().to_string()),
            Entry::number(reserved, |_| read.cpu_reservation.unwrap_or_default().to_string()),
            Entry::count(read.cpu_weight),
            Entry::bytes(Some(read.memory_bytes)),
            Entry::bytes(read.host_bytes),
            Entry::bytes(read.swapped_bytes),
            Entry::text(loans(&read.borrowed, "of")),
        ],
        subject: read.vm.clone(),
        id: RowId::Vm(read.vm.clone()),
    }
}

fn cpu(cpu: &CpuUse) -> Row {
    let queue = cpu.queue.clone().unwrap_or_default();
    let moves = queue.moves.unwrap_or_default();
    let moves = [moves.idle, moves.periodic, moves.ordered];
    let all: u64 = moves.iter().flatten().sum();
    let is_known = moves.iter().any(Option::is_some);
    let names = vcpu_names(cpu);
    Row {
        entries: vec![
            Entry::count(Some(cpu.cpu as u64)),
            Entry::text(numbers(&cpu.cells)),
            Entry::share(cpu.busy_milli),
            Entry::text(gang_text(queue.gang, queue.ungated)),
            Entry::count(queue.waiting),
            Entry::share(queue.load_milli),
            Entry::count(is_known.then_some(all)),
            Entry::count(queue.refused),
            Entry::text(&names),
        ],
        subject: format!("cpu {} {names}", cpu.cpu),
        id: RowId::Cpu(cpu.cpu),
    }
}

/// Formats the gang of a CPU and the vCPUs that Linux runs beside it: `web`, `web +2`, `+2`.
fn gang_text(gang: Option<String>, ungated: Option<u32>) -> String {
    let beside = ungated
        .filter(|count| *count > 0)
        .map(|count| format!("+{count}"));
    let parts: Vec<String> = gang.into_iter().chain(beside).collect();
    parts.join(" ")
}

/// Formats the vCPUs of a CPU: `web/0* web/1`, with a star for one that may run on no other CPU.
pub(super) fn vcpu_names(cpu: &CpuUse) -> String {
    let names = cpu.vcpus.iter().map(|vcpu| {
        let mark = if vcpu.is_bound { "*" } else { "" };
        format!("{}/{}{mark}", vcpu.vm, vcpu.vcpu)
    });
    names.collect::<Vec<_>>().join(" ")
}

fn cell(cell: &CellReading) -> Row {
    let told = |parts: &Option<Vec<LentMemory>>, word| {
        Entry::text(
            parts
                .as_deref()
                .map_or_else(String::new, |parts| loans(parts, word)),
        )
    };
    let vms = cell.vms.as_deref().unwrap_or_default().join(" ");
    let moves = |count: fn(&CpuLending) -> u64| Entry::count(cell.cpu_lending.as_ref().map(count));
    Row {
        entries: vec![
            Entry::count(Some(cell.cell)),
            Entry::text(cell.host.as_deref().unwrap_or_default()),
            Entry::text(cell.state.map_or(NONE, |state| state.word())),
            Entry::text(cpulist::write(&cell.cpus)),
            Entry::count(cell.vcpus),
            Entry::bytes(cell.memory_bytes),
            Entry::bytes(cell.given_bytes),
            Entry::bytes(cell.free_bytes),
            moves(|counts| counts.sought),
            moves(|counts| counts.moved),
            moves(|counts| counts.returned),
            moves(|counts| counts.recalled),
            moves(|counts| counts.refused),
            told(&cell.lent, "to"),
            told(&cell.borrowed, "of"),
            Entry::text(&vms),
        ],
        subject: format!("cell {} {vms}", cell.cell),
        id: RowId::Cell(cell.cell),
    }
}

fn numbers(cells: &[u16]) -> String {
    let numbers: Vec<String> = cells.iter().map(ToString::to_string).collect();
    numbers.join(",")
}

/// Formats the head of a table and its rows as lines of equal columns.
pub(super) fn lines(columns: &[Column], rows: &[Row]) -> (String, Vec<String>) {
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(index, column)| {
            let entries = rows.iter().map(|row| row.entries[index].text.chars().count());
            entries.fold(column.title.len().max(column.width), usize::max)
        })
        .collect();
    let line = |texts: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((column, width), text) in columns.iter().zip(&widths).zip(texts) {
            let padded = if column.is_left {
                format!("{text:<width$} ")
            } else {
                format!("{text:>width$} ")
            };
            line.push_str(&padded);
        }
        line.truncate(line.trim_end().len());
        line
    };
    let head = line(&mut columns.iter().map(|column| column.title));
    let row = |row: &Row| line(&mut row.entries.iter().map(|entry| &entry.text[..]));
    (head, rows.iter().map(row).collect())
}
