//! Metrics for Prometheus. `docs/reference/api.md` lists the names.

use std::collections::BTreeMap;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use hostinfo::memory_use;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use registry::cluster::interface::CpuLending;
use registry::runtime;
use registry::subnet::NetworkReport;

use crate::api::{blocking, cells, records};
use crate::problem::Problem;
use crate::views::{Cell, Vm};

mod cards;

type Labels = Vec<(&'static str, String)>;

/// Formats all metrics of VMs and cells as text.
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = "text/plain", body = String)))]
pub(crate) async fn metrics() -> Result<Response, Problem> {
    let text = blocking(|| {
        let records = records()?;
        let vms: Vec<Vm> = records.iter().map(Vm::from).collect();
        // Without the right to read it, VMs' host memory is left out.
        let memory = memory_use::read(&records).map_or_else(|_| Vec::new(), |known| known.vms);
        let taken: Vec<Taken> = memory
            .iter()
            .map(|vm| (vm.name.clone(), vm.host_bytes, vm.shared_bytes()))
            .collect();
        let lending = operations::cells::cpu_lending()?;
        // A gateway that does not answer leaves out its cards.
        let subnet = runtime::directory().and_then(|runtime| operations::networks::list(&runtime));
        let networks = subnet.unwrap_or_default().networks;
        text(&vms, &taken, &cells()?, &lending, &networks).map_err(Problem::internal)
    })
    .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// Host memory of a VM, bytes: its name, the memory that it uses, and the memory that it shares.
type Taken = (String, u64, u64);

/// Formats the text. `taken` has each VM whose memory could be read, and `lending` each cell of this host
/// that moves vCPUs between cells by decision.
fn text(
    vms: &[Vm],
    taken: &[Taken],
    cells: &[Cell],
    lending: &BTreeMap<u16, CpuLending>,
    networks: &[NetworkReport],
) -> Result<String, std::fmt::Error> {
    let mut metrics = Metrics(Registry::with_prefix("mirrorball"));
    metrics.add_vms(vms);
    metrics.add_memory(taken);
    metrics.add_cells(cells);
    metrics.add_cpu_lending(lending);
    metrics.add_networks(networks);
    let mut text = String::new();
    encode(&mut text, &metrics.0)?;
    Ok(text)
}

/// The registry of this program's metrics: gauges, and counts that a cell's process has kept.
struct Metrics(Registry);

impl Metrics {
    fn add(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, u64)>) {
        let family = Family::<Labels, Gauge>::default();
        for (labels, value) in values {
            family
                .get_or_create(&labels)
                .set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        self.0.register(name, help, family);
    }

    /// Adds counters, to whose names the text adds `_total`.
    fn add_counters(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, u64)>) {
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).inc_by(value);
        }
        self.0.register(name, help, family);
    }

    fn add_vms(&mut self, vms: &[Vm]) {
        let mut add = |name, help, value: fn(&Vm) -> u64| {
            self.add(
                name,
                help,
                vms.iter().map(|vm| (label("vm", &vm.name), value(vm))),
            );
        };
        add("vm_cpus", "vCPUs of a VM", |vm| u64::from(vm.cpus));
        add("vm_memory_bytes", "Memory of a guest", |vm| vm.memory_bytes);
        add("vm_boots", "How often a guest started", |vm| u64::from(vm.boots));
        add(
            "vm_start_time_seconds",
            "When a VM was started, since 1970",
            |vm| vm.started_unix_s,
        );
        let of_labels = vms.iter().flat_map(|vm| {
            let of_vm = move |(key, value): (&String, &String)| {
                let words = [("vm", &vm.name), ("key", key), ("value", value)];
                (words.map(|(name, value)| (name, value.clone())).to_vec(), 1)
            };
            vm.labels.iter().map(of_vm)
        });
        self.add("vm_label", "1 for each label of a VM", of_labels);
    }

    fn add_memory(&mut self, taken: &[Taken]) {
        let mut add = |name, help, value: fn(&Taken) -> u64| {
            self.add(name, help, taken.iter().map(|vm| (label("vm", &vm.0), value(vm))));
        };
        add("vm_host_bytes", "Memory that the host spends on a VM", |vm| vm.1);
        add(
            "vm_shared_bytes",
            "Memory of a guest that others use too, or could",
            |vm| vm.2,
        );
    }

    fn add_cells(&mut self, cells: &[Cell]) {
        let mut add = |name, help, value: fn(&Cell) -> u64| {
            let number = |cell: &Cell| label("cell", &cell.number.to_string());
            self.add(name, help, cells.iter().map(|cell| (number(cell), value(cell))));
        };
        add("cell_up", "1 if a cell's process runs", |cell| {
            u64::from(cell.runs)
        });
        add("cell_cordoned", "1 if a cell takes no new VM", |cell| {
            u64::from(cell.cordoned)
        });
        add("cell_lives", "Processes that a cell has had", |cell| {
            u64::from(cell.life.unwrap_or(0))
        });
        add("cell_cpus", "CPUs of a cell", |cell| cell.cpus.len() as u64);
        add("cell_vcpus", "vCPUs of a cell's VMs", |cell| {
            u64::from(cell.vcpus)
        });
        add("cell_memory_bytes", "Memory that a cell gives out", |cell| {
            cell.memory_bytes
        });
        add("cell_given_bytes", "Memory that a cell's VMs have", |cell| {
            cell.given_bytes
        });
        add(
            "cell_lent_bytes",
            "Memory that a cell has lent to others",
            |cell| cell.lent_bytes,
        );
        add(
            "cell_lent_on_request_bytes",
            "Memory that others have borrowed of a cell by themselves",
            |cell| cell.lent_on_request_bytes,
        );
        add(
            "cell_borrowed_bytes",
            "Memory that others have lent a cell",
            |cell| cell.borrowed_bytes,
        );
    }

    fn add_cpu_lending(&mut self, lending: &BTreeMap<u16, CpuLending>) {
        let mut add = |name, help, value: fn(&CpuLending) -> u64| {
            let counts = lending.iter();
            let counts = counts.map(|(cell, counts)| (label("cell", &cell.to_string()), value(counts)));
            self.add_counters(name, help, counts);
        };
        add(
            "cell_cpus_sought",
            "How often a cell looked for a CPU of another one",
            |counts| counts.sought,
        );
        add(
            "cell_vcpus_moved",
            "vCPUs that a cell moved to CPUs of other cells",
            |counts| counts.moved,
        );
        add(
            "cell_vcpus_returned",
            "vCPUs that a cell took back to its own CPUs",
            |counts| counts.returned,
        );
        add(
            "cell_vcpus_recalled",
            "vCPUs of other cells that a cell sent back from its CPUs",
            |counts| counts.recalled,
        );
        add(
            "cell_vcpu_moves_refused",
            "Moves of vCPUs between cells that were refused",
            |counts| counts.refused,
        );
    }
}

