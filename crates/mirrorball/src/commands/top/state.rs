//! Meaning of the keys of `mirrorball top`: a state machine without a terminal.

use config::cpulist;
use operations::usage::Sample;

use super::table::{Kind, Row, RowId};

/// CPUs of a host are numbered below this.
const HOST_CPUS_MAX: usize = 1024;
/// Maximum length of an input, in characters.
const INPUT_CHARS_MAX: usize = 60;
/// Columns that one key shifts a table by.
const SHIFT: usize = 8;

/// Key of the terminal that has a meaning in some mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Key that writes a character; a command where no input is open.
    Char(char),
    /// One row up.
    Up,
    /// One row down.
    Down,
    PageUp,
    PageDown,
    /// The first row.
    Home,
    /// The last row.
    End,
    /// Columns further left.
    Left,
    /// Columns further right.
    Right,
    /// The next table.
    Tab,
    /// The table before.
    BackTab,
    /// End of an input.
    Enter,
    /// Ends an input without effect, or the filter.
    Escape,
    /// Removes a character of the input.
    Backspace,
    /// Ctrl-C, which ends the program in every mode.
    Interrupt,
}

/// Target of a vCPU's move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The cell with this number.
    Cell(u16),
    /// The CPU of the host with this number.
    Cpu(usize),
    /// CPUs of the host; all that the VM may use when empty.
    Cpus(Vec<usize>),
}

/// An order to a VM.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Order {
    /// Moves a vCPU to another cell or to a CPU, or pins it.
    Move { vm: String, vcpu: u8, to: Target },
    /// Limit the CPUs of a VM.
    Cap {
        vm: String,
        /// Host CPUs at most; none for no limit.
        limit: Option<f64>,
    },
}

/// Action of the caller after a key.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Effect {
    /// Nothing but draw.
    Draw,
    /// End the program.
    Quit,
    Give(Order),
}

/// Meaning of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Keys are commands.
    Browse,
    /// Keys are the text of the filter.
    Filter,
    /// Keys are the target of a vCPU's move.
    Move(String, u8),
    /// Keys are the limit of a VM.
    Cap(String),
    /// The help is shown.
    Help,
}

/// Order of a table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sort {
    /// Index of the column.
    pub(super) column: usize,
    /// Whether the greatest comes first.
    pub(super) is_descending: bool,
}

/// State of the view.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct State {
    /// The table that is shown.
    pub(super) kind: Kind,
    /// Meaning of keys.
    pub(super) mode: Mode,
    /// Text that a row must have, in any case of letters; all rows when empty.
    pub(super) filter: String,
    /// Text of the input so far, except for a filter.
    pub(super) input: String,
    /// Line below the table.
    pub(super) message: String,
    /// Columns of the table that are left of the screen.
    pub(super) shift: usize,
    /// Number of rows that the screen has.
    pub(super) page: usize,
    sorts: [Sort; Kind::ALL.len()],
    /// Selected row, and its index when it was selected: its neighbour takes its place when it is gone.
    selected: Option<(RowId, usize)>,
}

impl Default for State {
    fn default() -> Self {
        let natural = Sort {
            column: 0,
            is_descending: false,
        };
        Self {
            kind: Kind::Vcpus,
            mode: Mode::Browse,
            filter: String::new(),
            input: String::new(),
            message: String::new(),
            shift: 0,
            page: 1,
            sorts: [natural; Kind::ALL.len()],
            selected: None,
        }
    }
}

impl State {
    /// Order of the rows that are shown.
    pub(super) fn sort(&self) -> Sort {
        self.sorts[self.kind as usize]
    }

    /// The rows that are shown, in their order.
    pub(super) fn rows(&self, sample: &Sample) -> Vec<Row> {
        let filter = self.filter.to_lowercase();
        let mut rows = self.kind.rows(sample);
        rows.retain(|row| row.subject.to_lowercase().contains(&filter));
        let Sort {
            column,
            is_descending,
        } = self.sort();
        rows.sort_by(|one, other| one.compare(other, column, is_descending));
        rows
    }

    /// Index of the selected row; none without rows.
    pub(super) fn selected(&self, rows: &[Row]) -> Option<usize> {
        let last = rows.len().checked_sub(1)?;
        let Some((id, index)) = &self.selected else {
            return Some(0);
        };
        let found = rows.iter().position(|row| row.id == *id);
        Some(found.unwrap_or(*index).min(last))
    }

    /// Handles a key while `rows` are shown.
    pub(super) fn press(&mut self, key: Key, rows: &[Row]) -> Effect {
        if key == Key::Interrupt {
            return Effect::Quit;
        }
        match self.mode.clone() {
            Mode::Browse => return self.browse(key, rows),
            Mode::Help => self.mode = Mode::Browse,
            Mode::Filter => match key {
                Key::Escape => {
                    self.filter.clear();
                    self.mode = Mode::Browse;
                }
                Key::Enter => self.mode = Mode::Browse,
                key => edit(&mut self.filter, key),
            },
            Mode::Move(vm, vcpu) => {
                let order = |text: &str| target(text).map(|to| Order::Move { vm, vcpu, to });
                return self.answer(key, order);
            }
            Mode::Cap(vm) => {
                let order = |text: &str| limit(text).map(|limit| Order::Cap { vm, limit });
                return self.answer(key, order);
            }
        }
        Effect::Draw
    }

