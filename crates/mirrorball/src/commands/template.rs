//! Templates of warm starts: `image warm`, and the template from which `run --warm` starts VMs.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent::client::ClientError;
use agent::protocol::{Renewal, ReplacedDisk};
use cell::frozen::FrozenVm;
use cell::snapshot::directory::caller;
use cell::template::{
    Basis, Begun, Found, HostIdentity, Key, Making, PLACEHOLDER_SECTORS, Template, TemplateEntry,
    TemplateMachine, TemplateStore,
};
use config::settings::Settings;
use config::vm::NetKind;
use config::{ConfigError, Size, VmSpec};
use data_encoding::HEXLOWER;
use diskstore::image::ImageStore;
use miette::{IntoDiagnostic, Report, Result, miette};
use nix::unistd::geteuid;
use registry::monitor::{Batch, Source};
use registry::vms::BOOT_LIMIT_S;
use serde_json::json;

use super::clone::wait;
use super::clone_identity::{Clone, identity, random};
use super::execution_site::{self, LabChoice, RequiredIsolation};
use super::host_file;
use crate::guest;

/// Pause between two questions whether a guest is up.
const UP_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for an agent to reply to a renewal: it may draw RSA keys, which takes a minute
/// in a lab.
const RENEWAL_LIMIT: Duration = Duration::from_secs(300);
/// Least time limit for an agent of a guest that has booted to accept a connection.
const AGENT_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for the end of the VM of which a template was made.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Time for which a command waits beyond the boot limit for another one that makes the template.
const MAKER_MARGIN: Duration = Duration::from_secs(120);
/// Greatest number of disks of a template, of the 31 devices of a machine.
const DISKS_MAX: i64 = 24;
/// Bytes of a machine id, and of a boot id.
const ID_BYTES: usize = 16;

/// Arguments of `image warm`.
#[derive(Debug, clap::Args)]
pub struct WarmArgs {
    /// The image to make a template of
    #[arg(required_unless_present_any = ["list", "remove"], conflicts_with_all = ["list", "remove"])]
    image: Option<String>,
    /// Number of vCPUs, 1 to 254
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=254))]
    cpus: u8,
    /// Guest memory
    #[arg(long, default_value = "512M")]
    memory: Size,
    /// A network card of the template's machine: subnet, user or none; repeatable; one of a subnet if absent
    #[arg(long, value_name = "KIND")]
    net: Vec<TemplateCard>,
    /// Number of writable disks beside the image's
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u8).range(..=DISKS_MAX))]
    disks: u8,
    /// The share group of the VMs that are to start from it
    #[arg(long)]
    share_group: Option<String>,
    /// Time limit until the guest is up, in seconds
    #[arg(long, default_value_t = BOOT_LIMIT_S)]
    boot_limit: u64,
    /// Whether to run in the lab
    #[arg(long, value_enum, default_value = "auto")]
    lab: LabChoice,
    /// List the templates
    #[arg(long)]
    list: bool,
    /// The list as JSON
    #[arg(long, requires = "list")]
    json: bool,
    /// Remove the template with this key
    #[arg(long, value_name = "KEY")]
    remove: Vec<String>,
}

/// A network card of `image warm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TemplateCard {
    /// User-mode networking
    User,
    /// A network of the subnet
    Subnet,
    /// No card
    None,
}

impl WarmArgs {
    /// Whether it changes nothing.
    pub fn only_prints(&self) -> bool {
        self.list
    }
}

/// A template from which the VMs of a command start.
pub struct Warm {
    template: Template,
    parent: Parent,
}

/// The VM of which a template was made.
#[derive(Clone)]
pub struct Parent {
    name: String,
    spec: VmSpec,
    /// The disks of the VMs that are others than the template's.
    replaced: Vec<ReplacedDisk>,
    /// Time limit for an agent to accept the renewal: many VMs that start at once take as long as a boot.
    agent_limit: Duration,
}

/// Makes, lists or removes templates.
pub fn warm(args: &WarmArgs) -> Result<ExitCode> {
    if args.list {
        return list(args.json);
    }
    if !args.remove.is_empty() {
        args.remove.iter().try_for_each(|key| remove(key))?;
        return Ok(ExitCode::SUCCESS);
    }
    let spec = spec(args)?;
    if let Some(code) = execution_site::enter_lab(args.lab, RequiredIsolation::of([&spec], true))? {
        return Ok(code);
    }
    let warm = ready(&spec, args.boot_limit)?;
    println!("{}", warm.template.key);
    Ok(ExitCode::SUCCESS)
}

