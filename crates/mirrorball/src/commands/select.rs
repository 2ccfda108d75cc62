//! Targets of a command: one VM by its name, or each VM that labels select.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use config::Selector;
use miette::{IntoDiagnostic, Result, miette};
use registry::vms::{Record, Registry};

use super::execution_site::{Found, find, in_lab};
use super::hosts::{at_hosts_of, vms_of_other_hosts};

/// Maximum number of concurrent VMs.
const AT_ONCE_MAX: usize = 64;

/// Arguments that select VMs.
#[derive(Debug, clap::Args)]
pub struct Selection {
    /// Name of the VM
    #[arg(required_unless_present = "label")]
    vm: Option<String>,
    /// Each VM with this label instead: KEY or KEY=VALUE; given several times, those with all of them
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "vm")]
    label: Vec<Selector>,
}

impl Selection {
    /// Acts on the named VM, or concurrently on each VM that the labels select. `done` is the word for
    /// success in the line that is printed for each selected VM.
    ///
    /// Returns the first failing exit status, by name. A host of the cluster that does not reply is a
    /// failure.
    ///
    /// # Errors
    /// If there is no such VM, or no VM has the labels.
    pub fn each(&self, done: &str, act: impl Fn(&str, &Path) -> Result<ExitCode> + Sync) -> Result<ExitCode> {
        if let Some(name) = &self.vm {
            return match find(name)? {
                Found::Here(folder) => act(name, &folder),
                Found::Elsewhere(code) => Ok(code),
            };
        }
        let here = self.here()?;
        let mut statuses = all(&here, &|name, folder| report(name, done, act(name, folder)));
        statuses.extend(self.elsewhere()?);
        if statuses.is_empty() {
            return in_lab()?.map_or_else(|| Err(self.none()), Ok);
        }
        Ok(first_failure(statuses))
    }

    /// Returns the VMs of this host that the labels select, by name, with their directories.
    fn here(&self) -> Result<Vec<(String, PathBuf)>> {
        let registry = Registry::open().into_diagnostic()?;
        let records = registry.list().into_diagnostic()?;
        let selected = records.into_iter().filter(|record| selects(&self.label, record));
        let with_folder = selected.map(|record| Ok((record.name.clone(), registry.folder_of(&record.name)?)));
        with_folder.collect::<std::io::Result<_>>().into_diagnostic()
    }

    /// Runs this command on each other host of the cluster that has such a VM. Returns a status for each of
    /// those hosts, and for each host that does not reply, after an error that names it.
    fn elsewhere(&self) -> Result<Vec<ExitCode>> {
        let others = vms_of_other_hosts()?;
        let selected = others.vms.iter().filter(|record| selects(&self.label, record));
        let cells: BTreeSet<u16> = selected.filter_map(|record| record.cell).collect();
        Ok(self.of_hosts(at_hosts_of(&cells)?, &others.silent))
    }

    fn of_hosts(&self, reached: Vec<(String, Result<ExitCode>)>, silent: &[String]) -> Vec<ExitCode> {
        let failed = |error: &miette::Report| {
            crate::complain(error);
            ExitCode::from(crate::exit::FAILED)
        };
        let reached = reached.into_iter().map(|(host, result)| match result {
            Ok(status) => status,
            Err(error) => failed(&self.unreached(&host, Some(&error))),
        });
        let silent = silent.iter().map(|host| failed(&self.unreached(host, None)));
        reached.chain(silent).collect()
    }

    /// Error for a host whose VMs may not have been acted on.
    fn unreached(&self, host: &str, why: Option<&miette::Report>) -> miette::Report {
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        miette!(
            help = "give the command again when `mirrorball cluster status` shows the host's cells",
            "host {host} does not answer, so its VMs with the label {} were not acted on{why}",
            self.labels()
        )
    }

    fn labels(&self) -> String {
        let labels: Vec<String> = self.label.iter().map(Selector::to_string).collect();
        labels.join(" and ")
    }

    fn none(&self) -> miette::Report {
        miette!(
            help = "`mirrorball ps --json` shows the labels of those that run",
            "no running VM has the label {}",
            self.labels()
        )
    }
}

