use std::time::{Duration, Instant};

use operations::usage::{
    CellReading, CellState, CpuQueue, CpuUse, CpuVcpu, MovedBy, QueueMoves, Sample, Unknown, VcpuReading,
    VcpuUse, VmReading, VmState, VmUse,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::layout::Rect;
use ratatui::style::Modifier;
use registry::cluster::interface::{CpuLending, LentMemory};

use super::screen::{Screen, heights};
use super::state::{Effect, Key, Mode, Order, State, Target};
use super::table::{Kind, RowId};
use super::{interval, plain, time_of_next};

const MIB: u64 = 1 << 20;

fn vcpu(vm: &str, vcpu: u8, cell: u16, run_milli: Option<u64>) -> VcpuUse {
    VcpuUse {
        reading: VcpuReading {
            vm: vm.to_owned(),
            vcpu,
            cell: Some(cell),
            last_cpu: Some(usize::from(cell)),
            cpus: Some(vec![usize::from(cell)]),
            ..VcpuReading::default()
        },
        run_milli,
        ..VcpuUse::default()
    }
}

fn vm(vm: &str, vcpus: u8, cell: Option<u16>) -> VmUse {
    VmUse {
        reading: VmReading {
            vm: vm.to_owned(),
            state: VmState::Running,
            cell,
            host_cell: None,
            span: Vec::new(),
            vcpus,
            cpu_weight: None,
            cpu_limit: None,
            cpu_reservation: None,
            memory_bytes: 64 * MIB,
            host_bytes: None,
            swapped_bytes: None,
            borrowed: Vec::new(),
        },
        run_milli: None,
        wait_milli: None,
        spin_milli: None,
        halt_milli: None,
        migrated: None,
    }
}

/// Two cells, of which one is silent, and two VMs.
fn sample() -> Sample {
    let loan = |cell| {
        vec![LentMemory {
            cell,
            bytes: 64 * MIB,
        }]
    };
    let cell = |cell: u16, state, lent, borrowed, names: &[&str]| CellReading {
        cell,
        is_here: true,
        state: Some(state),
        cpus: vec![usize::from(cell)],
        memory_bytes: Some(192 * MIB),
        given_bytes: Some(96 * MIB),
        lent: Some(lent),
        borrowed: Some(borrowed),
        vcpus: Some(2),
        vms: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        ..CellReading::default()
    };
    let cpu = |cpu: usize, busy_milli, vcpus: &[(&str, u8)]| CpuUse {
        cpu,
        cells: vec![cpu as u16],
        busy_milli,
        vcpus: vcpus
            .iter()
            .map(|(vm, vcpu)| CpuVcpu {
                vm: (*vm).to_owned(),
                vcpu: *vcpu,
                is_bound: *vcpu == 0,
            })
            .collect(),
        queue: None,
    };
    let mut busy = vcpu("web", 0, 0, Some(803));
    (busy.wait_milli, busy.halt_milli) = (Some(52), Some(145));
    (busy.halts_per_s, busy.exits_per_s, busy.migrated) = (Some(12), Some(3_400), Some(1));
    busy.reading.is_pinned = true;
    let mut moved = vcpu("web", 1, 1, None);
    moved.moved_from = Some(0);
    let mut web = vm("web", 2, Some(0));
    web.run_milli = Some(1_005);
    (web.reading.cpu_limit, web.reading.host_bytes) = (Some(1.5), Some(70 * MIB));
    web.reading.cpu_reservation = Some(0.25);
    web.reading.borrowed = loan(1);
    Sample {
        unix_ms: 1_795_780_000_000,
        interval_ms: Some(2_004),
        cells: vec![
            cell(0, CellState::Runs, Vec::new(), loan(1), &["db", "web"]),
            cell(1, CellState::Silent, loan(0), Vec::new(), &[]),
        ],
        cpus: vec![
            cpu(0, Some(853), &[("web", 0), ("db", 0)]),
            cpu(1, None, &[("web", 1)]),
        ],
        vms: vec![vm("db", 1, Some(1)), web],
        vcpus: vec![vcpu("db", 0, 0, Some(9)), busy, moved],
        unknown: vec![Unknown::new("cell 1", "no answer within 2 s")],
    }
}

fn draw(sample: Option<&Sample>, state: &State, (width, height): (u16, u16)) -> Vec<String> {
    let rows = sample.map_or_else(Vec::new, |sample| state.rows(sample));
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let screen = Screen {
        sample,
        state,
        rows: &rows,
    };
    terminal
        .draw(|frame| frame.render_widget(screen, frame.area()))
        .unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| {
        let symbols = (0..width).map(|x| buffer[(x, y)].symbol());
        symbols.collect::<String>().trim_end().to_owned()
    };
    (0..height).map(line).collect()
}

fn press(state: &mut State, sample: &Sample, keys: &[Key]) -> Effect {
    let mut last = Effect::Draw;
    for key in keys {
        let rows = state.rows(sample);
        last = state.press(*key, &rows);
    }
    last
}

fn type_in(state: &mut State, sample: &Sample, text: &str) -> Effect {
    let keys: Vec<Key> = text.chars().map(Key::Char).chain([Key::Enter]).collect();
    press(state, sample, &keys)
}

#[test]
fn screen_shows_meters_cells_and_vcpus_and_dashes_for_unknown_figures() {
    let sample = sample();
    let lines = draw(Some(&sample), &State::default(), (100, 16));
    let expected = "\
mirrorball top  11:46:40  2 cells, 2 VMs, 3 vCPUs  over 2.0 s
  0 [|||||||||||||85.3%] web/0* db/0*               1 [                 -] web/1
cell 0   runs     [||||||||| 96M/192M] CPUs 0; 2 vCPUs; borrowed 64M of 1
cell 1   silent   [||||||||| 96M/192M] CPUs 1; 2 vCPUs; lent 64M to 0
[vCPUs]  VMs   CPUs   cells   sort: VM up
VM  VCPU CELL CPU CPUS   RUN%  WAIT%  SPIN%  HALT% HALTS/S EXITS/S   MIGR
db     0    0   0 0       0.9      -      -      -       -       -      -
web    0    0   0 0*     80.3    5.2      -   14.5      12    3400      1
web    1  0>1   1 1         -      -      -      -       -       -      -





cell 1: no answer within 2 s
Tab table  <> sort  r reverse  / filter  m move  c cap  ? help  q quit";
    let text = lines.join("\n");
    assert_eq!(text, expected, "{text}");
}

#[test]
fn screen_of_vms_shows_limits_memory_and_loans() {
    let sample = sample();
    let mut state = State::default();
    press(&mut state, &sample, &[Key::Char('2')]);
    let lines = draw(Some(&sample), &state, (120, 14));
    let expected = " vCPUs  [VMs]  CPUs   cells   sort: VM up
VM  STATE   CELL  VCPUS   RUN%  WAIT%  SPIN%  HALT%   MIGR  LIMIT   RESV WEIGHT MEMORY   HOST SWAPPED BORROWED
db  running    1      1      -      -      -      -      -      -      -      -    64M      -       - -
web running    0      2  100.5      -      -      -      -    1.5   0.25      -    64M    70M       - 64M of 1
";
    let text = format!("{}\n", lines[4..8].join("\n"));
    assert_eq!(text, expected, "{text}");
    // Columns beyond the right end of a narrow screen.
    press(&mut state, &sample, &[Key::Right; 3]);
    let lines = draw(Some(&sample), &state, (60, 14));
    assert_eq!(
        lines[6],
        "  RUN%  WAIT%  SPIN%  HALT%   MIGR  LIMIT   RESV WEIGHT MEMO"
    );
    press(&mut state, &sample, &[Key::Left; 9]);
    assert_eq!(state.shift, 0);
}

#[test]
fn plain_text_has_every_table_and_the_silent_cell() {
    let expected = "\
mirrorball top, 2026-11-27T11:46:40.000Z, over 2.0 s

cells
CELL HOST STATE  CPUS  VCPUS MEMORY  GIVEN   FREE SOUGHT  MOVED RETURNED RECALLED REFUSED \
LENT     BORROWED VMS
   0 -    runs   0         2   192M    96M      -      -      -        -        -       - \
-        64M of 1 db web
   1 -    silent 1         2   192M    96M      -      -      -        -        -       - \
64M to 0 -        -

CPUs
CPU CELL  BUSY% GANG  QUEUE  LOAD%  MOVES REFUSED VCPUS
  0    0   85.3 -         -      -      -       - web/0* db/0*
  1    1      - -         -      -      -       - web/1

VMs
VM  STATE   CELL  VCPUS   RUN%  WAIT%  SPIN%  HALT%   MIGR  LIMIT   RESV WEIGHT MEMORY   HOST SWAPPED BORROWED
db  running    1      1      -      -      -      -      -      -      -      -    64M      -       - -
web running    0      2  100.5      -      -      -      -    1.5   0.25      -    64M    70M       - 64M of 1

vCPUs
VM  VCPU CELL CPU CPUS   RUN%  WAIT%  SPIN%  HALT% HALTS/S EXITS/S   MIGR
db     0    0   0 0       0.9      -      -      -       -       -      -
web    0    0   0 0*     80.3    5.2      -   14.5      12    3400      1
web    1  0>1   1 1         -      -      -      -       -       -      -

unknown
cell 1: no answer within 2 s

";
    let text = plain::text(&sample());
    assert_eq!(text, expected, "{text}");
}

#[test]
fn moves_between_cells_by_decision_are_shown_with_the_vcpu_that_is_away() {
    let mut sample = sample();
    sample.cells[0].cpu_lending = Some(CpuLending {
        sought: 9,
        moved: 8,
        returned: 7,
        recalled: 6,
        refused: 5,
        ..CpuLending::default()
    });
    sample.vcpus[2].reading.moved_by = Some(MovedBy::Decision);
    sample.vcpus[0].reading.moved_by = Some(MovedBy::Command);
    let lines = draw(Some(&sample), &State::default(), (160, 16));
    let cell = "CPUs 0; 2 vCPUs; borrowed 64M of 1; vCPUs moved 8, returned 7, recalled 6, refused 5";
    assert!(lines[2].ends_with(cell), "{}", lines[2]);
    let text = |row: &str| {
        plain::text(&sample)
            .lines()
            .find(|line| line.starts_with(row))
            .map(words)
    };
    let row = "0 - runs 0 2 192M 96M - 9 8 7 6 5 - 64M of 1 db web";
    assert_eq!(text("   0").as_deref(), Some(row));
    let away = text("web    1").unwrap_or_default();
    assert!(away.starts_with("web 1 0>1 1 1 by decision -"), "{away}");
    let away = text("db     0").unwrap_or_default();
    assert!(away.starts_with("db 0 0 0 0 by command 0.9"), "{away}");
}

/// The words of a line, without its columns.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn queue_of_a_cpu_is_shown_where_a_cell_reports_it() {
    let mut sample = sample();
    sample.cpus[1].queue = Some(CpuQueue {
        gang: Some("web".to_owned()),
        waiting: Some(3),
        ungated: Some(2),
        load_milli: Some(1_250),
        moves: Some(QueueMoves {
            idle: Some(4),
            periodic: None,
            ordered: Some(1),
        }),
        refused: Some(2),
    });
    let rows = Kind::Cpus.rows(&sample);
    let texts = |row: usize| {
        let entries = rows[row].entries.iter();
        entries.map(|entry| &entry.text[..]).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(texts(0), "0 0 85.3 - - - - - web/0* db/0*");
    assert_eq!(texts(1), "1 1 - web +2 3 125.0 5 2 web/1");
}

#[test]
fn small_terminal_shows_the_size_that_it_needs_and_no_size_panics() {
    let sample = sample();
    let lines = draw(Some(&sample), &State::default(), (50, 10));
    assert_eq!(lines[0], "terminal too small: 50x10, 60x12 needed");
    assert_eq!(lines[1..], [""; 9]);
    let mut help = State::default();
    press(&mut help, &sample, &[Key::Char('?')]);
    for width in [1, 59, 60, 61, 100, 400] {
        for height in [1, 11, 12, 13, 50] {
            for state in [&State::default(), &help] {
                draw(Some(&sample), state, (width, height));
                draw(None, state, (width, height));
                draw(Some(&Sample::default()), state, (width, height));
            }
        }
    }
}

#[test]
fn many_cpus_and_cells_leave_half_of_the_screen_to_the_table() {
    let mut sample = sample();
    sample.cpus = (0..500)
        .map(|cpu| CpuUse {
            cpu,
            ..CpuUse::default()
        })
        .collect();
    let cell = sample.cells[0].clone();
    sample.cells = vec![cell; 64];
    let area = Rect::new(0, 0, 80, 24);
    let divided = heights(area, sample.cpus.len(), sample.cells.len());
    assert_eq!((divided.cpus, divided.cells, divided.rows), (6, 6, 7));
    let lines = draw(Some(&sample), &State::default(), (80, 24));
    assert!(lines[6].ends_with("489 more CPUs: 3 shows them"), "{}", lines[6]);
    assert_eq!(lines[12], "59 more cells: 4 shows them");
}

#[test]
fn selected_row_is_reversed_and_stays_on_the_screen() {
    let mut sample = sample();
    sample.vcpus = (0..60).map(|number| vcpu("big", number, 0, None)).collect();
    let mut state = State::default();
    press(&mut state, &sample, &[Key::End, Key::Up]);
    let rows = state.rows(&sample);
    assert_eq!(state.selected(&rows), Some(58));
    let mut terminal = Terminal::new(TestBackend::new(80, 14)).unwrap();
    let screen = Screen {
        sample: Some(&sample),
        state: &state,
        rows: &rows,
    };
    terminal
        .draw(|frame| frame.render_widget(screen, frame.area()))
        .unwrap();
    let buffer = terminal.backend().buffer();
    let reversed: Vec<String> = (0..14)
        .filter(|y| buffer[(0, *y)].modifier.contains(Modifier::REVERSED))
        .map(|y| (0..9).map(|x| buffer[(x, y)].symbol()).collect())
        .collect();
    assert_eq!(reversed, ["big   58 "]);
}

#[test]
fn selection_follows_its_row_through_sorting_and_the_end_of_vms() {
    let mut sample = sample();
    let mut state = State::default();
    press(&mut state, &sample, &[Key::Down]);
    let selected = |state: &State, sample: &Sample| {
        let rows = state.rows(sample);
        state.selected(&rows).map(|index| rows[index].id.clone())
    };
    let web = RowId::Vcpu("web".to_owned(), 0);
    assert_eq!(selected(&state, &sample), Some(web.clone()));
    press(&mut state, &sample, &[Key::Char('r')]);
    assert_eq!(selected(&state, &sample), Some(web));
    sample.vcpus.retain(|vcpu| vcpu.reading.vm == "db");
    assert_eq!(selected(&state, &sample), Some(RowId::Vcpu("db".to_owned(), 0)));
    sample.vcpus.clear();
    assert_eq!(selected(&state, &sample), None);
    press(&mut state, &sample, &[Key::Down, Key::Char('m'), Key::Char('c')]);
    assert_eq!(state.mode, Mode::Browse);
}

#[test]
fn sorting_by_a_figure_begins_with_the_greatest_and_ends_with_the_unknown() {
    let sample = sample();
    let mut state = State::default();
    let order = |state: &State| {
        let rows = state.rows(&sample);
        rows.into_iter().map(|row| row.subject).collect::<Vec<_>>()
    };
    assert_eq!(order(&state), ["db/0", "web/0", "web/1"]);
    press(&mut state, &sample, &[Key::Char('>'); 5]);
    assert_eq!(state.kind.columns()[state.sort().column].title, "RUN%");
    assert_eq!(order(&state), ["web/0", "db/0", "web/1"]);
    press(&mut state, &sample, &[Key::Char('r')]);
    assert_eq!(order(&state), ["db/0", "web/0", "web/1"]);
    // Each table has an order of its own.
    press(&mut state, &sample, &[Key::Tab]);
    assert_eq!((state.kind, state.sort().column), (Kind::Vms, 0));
    press(&mut state, &sample, &[Key::BackTab, Key::Char('<')]);
    assert_eq!(state.kind.columns()[state.sort().column].title, "CPUS");
    press(&mut state, &sample, &[Key::Char('<'); 5]);
    assert_eq!(state.kind.columns()[state.sort().column].title, "MIGR");
}

#[test]
fn filter_keeps_rows_with_its_text_until_escape() {
    let sample = sample();
    let mut state = State::default();
    let count = |state: &State| state.rows(&sample).len();
    press(&mut state, &sample, &[Key::Char('/')]);
    // Keys are text now, not commands.
    press(&mut state, &sample, &[Key::Char('W'), Key::Char('q')]);
    assert_eq!((count(&state), state.filter.as_str()), (0, "Wq"));
    press(&mut state, &sample, &[Key::Backspace]);
    assert_eq!(type_in(&mut state, &sample, "eb/1"), Effect::Draw);
    assert_eq!((count(&state), &state.mode), (1, &Mode::Browse));
    press(&mut state, &sample, &[Key::Escape]);
    assert_eq!((count(&state), state.filter.as_str()), (3, ""));
    press(
        &mut state,
        &sample,
        &[Key::Char('/'), Key::Char('x'), Key::Escape],
    );
    assert_eq!((count(&state), &state.mode), (3, &Mode::Browse));
}

#[test]
fn vcpu_is_moved_to_what_was_typed_and_to_nothing_else() {
    let sample = sample();
    let moved = |text: &str| {
        let mut state = State::default();
        press(&mut state, &sample, &[Key::Down, Key::Char('m')]);
        assert_eq!(state.mode, Mode::Move("web".to_owned(), 0));
        let effect = type_in(&mut state, &sample, text);
        (effect, state)
    };
    let order = |to| {
        Effect::Give(Order::Move {
            vm: "web".to_owned(),
            vcpu: 0,
            to,
        })
    };
    assert_eq!(moved("cell 1").0, order(Target::Cell(1)));
    assert_eq!(moved("to 3").0, order(Target::Cpu(3)));
    assert_eq!(moved("cpu 2-3,5").0, order(Target::Cpus(vec![2, 3, 5])));
    assert_eq!(moved(" cpu  7 ").0, order(Target::Cpus(vec![7])));
    assert_eq!(moved("cpu all").0, order(Target::Cpus(Vec::new())));
    for wrong in [
        "",
        "1",
        "cell",
        "cell x",
        "cell 70000",
        "to 1-2",
        "to all",
        "cpu",
        "cpu 3-1",
        "cpu 9999",
        "node 1",
    ] {
        let (effect, state) = moved(wrong);
        assert_eq!(effect, Effect::Draw, "{wrong}");
        assert!(matches!(state.mode, Mode::Move(..)), "{wrong}");
        assert_eq!(state.message, "write `cell 1`, `to 3`, `cpu 2-3`, or `cpu all`");
    }
}

#[test]
fn limit_of_cpus_is_of_the_vm_whose_row_is_selected() {
    let sample = sample();
    let capped = |keys: &[Key], text: &str| {
        let mut state = State::default();
        press(&mut state, &sample, keys);
        assert_eq!(press(&mut state, &sample, &[Key::Char('c')]), Effect::Draw);
        type_in(&mut state, &sample, text)
    };
    let order = |vm: &str, limit| {
        Effect::Give(Order::Cap {
            vm: vm.to_owned(),
            limit,
        })
    };
    assert_eq!(capped(&[Key::Char('2')], "1.5"), order("db", Some(1.5)));
    assert_eq!(capped(&[Key::End], "none"), order("web", None));
    for wrong in ["", "0", "-1", "nan", "inf", "many"] {
        assert_eq!(capped(&[], wrong), Effect::Draw, "{wrong}");
    }
    // CPUs and cells have no limit.
    assert_eq!(capped(&[Key::Char('3')], "1"), Effect::Draw);
}

#[test]
fn escape_ends_a_question_without_an_order_and_control_c_ends_all() {
    let sample = sample();
    let mut state = State::default();
    press(&mut state, &sample, &[Key::Char('m'), Key::Char('q')]);
    assert_eq!(state.input, "q");
    press(&mut state, &sample, &[Key::Escape]);
    assert_eq!(state.mode, Mode::Browse);
    for keys in [&[][..], &[Key::Char('m')], &[Key::Char('/')], &[Key::Char('?')]] {
        let mut state = State::default();
        press(&mut state, &sample, keys);
        assert_eq!(
            press(&mut state, &sample, &[Key::Interrupt]),
            Effect::Quit,
            "{keys:?}"
        );
    }
    let mut state = State::default();
    press(&mut state, &sample, &[Key::Char('?')]);
    assert_eq!(press(&mut state, &sample, &[Key::Char('q')]), Effect::Draw);
    assert_eq!(press(&mut state, &sample, &[Key::Char('q')]), Effect::Quit);
}

#[test]
fn input_is_bounded() {
    let sample = sample();
    let mut state = State::default();
    press(&mut state, &sample, &[Key::Char('m')]);
    press(&mut state, &sample, &[Key::Char('9'); 1_000]);
    assert_eq!(state.input.len(), 60);
}

#[test]
fn interval_is_a_tenth_of_a_second_to_an_hour() {
    assert_eq!(interval("0.5").unwrap().as_millis(), 500);
    assert_eq!(interval("3600").unwrap().as_secs(), 3_600);
    for wrong in ["", "0", "0.09", "3601", "nan", "inf", "-1", "2s"] {
        let why = interval(wrong).unwrap_err();
        assert_eq!(why, "write 0.1 to 3600 seconds", "{wrong}");
    }
}

#[test]
fn reading_that_took_long_delays_the_next_one_by_a_whole_interval() {
    let (begun, interval) = (Instant::now(), Duration::from_secs(1));
    let after = |ms| begun + Duration::from_millis(ms);
    assert_eq!(time_of_next(begun, after(300), interval), after(1_000));
    assert_eq!(time_of_next(begun, after(2_000), interval), after(3_000));
}

#[test]
fn long_message_takes_three_lines_at_most_and_leaves_the_keys() {
    let mut sample = sample();
    let mut state = State::default();
    state.message = format!("{} end", "refused ".repeat(20));
    let lines = draw(Some(&sample), &state, (80, 16));
    assert!(
        lines[12].starts_with("refused") && lines[14].ends_with("end"),
        "{lines:?}"
    );
    state.message = "x".repeat(1_000);
    let lines = draw(Some(&sample), &state, (80, 16));
    let is_covered = |line: &String| *line == "x".repeat(80);
    assert_eq!(lines.iter().filter(|line| is_covered(line)).count(), 3);
    assert!(lines[15].starts_with("Tab table"), "{lines:?}");
    state.message.clear();
    sample.unknown.push(Unknown::new("web", "it is ending"));
    let lines = draw(Some(&sample), &state, (80, 16));
    assert_eq!(lines[14], "cell 1: no answer within 2 s; web: it is ending");
}