/// Returns a VM that would start from the template.
fn spec(args: &WarmArgs) -> Result<VmSpec> {
    let mut spec = json!({
        "image": args.image,
        "warm": true,
        "cpus": args.cpus,
        "memory": args.memory,
        "share_group": args.share_group,
    });
    let kinds = args.net.iter().filter_map(|card| match card {
        TemplateCard::User => Some(NetKind::User),
        TemplateCard::Subnet => Some(NetKind::Subnet),
        TemplateCard::None => None,
    });
    if !args.net.is_empty() {
        spec["nets"] = kinds.map(|kind| json!({ "kind": kind })).collect();
    }
    // Their files are those of the VMs.
    spec["disks"] = (0..args.disks).map(|_| json!({ "path": "of-the-vm" })).collect();
    let mut spec: VmSpec = serde_json::from_value(spec).into_diagnostic()?;
    spec.list_default_card();
    config::check(&spec).map_err(|fault| ConfigError::from_flags(&fault))?;
    Ok(spec)
}

/// Users who may own a template's files: the lab's are those of its user.
fn owners() -> Vec<u32> {
    [Some(caller()), lab::auto::owner()]
        .into_iter()
        .flatten()
        .collect()
}

fn store() -> Result<(ImageStore, TemplateStore)> {
    let images = ImageStore::open_default().map_err(|error| miette!("{error}"))?;
    let templates = TemplateStore::open(images.data(), &owners()).map_err(|error| miette!("{error}"))?;
    Ok((images, templates))
}

