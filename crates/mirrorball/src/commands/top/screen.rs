//! The screen of `mirrorball top`.
//!
//! From the top: a line of totals, a meter for each CPU, a line for each cell, the table, messages, and a
//! line of keys. Meters and cells take at most a quarter of the screen each; the tables have all of them.

use config::cpulist;
use operations::usage::{CellReading, CellState, CpuUse, Sample};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use super::state::{Mode, State};
use super::table::{Kind, Row, lines, loans, mib, percent, tenths, vcpu_names};
use crate::commands::events::time;

/// Smallest screen, in columns and lines.
pub(super) const SMALLEST: (u16, u16) = (60, 12);
/// Columns of a CPU's meter with the names of its vCPUs.
const METER_COLUMNS: u16 = 39;
/// Columns of a bar between its brackets.
const BAR_COLUMNS: usize = 18;
/// Lines that the totals, the name of the table, its head, the message and the keys take.
const FIXED_LINES: u16 = 5;

/// Most lines of a message.
const MESSAGE_LINES_MAX: usize = 3;
const WARNING: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

const KEYS: &str = "Tab table  <> sort  r reverse  / filter  m move  c cap  ? help  q quit";

const HELP: &[&str] = &[
    "Tab, 1 to 4    the next table; vCPUs, VMs, CPUs, cells",
    "arrows, j, k   select a row; PageUp, PageDown, Home, End",
    "left, right    show columns further left or right",
    "< and >        sort by the column before, by the next column",
    "r              reverse the order",
    "/              show rows with this text only; Escape ends that",
    "m              move the selected vCPU: `to 3`, `cell 1`, `cpu 2-3`, `cpu all`",
    "c              limit the CPUs of the selected VM: `1.5`, `none`",
    "q, Ctrl-C      quit",
    "",
    "RUN, WAIT, SPIN and HALT are in % of one CPU. A dash is a figure that",
    "nobody reports. A star marks a pin; behind the name of a vCPU it marks",
    "one that may run on no other CPU.",
];

/// Heights of the parts of a screen, in lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heights {
    pub(super) cpus: u16,
    pub(super) cells: u16,
    /// Rows of the table.
    pub(super) rows: u16,
}

/// Divides a screen of this size.
pub(super) fn heights(area: Rect, cpus: usize, cells: usize) -> Heights {
    let part = |lines: usize| {
        let most = area.height / 4;
        u16::try_from(lines).unwrap_or(u16::MAX).min(most)
    };
    let cpus = part(cpus.div_ceil(usize::from(meters(area))));
    let cells = part(cells);
    let rows = area.height.saturating_sub(FIXED_LINES + cpus + cells);
    Heights { cpus, cells, rows }
}

/// Number of meters in a line.
fn meters(area: Rect) -> u16 {
    (area.width / METER_COLUMNS).max(1)
}

/// The whole screen.
pub(super) struct Screen<'a> {
    /// The last sample; none before the first.
    pub(super) sample: Option<&'a Sample>,
    /// State of the view.
    pub(super) state: &'a State,
    /// The rows of the table.
    pub(super) rows: &'a [Row],
}

impl Widget for Screen<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let (columns, lines) = SMALLEST;
        if area.width < columns || area.height < lines {
            let text = format!(
                "terminal too small: {}x{}, {columns}x{lines} needed",
                area.width, area.height
            );
            put(buffer, area, 0, Line::from(text));
            return;
        }
        if self.state.mode == Mode::Help {
            for (line, text) in (0..).zip(HELP) {
                put(buffer, area, line, Line::from(*text));
            }
            let line = area.height - 1;
            put(buffer, area, line, bold("any key goes back".to_owned()));
            return;
        }
        let mut next = 0;
        let mut line = |line: Line<'_>| {
            put(buffer, area, next, line);
            next += 1;
        };
        let Some(sample) = self.sample else {
            line(bold("mirrorball top: reading".to_owned()));
            return;
        };
        let heights = heights(area, sample.cpus.len(), sample.cells.len());
        line(totals(sample));
        for row in 0..usize::from(heights.cpus) {
            line(meter_line(&sample.cpus, row, area, heights.cpus));
        }
        for (index, cell) in sample.cells.iter().enumerate().take(usize::from(heights.cells)) {
            let is_cut = index + 1 == usize::from(heights.cells) && sample.cells.len() > index + 1;
            line(if is_cut {
                Line::from(format!("{} more cells: 4 shows them", sample.cells.len() - index))
            } else {
                cell_line(cell)
            });
        }
        line(tables(self.state));
        self.table(&mut line, heights.rows);
        below(buffer, area, sample, self.state);
        put(buffer, area, area.height - 1, dim(KEYS.to_owned()));
    }
}