/// Whether a VM has all these labels.
pub fn selects(selectors: &[Selector], record: &Record) -> bool {
    let labels = &record.spec.labels;
    selectors.iter().all(|selector| selector.matches(labels))
}

/// Acts on all VMs, several concurrently. The results are in the order of the VMs.
fn all(vms: &[(String, PathBuf)], act: &(impl Fn(&str, &Path) -> ExitCode + Sync)) -> Vec<ExitCode> {
    let mut statuses = Vec::with_capacity(vms.len());
    for some in vms.chunks(AT_ONCE_MAX) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = some
                .iter()
                .map(|(name, folder)| {
                    let thread = std::thread::Builder::new();
                    // A host without spare threads acts on one at a time.
                    thread
                        .spawn_scoped(scope, move || act(name, folder))
                        .map_err(|_| act(name, folder))
                })
                .collect();
            for thread in threads {
                statuses.push(match thread {
                    Ok(thread) => thread.join().unwrap_or(ExitCode::FAILURE),
                    Err(status) => status,
                });
            }
        });
    }
    statuses
}

/// Prints the line of one VM. An action that ends with its own status has printed it.
fn report(name: &str, done: &str, result: Result<ExitCode>) -> ExitCode {
    match result {
        Ok(ExitCode::SUCCESS) => {
            println!("{name}: {done}");
            ExitCode::SUCCESS
        }
        Ok(status) => status,
        Err(error) => {
            crate::complain(&error);
            ExitCode::from(crate::exit::FAILED)
        }
    }
}

fn first_failure(statuses: Vec<ExitCode>) -> ExitCode {
    let mut failures = statuses.into_iter().filter(|status| *status != ExitCode::SUCCESS);
    failures.next().unwrap_or(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_vm_is_acted_on_once_and_the_first_failure_by_name_is_the_status() {
        let vms: Vec<(String, PathBuf)> = (0..150)
            .map(|number| (format!("vm{number:03}"), PathBuf::new()))
            .collect();
        let count = AtomicUsize::new(0);
        let statuses = all(&vms, &|name, _| {
            count.fetch_add(1, Ordering::Relaxed);
            ExitCode::from(match name {
                "vm120" => 124,
                "vm140" => 1,
                _ => 0,
            })
        });
        assert_eq!(count.into_inner(), 150);
        assert_eq!(statuses[120], ExitCode::from(124));
        assert_eq!(first_failure(statuses), ExitCode::from(124));
        assert_eq!(first_failure(vec![ExitCode::SUCCESS; 3]), ExitCode::SUCCESS);
    }

    #[test]
    fn host_that_does_not_answer_is_a_failure_that_names_it() {
        let selection = Selection {
            vm: None,
            label: vec!["team=web".parse().unwrap()],
        };
        let reached = || vec![("alpha".to_owned(), Ok(ExitCode::SUCCESS))];
        let status = |reached, silent: &[String]| first_failure(selection.of_hosts(reached, silent));
        assert_eq!(status(reached(), &[]), ExitCode::SUCCESS);
        let failed = ExitCode::from(crate::exit::FAILED);
        assert_eq!(status(reached(), &["beta".to_owned()]), failed);
        let lost = vec![("beta".to_owned(), Err(miette!("the connection broke")))];
        assert_eq!(status(lost, &[]), failed);
        let error = selection.unreached("beta", None);
        assert!(error.to_string().contains("host beta does not answer"), "{error}");
        assert!(error.to_string().contains("team=web"), "{error}");
    }

    #[test]
    fn vm_is_selected_by_all_labels_together() {
        let spec = config::parse(
            "vm.toml",
            "image = \"x\"\nlabels = { team = \"web\", tier = \"1\" }",
        )
        .unwrap();
        let record = Record::new("a".to_owned(), spec, 3);
        let selects = |words: &[&str]| {
            let selectors: Vec<Selector> = words.iter().map(|word| word.parse().unwrap()).collect();
            selects(&selectors, &record)
        };
        assert!(selects(&["team"]) && selects(&["team=web", "tier=1"]));
        assert!(!selects(&["team=web", "tier=2"]) && !selects(&["app"]));
        assert!(selects(&[]));
    }
}