fn list(as_json: bool) -> Result<ExitCode> {
    let entries = store()?.1.list().map_err(|error| miette!("{error}"))?;
    if as_json {
        let entry = |entry: &TemplateEntry| {
            let machine = &entry.basis.machine;
            json!({
                "key": entry.key.as_str(), "image": entry.basis.image, "cpus": machine.cpus,
                "memory": machine.memory, "cards": machine.cards, "disks": machine.disks,
                "bytes": entry.bytes, "made_s": entry.made_s, "used_s": entry.used_s,
            })
        };
        let all: Vec<_> = entries.iter().map(entry).collect();
        println!("{}", serde_json::to_string_pretty(&all).into_diagnostic()?);
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{:<16} {:<20} {:>4} {:>8} {:<12} {:>5} {:>8} LAST USE",
        "KEY", "IMAGE", "CPUS", "MEMORY", "CARDS", "DISKS", "SIZE"
    );
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    for TemplateEntry {
        key,
        basis,
        bytes,
        used_s,
        ..
    } in entries
    {
        let machine = &basis.machine;
        println!(
            "{key:<16} {:<20} {:>4} {:>8} {:<12} {:>5} {:>8} {} min ago",
            basis.image,
            machine.cpus,
            Size(machine.memory).to_string(),
            kinds(&machine.cards),
            machine.disks.len(),
            format!("{} MB", bytes / 1_000_000),
            now.as_secs().saturating_sub(used_s) / 60
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The kinds of cards in a list.
fn kinds(cards: &[NetKind]) -> String {
    let kind = |card: &NetKind| match card {
        NetKind::User => "user",
        NetKind::Subnet => "subnet",
        NetKind::Tap => "tap",
    };
    match cards {
        [] => "none".to_owned(),
        _ => cards.iter().map(kind).collect::<Vec<_>>().join(","),
    }
}

fn remove(key: &str) -> Result<()> {
    let unknown = || {
        miette!(
            help = "`mirrorball image warm --list` lists them",
            "there is no template {key}, or a start reads it"
        )
    };
    let parsed = Key::parse(key).ok_or_else(unknown)?;
    match store()?.1.remove(&parsed) {
        Ok(true) => Ok(()),
        Ok(false) => Err(unknown()),
        Err(error) => Err(miette!("{error}")),
    }
}

/// Removes the templates of an image that was removed.
pub fn remove_of_image(image: &str) -> Result<()> {
    let removed = store()?.1.remove_each(|entry| entry.basis.image == image);
    removed.map(drop).map_err(|error| miette!("{error}"))
}

/// Returns the template from which `vms` start, and makes it if there is none; none if they boot.
pub fn of_vms(vms: &[(String, VmSpec)], boot_limit_s: u64) -> Result<Option<Warm>> {
    let Some((first, spec)) = vms.iter().find(|(_, spec)| spec.warm) else {
        return Ok(None);
    };
    let alike = |other: &VmSpec| {
        other.warm
            && (&other.image, &other.share_group) == (&spec.image, &spec.share_group)
            && TemplateMachine::of(other) == TemplateMachine::of(spec)
    };
    if let Some((other, _)) = vms.iter().find(|(_, other)| !alike(other)) {
        return Err(miette!(
            help = "start them by commands of their own",
            "{other}: it can't start from the template of {first}: warm VMs of one command have the same \
             image, memory, vCPUs, share group, kinds of cards and number of disks"
        ));
    }
    ready(spec, boot_limit_s).map(Some)
}

/// Returns the template for a VM of `spec`; makes it if there is none.
fn ready(spec: &VmSpec, boot_limit_s: u64) -> Result<Warm> {
    let (images, templates) = store()?;
    let name = spec.image.as_deref().unwrap_or_default();
    let image = images.get(name).map_err(|error| miette!("{error}"))?;
    let host = HostIdentity::of_this_host().into_diagnostic()?;
    let basis = Basis::of(spec, &image.record, host_file::share_between()?, &host);
    let failed = |error: cell::template::TemplateError| miette!("{name}: {error}");
    let template = match templates.find(&basis).map_err(failed)? {
        Found::Ready(template) => template,
        found => {
            if let Found::Damaged(why) = found {
                eprintln!("mirrorball: the template of {name} is damaged ({why}); it is made again");
            }
            templates.remove_stale(&image.record).map_err(failed)?;
            let limit = Duration::from_secs(boot_limit_s).saturating_add(MAKER_MARGIN);
            match templates.begin(&basis, limit).map_err(failed)? {
                Begun::Made(template) => template,
                Begun::Making(making) => make(*making, &templates, boot_limit_s)?,
            }
        }
    };
    let spec = basis.spec(&template.key, Path::new("none")).into_diagnostic()?;
    let first = usize::from(image.record.disk.is_some());
    let replaced = (first..).take(spec.disks.len()).map(replaced_disk);
    Ok(Warm {
        parent: Parent {
            name: spec.name.clone().unwrap_or_default(),
            replaced: replaced.collect(),
            agent_limit: AGENT_LIMIT.max(Duration::from_secs(boot_limit_s)),
            spec,
        },
        template,
    })
}

/// The `index`th disk of a VM that starts warm, which is another than the template's.
fn replaced_disk(index: usize) -> ReplacedDisk {
    ReplacedDisk {
        serial: cell::open::disk_serial(index),
        template_sectors: PLACEHOLDER_SECTORS,
    }
}

/// Boots a VM, and makes a template of it when its guest is up.
fn make(making: Making, templates: &TemplateStore, boot_limit_s: u64) -> Result<Template> {
    let begun = Instant::now();
    let (key, image) = (making.key.clone(), making.basis().image.clone());
    let placeholder = making
        .placeholder()
        .map_err(|error| miette!("{image}: {error}"))?;
    let spec = making.basis().spec(&key, &placeholder).into_diagnostic()?;
    config::check(&spec).map_err(|fault| ConfigError::from_flags(&fault))?;
    eprintln!(
        "mirrorball: {image}: making a template with {} of memory and {} vCPU{}",
        spec.memory,
        spec.cpus,
        if spec.cpus == 1 { "" } else { "s" }
    );
    let name = spec.name.clone().unwrap_or_default();
    let lease = cell::monitor::start(
        Batch {
            vms: vec![(name.clone(), spec)],
            source: None,
            share_between: host_file::share_between()?,
            member: None,
            names: None,
            boot_limit_s,
        },
        shard::PLATFORM,
    )
    .map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "the monitor does not start: {error}"
        )
    })?;
    let running = wait(&lease, 1)?.0;
    let folder = running
        .first()
        .map(|vm| vm.folder.clone())
        .ok_or_else(|| miette!("{name}: it ended before it ran"))?;
    await_up(&name, &folder, Duration::from_secs(boot_limit_s))
        .map_err(|error| miette!(help = help(&error), "{image} can't be a template: {error}"))?;
    let mut frozen = FrozenVm::of(&folder).map_err(|error| miette!("{name}: {error}"))?;
    frozen.forget_disks();
    let bytes = cell::snapshot::write(&frozen, &name, &making.snapshot()).map_err(|error| {
        miette!(
            help = "free space in the data directory, or start without --warm",
            "the template of {image} was not written: {error}"
        )
    })?;
    lease.end();
    lease.limit_wait(END_LIMIT).into_diagnostic()?;
    lease.events().into_diagnostic()?.for_each(drop);
    let template = making
        .publish(bytes)
        .map_err(|error| miette!("{image}: {error}"))?;
    eprintln!(
        "mirrorball: {image}: the template {key} takes {} MB, after {:.1} s",
        bytes / 1_000_000,
        begun.elapsed().as_secs_f64()
    );
    let limit = Settings::load(geteuid().is_root())?.template_limit();
    let removed = templates.fit(limit, &key).map_err(|error| miette!("{error}"))?;
    for TemplateEntry { key, basis, .. } in removed {
        eprintln!(
            "mirrorball: {}: the template {key} was removed for space",
            basis.image
        );
    }
    Ok(template)
}