    /// Handles a key of an input that `order` turns into an order.
    fn answer(&mut self, key: Key, order: impl FnOnce(&str) -> Result<Order, &'static str>) -> Effect {
        match key {
            Key::Escape => {
                self.mode = Mode::Browse;
                self.message.clear();
            }
            Key::Enter => match order(self.input.trim()) {
                Ok(order) => {
                    self.mode = Mode::Browse;
                    self.message = "ordered; waiting for the answer".to_owned();
                    return Effect::Give(order);
                }
                Err(help) => self.message = help.to_owned(),
            },
            key => edit(&mut self.input, key),
        }
        Effect::Draw
    }

    fn browse(&mut self, key: Key, rows: &[Row]) -> Effect {
        let (kinds, now) = (Kind::ALL.len(), self.kind as usize);
        let index = self.selected(rows).unwrap_or(0);
        match key {
            Key::Char('q') => return Effect::Quit,
            Key::Char('?' | 'h') => self.mode = Mode::Help,
            Key::Tab => self.show(Kind::ALL[(now + 1) % kinds]),
            Key::BackTab => self.show(Kind::ALL[(now + kinds - 1) % kinds]),
            Key::Char(digit @ '1'..='4') => self.show(Kind::ALL[digit as usize - '1' as usize]),
            Key::Up | Key::Char('k') => self.select(rows, index.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(rows, index + 1),
            Key::PageUp => self.select(rows, index.saturating_sub(self.page)),
            Key::PageDown => self.select(rows, index + self.page),
            Key::Home => self.select(rows, 0),
            Key::End => self.select(rows, usize::MAX),
            Key::Left => self.shift = self.shift.saturating_sub(SHIFT),
            Key::Right => self.shift += SHIFT,
            Key::Char('>') => self.sort_by_next(1),
            Key::Char('<') => self.sort_by_next(self.kind.columns().len() - 1),
            Key::Char('r') => {
                let sort = &mut self.sorts[now];
                sort.is_descending = !sort.is_descending;
            }
            Key::Char('/') => self.mode = Mode::Filter,
            Key::Escape => {
                self.filter.clear();
                self.message.clear();
            }
            Key::Char('m') => match rows.get(index).map(|row| row.id.clone()) {
                Some(RowId::Vcpu(vm, vcpu)) => self.ask(Mode::Move(vm, vcpu)),
                _ => self.message = "select a vCPU to move: 1 shows them".to_owned(),
            },
            Key::Char('c') => match rows.get(index).map(|row| row.id.clone()) {
                Some(RowId::Vcpu(vm, _) | RowId::Vm(vm)) => self.ask(Mode::Cap(vm)),
                _ => self.message = "select a VM to limit: 2 shows them".to_owned(),
            },
            Key::Char(_) | Key::Enter | Key::Backspace | Key::Interrupt => {}
        }
        Effect::Draw
    }

    fn show(&mut self, kind: Kind) {
        if self.kind != kind {
            (self.kind, self.selected, self.shift) = (kind, None, 0);
        }
    }

    fn ask(&mut self, mode: Mode) {
        self.mode = mode;
        self.input.clear();
        self.message.clear();
    }

    fn select(&mut self, rows: &[Row], index: usize) {
        let index = index.min(rows.len().saturating_sub(1));
        self.selected = rows.get(index).map(|row| (row.id.clone(), index));
    }

    fn sort_by_next(&mut self, step: usize) {
        let columns = self.kind.columns();
        let column = (self.sort().column + step) % columns.len();
        self.sorts[self.kind as usize] = Sort {
            column,
            is_descending: columns[column].is_descending,
        };
    }
}

fn edit(text: &mut String, key: Key) {
    match key {
        Key::Char(c) if text.chars().count() < INPUT_CHARS_MAX && !c.is_control() => text.push(c),
        Key::Backspace => _ = text.pop(),
        _ => {}
    }
}

/// Parses the target of a move: `cell 1`, `to 3`, `cpu 2-3`, `cpu all`.
fn target(text: &str) -> Result<Target, &'static str> {
    const HELP: &str = "write `cell 1`, `to 3`, `cpu 2-3`, or `cpu all`";
    let (word, rest) = text.split_once(' ').ok_or(HELP)?;
    match (word, rest.trim()) {
        ("cell", number) => number.parse().map(Target::Cell).map_err(|_| HELP),
        ("to", number) => number.parse().map(Target::Cpu).map_err(|_| HELP),
        ("cpu" | "cpus", "all") => Ok(Target::Cpus(Vec::new())),
        ("cpu" | "cpus", list) => {
            let cpus = cpulist::parse_below(list, HOST_CPUS_MAX);
            cpus.map(Target::Cpus).ok_or(HELP)
        }
        _ => Err(HELP),
    }
}

/// Parses a limit of CPUs: `1.5`, `none`.
fn limit(text: &str) -> Result<Option<f64>, &'static str> {
    const HELP: &str = "write a number of CPUs, as 1.5, or none";
    match text {
        "none" => Ok(None),
        text => {
            let limit: f64 = text.parse().map_err(|_| HELP)?;
            let is_limit = limit.is_finite() && limit > 0.0;
            is_limit.then_some(Some(limit)).ok_or(HELP)
        }
    }
}