impl Screen<'_> {
    fn table(&self, line: &mut impl FnMut(Line<'static>), height: u16) {
        let (head, rows) = lines(self.state.kind.columns(), self.rows);
        let shifted = |text: &str| text.chars().skip(self.state.shift).collect::<String>();
        line(bold(shifted(&head)));
        let selected = self.state.selected(self.rows);
        let height = usize::from(height);
        for (index, row) in rows
            .iter()
            .enumerate()
            .skip(first_row(selected, height))
            .take(height)
        {
            let text = shifted(row);
            line(if Some(index) == selected {
                Line::styled(text, Style::new().add_modifier(Modifier::REVERSED))
            } else {
                Line::from(text)
            });
        }
    }
}

/// Index of the first row that is shown, so that the selected one is on the screen.
fn first_row(selected: Option<usize>, height: usize) -> usize {
    (selected.unwrap_or(0) + 1).saturating_sub(height)
}

fn put(buffer: &mut Buffer, area: Rect, line: u16, text: Line<'_>) {
    if line < area.height {
        buffer.set_line(area.x, area.y + line, &text, area.width);
    }
}

fn bold(text: String) -> Line<'static> {
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn dim(text: String) -> Line<'static> {
    Line::styled(text, Style::new().add_modifier(Modifier::DIM))
}

fn totals(sample: &Sample) -> Line<'static> {
    let count =
        |count: usize, one: &str, many: &str| format!("{count} {}", if count == 1 { one } else { many });
    let mut text = format!(
        "mirrorball top  {}  {}, {}, {}",
        time(sample.unix_ms).get(11..19).unwrap_or_default(),
        count(sample.cells.len(), "cell", "cells"),
        count(sample.vms.len(), "VM", "VMs"),
        count(sample.vcpus.len(), "vCPU", "vCPUs"),
    );
    if let Some(interval_ms) = sample.interval_ms {
        text.push_str(&format!("  over {} s", tenths(interval_ms)));
    }
    bold(text)
}

/// Line `row` of the meters, which go down first, then right.
fn meter_line(cpus: &[CpuUse], row: usize, area: Rect, height: u16) -> Line<'static> {
    let (height, columns) = (usize::from(height), usize::from(meters(area)));
    let width = usize::from(area.width) / columns;
    let mut line = Line::default();
    let shown = height * columns;
    for column in 0..columns {
        let index = column * height + row;
        if index + 1 == shown && cpus.len() > shown {
            line.push_span(Span::raw(format!(
                "{} more CPUs: 3 shows them",
                cpus.len() + 1 - shown
            )));
        } else if let Some(cpu) = cpus.get(index) {
            meter(cpu, width)
                .into_iter()
                .for_each(|span| line.push_span(span));
        }
    }
    line
}

/// A CPU's number, its bar and its vCPUs, in `width` columns.
fn meter(cpu: &CpuUse, width: usize) -> Vec<Span<'static>> {
    let busy = cpu
        .busy_milli
        .map_or_else(|| "-".to_owned(), |milli| percent(milli) + "%");
    let share = cpu.busy_milli.unwrap_or(0);
    let head = format!("{:>3} ", cpu.cpu);
    let bar = bar(share, 1000, &busy);
    let used = head.len() + BAR_COLUMNS + 3;
    let names: String = vcpu_names(cpu)
        .chars()
        .take(width.saturating_sub(used + 1))
        .collect();
    let names = format!(" {names:<width$}", width = width.saturating_sub(used));
    let mut spans = vec![Span::raw(head)];
    spans.extend(bar);
    spans.push(Span::raw(names));
    spans
}

/// A bar of `part` in `whole`, with a text at its right end.
fn bar(part: u64, whole: u64, text: &str) -> [Span<'static>; 4] {
    let columns = part.min(whole) * BAR_COLUMNS as u64;
    let filled = columns.checked_div(whole).unwrap_or(0) as usize;
    let text: String = text.chars().take(BAR_COLUMNS).collect();
    let room = BAR_COLUMNS - text.chars().count();
    let drawn = format!("{:<room$}{text}", "|".repeat(filled.min(room)), room = room);
    let split = filled.min(BAR_COLUMNS);
    let (full, rest): (String, String) = (
        drawn.chars().take(split).collect(),
        drawn.chars().skip(split).collect(),
    );
    let colour = Style::new().fg(Color::Green);
    [
        Span::raw("["),
        Span::styled(full, colour),
        Span::raw(rest),
        Span::raw("]"),
    ]
}