/// Help for an image of which no template can be made.
fn help(error: &Report) -> String {
    let own = error.help().map(|help| help.to_string());
    own.unwrap_or_else(|| "start it without --warm".to_owned())
}

/// Waits until the guest has finished its start.
fn await_up(name: &str, folder: &Path, limit: Duration) -> Result<()> {
    let begun = Instant::now();
    // It waits for the agent as long as the guest may boot.
    let mut stream = guest::connect_booting(name, folder, None)?;
    loop {
        match agent::client::is_up(stream) {
            Ok(true) => return Ok(()),
            Ok(false) if begun.elapsed() < limit => {}
            Ok(false) => {
                return Err(miette!(
                    help = "see `systemctl list-jobs` in the guest, or wait longer with --boot-limit",
                    "its services have not started within {} s",
                    limit.as_secs()
                ));
            }
            Err(ClientError::Refused(why)) => {
                return Err(miette!(
                    help = "build the image again, or start without --warm",
                    "its agent does not know warm starts: {why}"
                ));
            }
            Err(error) => return Err(guest::explain(name, error)),
        }
        std::thread::sleep(UP_POLL_INTERVAL);
        stream = guest::connect(name, folder, AGENT_LIMIT)?;
    }
}

impl Warm {
    /// The state from which the VMs resume.
    pub fn source(&self) -> Source {
        Source::Snapshot {
            directory: self.template.snapshot.clone(),
            owners: owners(),
        }
    }

    /// The VM whose identity the VMs have when they resume. The template may be removed from then on.
    pub fn into_parent(self) -> Parent {
        self.parent
    }
}

impl Parent {
    /// Gives the VM `name`, which has resumed from the template, an identity of its own.
    pub fn renew(&self, name: &str, spec: &VmSpec, folder: &Path) -> Result<()> {
        let renewal = Renewal {
            identity: identity((&self.name, &self.spec), &Clone { name, spec, folder })?,
            machine_id: HEXLOWER.encode(&random(ID_BYTES)?),
            boot_id: uuid(&random(ID_BYTES)?),
            disks: self.replaced.clone(),
        };
        let stream = guest::connect(name, folder, self.agent_limit)?;
        agent::client::renew(stream, &renewal, RENEWAL_LIMIT).map_err(|error| {
            miette!(
                help = "start it without --warm",
                "{name}: its guest got no identity of its own: {}",
                guest::explain(name, error)
            )
        })
    }
}

/// The random UUID (RFC 9562, version 4) of these bytes.
fn uuid(bytes: &[u8]) -> String {
    let mut bytes = bytes.to_vec();
    bytes.resize(ID_BYTES, 0);
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = HEXLOWER.encode(&bytes);
    [
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..],
    ]
    .join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, text: &str) -> (String, VmSpec) {
        let spec = config::parse("vm.toml", &format!("image = \"tiny\"\n{text}")).unwrap();
        (name.to_owned(), spec)
    }

    #[test]
    fn vms_of_one_command_start_from_one_template_or_boot() {
        assert!(of_vms(&[vm("a", ""), vm("b", "")], 1).unwrap().is_none());
        for other in [
            "",
            "warm = true\nmemory = \"256M\"",
            "warm = true\ncpus = 2",
            "warm = true\nnets = []",
            "warm = true\nnets = [{ kind = \"subnet\" }]",
            "warm = true\ndisks = [{ path = \"a.raw\" }]",
            "warm = true\nshare_group = \"red\"",
        ] {
            let vms = [vm("a", "warm = true"), vm("b", other)];
            let why = of_vms(&vms, 1).map(drop).unwrap_err().to_string();
            assert!(
                why.starts_with("b: it can't start from the template of a"),
                "{why}"
            );
        }
    }

    #[test]
    fn boot_ids_are_random_uuids_of_version_4() {
        assert_eq!(uuid(&[0; 16]), "00000000-0000-4000-8000-000000000000");
        assert_eq!(uuid(&[0xff; 16]), "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }
}