fn label(name: &'static str, value: &str) -> Labels {
    vec![(name, value.to_owned())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_documented() {
        let vm = Vm {
            name: "a".to_owned(),
            labels: [("team".to_owned(), "web".to_owned())].into(),
            state: crate::views::VmState::Running,
            cell: Some(0),
            span: Vec::new(),
            cpus: 2,
            memory_bytes: 3,
            image: None,
            pid: None,
            boots: 1,
            started_unix_s: 4,
            full_disks: Vec::new(),
        };
        let cell = Cell {
            number: 0,
            runs: true,
            life: Some(1),
            cordoned: true,
            pid: 1,
            cpus: vec![0],
            nodes: vec![0],
            memory_bytes: 5,
            given_bytes: 3,
            lent_bytes: 1,
            lent_on_request_bytes: 1,
            borrowed_bytes: 0,
            vcpus: 2,
            vms: vec!["a".to_owned()],
        };
        let lending = CpuLending {
            sought: 9,
            moved: 8,
            returned: 7,
            recalled: 6,
            refused: 5,
            ..CpuLending::default()
        };
        let other = Cell {
            number: 1,
            ..cell.clone()
        };
        let taken = [("a".to_owned(), 6, 7)];
        let networks = [cards::tests::network()];
        let text = text(&[vm], &taken, &[cell, other], &[(0, lending)].into(), &networks).unwrap();
        for (name, count) in [
            ("cpus_sought", 9),
            ("vcpus_moved", 8),
            ("vcpus_returned", 7),
            ("vcpus_recalled", 6),
            ("vcpu_moves_refused", 5),
        ] {
            let of = |cell: u16| format!("mirrorball_cell_{name}_total{{cell=\"{cell}\"}}");
            assert!(text.contains(&format!("{} {count}\n", of(0))), "{text}");
            assert!(!text.contains(&of(1)), "it decides on none: {text}");
        }
        let labels = "mirrorball_vm_label{vm=\"a\",key=\"team\",value=\"web\"} 1";
        assert!(text.contains(labels), "{text}");
        assert!(text.contains("mirrorball_vm_host_bytes{vm=\"a\"} 6"), "{text}");
        let document = include_str!("../../../docs/reference/api.md");
        let names = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let names: Vec<&str> = names.collect();
        assert_eq!(names.len(), 28, "{text}");
        for name in names {
            let is_documented = [format!("`{name}`"), format!("`{name}_total`")];
            assert!(
                is_documented.iter().any(|name| document.contains(name)),
                "{name} is not in docs/reference/api.md"
            );
        }
    }
}