fn cell_line(cell: &CellReading) -> Line<'static> {
    let state = cell.state.map_or("-", CellState::word);
    let head = format!("cell {:<3} {state:<8} ", cell.cell);
    let is_well = matches!(cell.state, None | Some(CellState::Runs | CellState::Cordoned));
    let mut line = if is_well {
        Line::from(head)
    } else {
        Line::styled(head, WARNING)
    };
    match (cell.given_bytes, cell.memory_bytes, cell.free_bytes) {
        (Some(given), Some(memory), _) => {
            let text = format!("{}/{}", mib(given), mib(memory));
            bar(given, memory, &text)
                .into_iter()
                .for_each(|span| line.push_span(span));
        }
        (_, Some(memory), _) => line.push_span(Span::raw(format!("{} of memory", mib(memory)))),
        (_, _, Some(free)) => line.push_span(Span::raw(format!("{} free", mib(free)))),
        _ => {}
    }
    line.push_span(Span::raw(format!(" CPUs {}", cpulist::write(&cell.cpus))));
    if let Some(vcpus) = cell.vcpus {
        line.push_span(Span::raw(format!("; {vcpus} vCPUs")));
    }
    for (what, parts, word) in [("lent", &cell.lent, "to"), ("borrowed", &cell.borrowed, "of")] {
        if let Some(parts) = parts.as_deref().filter(|parts| !parts.is_empty()) {
            line.push_span(Span::raw(format!("; {what} {}", loans(parts, word))));
        }
    }
    if let Some(counts) = &cell.cpu_lending {
        line.push_span(Span::raw(format!(
            "; vCPUs moved {}, returned {}, recalled {}, refused {}",
            counts.moved, counts.returned, counts.recalled, counts.refused
        )));
    }
    line
}

/// Names of the tables, the shown one in brackets, with its order and its filter.
fn tables(state: &State) -> Line<'static> {
    let mut text = String::new();
    for kind in Kind::ALL {
        text.push_str(&if kind == state.kind {
            format!("[{}] ", kind.title())
        } else {
            format!(" {}  ", kind.title())
        });
    }
    let sort = state.sort();
    let arrow = if sort.is_descending { "down" } else { "up" };
    text.push_str(&format!(
        " sort: {} {arrow}",
        state.kind.columns()[sort.column].title
    ));
    if !state.filter.is_empty() {
        text.push_str(&format!("  filter: {}", state.filter));
    }
    Line::styled(text, Style::new().fg(Color::Cyan))
}

/// Writes the lines above the keys: an input, the last message, or the sources without figures. A long text
/// covers the last rows of the table.
fn below(buffer: &mut Buffer, area: Rect, sample: &Sample, state: &State) {
    let (text, style) = message(sample, state);
    let text: Vec<char> = text.chars().collect();
    let lines: Vec<String> = text
        .chunks(usize::from(area.width))
        .take(MESSAGE_LINES_MAX)
        .map(|line| line.iter().collect())
        .collect();
    let first = (area.height - 1).saturating_sub(lines.len() as u16);
    for (line, text) in (first..).zip(lines) {
        let padded = format!("{text:<width$}", width = usize::from(area.width));
        put(buffer, area, line, Line::styled(padded, style));
    }
}

fn message(sample: &Sample, state: &State) -> (String, Style) {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let message = || {
        if state.message.is_empty() {
            String::new()
        } else {
            format!("  ({})", state.message)
        }
    };
    let text = match &state.mode {
        Mode::Filter => format!("filter: {}_", state.filter),
        Mode::Move(vm, vcpu) => {
            format!("move vCPU {vcpu} of {vm} to: {}_{}", state.input, message())
        }
        Mode::Cap(vm) => format!("CPUs of {vm} at most: {}_{}", state.input, message()),
        Mode::Browse | Mode::Help if !state.message.is_empty() => state.message.clone(),
        Mode::Browse | Mode::Help => {
            let unknown = sample.unknown.iter();
            let unknown: Vec<String> = unknown
                .map(|unknown| format!("{}: {}", unknown.source, unknown.why))
                .collect();
            return (unknown.join("; "), WARNING);
        }
    };
    (text, bold)
}
