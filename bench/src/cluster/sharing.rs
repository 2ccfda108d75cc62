//! A program that needs CPUs and one that needs memory, together in one VM, in two cells that lend each other
//! both, and in two that don't (Cellular Disco, SOSP '99, section 7, Table 13).

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use bench::Outcome;
use bench::mirrorball::Cluster;
use bench::tables::median;
use bench::tiny_vm::{TinyVm, Working};
use serde::Serialize;
use serde_json::Value;

use crate::borrowing::seconds;
use crate::cpu_use::Ticks;
use crate::size::Rates;
use crate::{Bench, twice};

/// Memory of each cell, MiB.
const CELL_MIB: u64 = 256;
/// Memory of the VM that traces rays: it fits in a cell, and its two vCPUs don't.
const RAYS_MIB: u64 = 96;
/// Memory of the VM with the table: more than a cell's.
const ROWS_MIB: u64 = 320;
/// The table. The rest of the memory is the guest kernel's.
const TABLE_MIB: u64 = 232;
/// Guest memory that a partition has room for, beside the states of the VM's pages. The rest is paged.
const RESIDENT_MIB: u64 = CELL_MIB - 8;
/// Memory that a lender keeps, MiB.
const FLOOR_MIB: u64 = 16;
// No cell has room for the VM with the table, and both have with their floor.
const _: () = assert!(ROWS_MIB > CELL_MIB && ROWS_MIB + RAYS_MIB + FLOOR_MIB <= 2 * CELL_MIB);
/// Percentage of the operations on the first half of the table, and how often an operation reads its page.
const HOT_PERCENT: usize = 95;
const PASSES: usize = 4;
/// Threads that trace rays.
const THREADS: usize = 2;
/// Time limit of a program.
const LIMIT: Duration = Duration::from_secs(900);

/// How the two programs share the host.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    /// Both in one VM that has everything: an operating system on the whole machine.
    OneVm,
    /// A VM each in a cell each, which lend each other memory and CPUs.
    Cluster,
    /// The same without loans.
    Partitions,
}

impl Kind {
    const ALL: [Self; 3] = [Self::OneVm, Self::Cluster, Self::Partitions];

    fn name(self) -> &'static str {
        match self {
            Self::OneVm => "one VM",
            Self::Cluster => "two cells that lend",
            Self::Partitions => "two cells that do not",
        }
    }

    fn cluster_file(self, [first, second]: [usize; 2]) -> String {
        let cell = |cpus: String, mib: u64| format!("[[cells]]\ncpus = \"{cpus}\"\nmemory = \"{mib}M\"\n");
        let both = [first, second]
            .map(|cpu| cell(cpu.to_string(), CELL_MIB))
            .concat();
        match self {
            Self::OneVm => cell(format!("{first},{second}"), 2 * CELL_MIB),
            Self::Cluster => both + &crate::borrowing::limits(FLOOR_MIB),
            Self::Partitions => both + "[borrowing]\nautomatic = false\n",
        }
    }
}

/// Figures of a kind, one for each run.
#[derive(Debug, Serialize)]
struct Row {
    sharing: &'static str,
    /// Time of the program that needs CPUs.
    rays_s: Vec<f64>,
    /// Time of the program that needs memory.
    rows_s: Vec<f64>,
    /// Use of the two CPUs from the start of both until the end of both.
    cpu_use_permille: Vec<f64>,
}

/// One sample.
struct Sample {
    rays_s: f64,
    rows_s: f64,
    cpu_use_permille: f64,
    /// Combination of the image.
    image: u64,
}

/// Times as multiples of those in one VM.
#[derive(Debug, Serialize)]
struct Ratio {
    sharing: &'static str,
    rays: Option<f64>,
    rows: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    machine: &'a str,
    cell_bytes: u64,
    rays_vm_bytes: u64,
    rows_vm_bytes: u64,
    table_bytes: u64,
    resident_in_partition_bytes: u64,
    operations: u64,
    lines: u64,
    ratios: Vec<Ratio>,
    rows: &'a [Row],
}

/// Takes all samples, and passes on a report after each run.
///
/// # Errors
/// If a VM does not have the loans of its kind, a program fails, or two kinds compute different images.
pub fn measure(
    bench: &Bench,
    machine: &str,
    runs: usize,
    seconds: usize,
    paging: &Path,
    write: impl Fn(String) -> Outcome<()>,
) -> Outcome<()> {
    let (first, second) = bench::cpu::two()?;
    let cpus = [first, second];
    let rates = twice("the calibration", || {
        let _cluster = cluster(bench, Kind::OneVm, cpus)?;
        Rates::measure(&one_vm(bench)?, PASSES)
    })?;
    let mut work = rates.times(seconds);
    // For each of the two CPUs.
    work.lines = work.lines.saturating_mul(2);
    eprintln!("bench-cluster: {work:?}");
    let mut rows: Vec<Row> = Vec::new();
    let mut image = None;
    for _ in 0..runs {
        for kind in Kind::ALL {
            let sample = twice(kind.name(), || take(bench, kind, cpus, work, paging))?;
            if *image.get_or_insert(sample.image) != sample.image {
                return Err(format!("{}: another image", kind.name()).into());
            }
            add(&mut rows, kind, &sample);
        }
        let report = Report {
            machine,
            cell_bytes: CELL_MIB << 20,
            rays_vm_bytes: RAYS_MIB << 20,
            rows_vm_bytes: ROWS_MIB << 20,
            table_bytes: TABLE_MIB << 20,
            resident_in_partition_bytes: RESIDENT_MIB << 20,
            operations: work.operations,
            lines: work.lines,
            ratios: ratios(&rows),
            rows: &rows,
        };
        write(serde_json::to_string_pretty(&report)?)?;
    }
    print!("{}", markdown(&rows)?);
    Ok(())
}

fn add(rows: &mut Vec<Row>, kind: Kind, sample: &Sample) {
    let Sample {
        rays_s,
        rows_s,
        cpu_use_permille,
        ..
    } = sample;
    let name = kind.name();
    eprintln!("bench-cluster: {name}: {rays_s:.1} s, {rows_s:.1} s, {cpu_use_permille:.0} permille");
    let at = rows
        .iter()
        .position(|row| row.sharing == name)
        .unwrap_or(rows.len());
    if at == rows.len() {
        rows.push(Row {
            sharing: name,
            rays_s: Vec::new(),
            rows_s: Vec::new(),
            cpu_use_permille: Vec::new(),
        });
    }
    let row = &mut rows[at];
    row.rays_s.push(*rays_s);
    row.rows_s.push(*rows_s);
    row.cpu_use_permille.push(*cpu_use_permille);
}

/// The kinds with loans or partitions beside the first one.
fn ratios(rows: &[Row]) -> Vec<Ratio> {
    let Some((base, others)) = rows.split_first() else {
        return Vec::new();
    };
    let ratio = |of: &[f64], by: &[f64]| Some(median(of)? / median(by).filter(|by| *by > 0.0)?);
    let each = others.iter().map(|row| Ratio {
        sharing: row.sharing,
        rays: ratio(&row.rays_s, &base.rays_s),
        rows: ratio(&row.rows_s, &base.rows_s),
    });
    each.collect()
}

fn markdown(rows: &[Row]) -> Result<String, std::fmt::Error> {
    let shown = |samples: &[f64]| median(samples).map_or_else(String::new, |figure| format!("{figure:.1}"));
    let mut text = "| | rays, s | rows, s | CPU use, permille |\n| --- | --- | --- | --- |\n".to_owned();
    for row in rows {
        let [rays, table, used] =
            [&row.rays_s, &row.rows_s, &row.cpu_use_permille].map(|samples| shown(samples));
        writeln!(text, "| {} | {rays} | {table} | {used} |", row.sharing)?;
    }
    Ok(text)
}

fn cluster(bench: &Bench, kind: Kind, cpus: [usize; 2]) -> Outcome<Cluster<'_>> {
    Cluster::up(
        &bench.mirrorball,
        &[&bench.cluster_file(&kind.cluster_file(cpus))?],
    )
}

/// The VM that has everything.
fn one_vm(bench: &Bench) -> Outcome<TinyVm<'_>> {
    let memory = format!("{}M", RAYS_MIB + ROWS_MIB);
    bench.vm("both", &["--cpus", "2", "--memory", &memory, "--cell", "0"])
}

fn take(bench: &Bench, kind: Kind, cpus: [usize; 2], work: Rates, paging: &Path) -> Outcome<Sample> {
    let _cluster = cluster(bench, kind, cpus)?;
    if kind == Kind::OneVm {
        let vm = one_vm(bench)?;
        return run(rays(&vm, work)?, rows(&vm, work)?, &cpus);
    }
    let [rays_mib, rows_mib, resident_mib] = [RAYS_MIB, ROWS_MIB, RESIDENT_MIB].map(|mib| format!("{mib}M"));
    let tracer = bench.vm("rays", &["--cpus", "2", "--memory", &rays_mib, "--cell", "0"])?;
    let mut words = vec!["--cpus", "1", "--memory", &rows_mib, "--cell", "1"];
    let file = paging.join(format!("bench-cluster-{}", std::process::id()));
    let path = file.to_str().ok_or("a folder whose name is no text")?;
    if kind == Kind::Partitions {
        words.extend(["--resident", &resident_mib, "--memory-min", &resident_mib]);
        words.extend(["--paging-file", path]);
    }
    let database = bench.vm("rows", &words)?;
    if kind == Kind::Cluster {
        // The tracer's second vCPU takes turns with the database's.
        tracer.command("move", &["--vcpu", "1", "--cpu", &cpus[1].to_string()])?;
    }
    let has_loans = [
        is_list(&tracer.inspect()?["borrowed_cpus"]),
        is_list(&database.inspect()?["borrowed"]),
    ];
    if has_loans != [kind == Kind::Cluster; 2] {
        return Err(format!("{}: loans of CPUs and of memory are {has_loans:?}", kind.name()).into());
    }
    let sample = run(rays(&tracer, work)?, rows(&database, work)?, &cpus);
    drop(database);
    if kind == Kind::Partitions {
        std::fs::remove_file(&file)?;
    }
    sample
}

/// Whether a list has elements.
fn is_list(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.is_empty())
}

fn rays(vm: &TinyVm<'_>, work: Rates) -> Outcome<Working> {
    let [threads, lines] = [THREADS as u64, work.lines].map(|number| number.to_string());
    vm.work(
        &["--program", "rays", "--threads", &threads, "--lines", &lines],
        LIMIT,
    )
}

fn rows(vm: &TinyVm<'_>, work: Rates) -> Outcome<Working> {
    let numbers = [
        ("--mib", TABLE_MIB),
        ("--operations", work.operations),
        ("--hot-percent", HOT_PERCENT as u64),
        ("--passes", PASSES as u64),
    ];
    let numbers = numbers.map(|(name, number)| (name, number.to_string()));
    let mut words = vec!["--program", "rows"];
    words.extend(numbers.iter().flat_map(|(name, number)| [*name, number.as_str()]));
    vm.work(&words, LIMIT)
}

/// Runs both programs to their ends.
fn run(mut rays: Working, mut rows: Working, cpus: &[usize]) -> Outcome<Sample> {
    rays.ready()?;
    rows.ready()?;
    let before = Ticks::now(cpus)?;
    rays.go()?;
    rows.go()?;
    // Each result has the time in the guest, so the order does not matter.
    let [rays, rows] = [rays.result()?, rows.result()?];
    let cpu_use_permille = Ticks::now(cpus)?.permille_since(before)?;
    let total = |result: &Value| -> Outcome<f64> { Ok(seconds(result)?.iter().sum()) };
    Ok(Sample {
        rays_s: total(&rays)?,
        rows_s: total(&rows)?,
        cpu_use_permille,
        image: rays["image"].as_u64().ok_or("no image")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(sharing: &'static str, rays_s: &[f64], rows_s: &[f64]) -> Row {
        Row {
            sharing,
            rays_s: rays_s.to_vec(),
            rows_s: rows_s.to_vec(),
            cpu_use_permille: vec![500.0],
        }
    }

    #[test]
    fn partitions_are_the_cells_that_lend_without_loans() {
        for kind in [Kind::Cluster, Kind::Partitions] {
            let file = kind.cluster_file([4, 7]);
            assert!(
                file.starts_with("[[cells]]\ncpus = \"4\"\nmemory = \"256M\"\n[[cells]]\ncpus = \"7\"\n")
            );
            assert_eq!(file.contains("automatic = false"), kind == Kind::Partitions);
        }
        assert!(
            Kind::OneVm
                .cluster_file([4, 7])
                .contains("cpus = \"4,7\"\nmemory = \"512M\"")
        );
    }

    #[test]
    fn ratios_are_of_medians_beside_one_vm() {
        let rows = [
            row("one VM", &[10.0, 20.0, 90.0], &[5.0]),
            row("two cells that lend", &[30.0], &[4.0]),
        ];
        let ratios = ratios(&rows);
        assert_eq!((ratios[0].rays, ratios[0].rows), (Some(1.5), Some(0.8)));
        assert!(super::ratios(&[]).is_empty());
        let text = markdown(&rows).unwrap();
        assert!(
            text.ends_with("| two cells that lend | 30.0 | 4.0 | 500.0 |\n"),
            "{text}"
        );
    }
}
