//! Flags of `mirrorball run`, and the VM that they describe.

use std::path::PathBuf;

use config::vm::{DiskMode, DiskSpec, FolderSpec, KernelSpec, NetKind, NetSpec};
use config::{ConfigError, IoLimitSpec, Label, Size, SpanMemory, SpanSpec, VmSpec, cpulist};
use miette::{Result, miette};
use registry::vms::BOOT_LIMIT_S;

use super::execution_site::LabChoice;

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// VM files; flags that describe a VM belong into them
    #[arg(conflicts_with_all = ["image", "warm", "kernel", "cmdline", "cpus", "memory", "memory_nodes",
        "disk", "folder", "net", "name",
        "sandbox", "pages", "share", "share_group", "cell", "cells", "span", "span_memory",
        "cpu_weight", "cpu_limit", "cpu_reservation", "memory_limit", "io_limit", "core_scheduling",
        "restart", "scratch_limit", "label", "resident", "paging_file", "paging_disk", "memory_min",
        "memory_weight"])]
    pub files: Vec<PathBuf>,
    /// An image of the image store
    #[arg(long)]
    pub image: Option<String>,
    /// Start from a template of the image, which has booted already; the first start makes it
    #[arg(long)]
    pub warm: bool,
    /// Kernel file: bzImage or ELF
    #[arg(long)]
    pub kernel: Option<PathBuf>,
    /// Initramfs of that kernel
    #[arg(long, requires = "kernel")]
    pub initrd: Option<PathBuf>,
    /// Words for the kernel's command line, behind Mirrorball's and the image's: of words with one key the
    /// last counts
    #[arg(long)]
    pub cmdline: Option<String>,
    /// Number of vCPUs, 1 to 254
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=254))]
    pub cpus: u8,
    /// Guest memory
    #[arg(long, default_value = "512M")]
    pub memory: Size,
    /// The host's NUMA nodes that guest memory is bound to, as 0 or 0-1,3
    #[arg(long, value_name = "NODES", value_parser = host_nodes, default_value = "",
        hide_default_value = true)]
    pub memory_nodes: HostNodes,
    /// Maximum guest memory in the host's memory, as 256M; the rest is in a paging file
    #[arg(long, value_name = "SIZE")]
    pub resident: Option<Size>,
    /// A new or empty file, a block device, or a directory for the paging file; /var/tmp otherwise
    #[arg(long, value_name = "PATH", requires = "resident")]
    pub paging_file: Option<PathBuf>,
    /// A disk of this size for the guest's swap, as 512M, whose pages are in the paging file
    #[arg(long, value_name = "SIZE", requires = "resident")]
    pub paging_disk: Option<Size>,
    /// Guest memory that stays in the host's memory whatever the pressure, as 128M; all that it may have
    /// otherwise
    #[arg(long, value_name = "SIZE")]
    pub memory_min: Option<Size>,
    /// Its weight when the host is short of memory, 1 to 10000; 100 is ordinary
    #[arg(long, value_name = "WEIGHT", requires_all = ["resident", "memory_min"])]
    pub memory_weight: Option<u16>,
    /// A disk: PATH[:private|exclusive][:persistent]
    #[arg(long)]
    pub disk: Vec<String>,
    /// A folder of the host, which the guest mounts by its tag: PATH:TAG[:ro]
    #[arg(long, value_name = "PATH:TAG")]
    pub folder: Vec<String>,
    /// user[,host][,forward=[udp:]HOST:GUEST][,mac=MAC], subnet with the same options and
    /// [,network=NAME][,address=IPV4][,bandwidth=SIZE][,packets=N], tap=NAME[,mac=MAC] or none
    #[arg(long)]
    pub net: Vec<String>,
    /// The VM's name
    #[arg(long)]
    pub name: Option<String>,
    /// A label by which commands select the VM: KEY=VALUE, several times for several
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<Label>,
    /// auto, require or off
    #[arg(long, default_value = "auto")]
    pub sandbox: String,
    /// How memory read from images is shared: adaptive, deferred, at-read or never; or scan: the host merges
    /// equal pages of all its memory
    #[arg(long)]
    pub share: Option<String>,
    /// The group of VMs that share memory with one another and with no other VM
    #[arg(long)]
    pub share_group: Option<String>,
    /// Its part of CPUs that VMs share, 1 to 10000; 100 is ordinary
    #[arg(long, value_name = "WEIGHT")]
    pub cpu_weight: Option<u16>,
    /// As many of the host's CPUs it uses at most, as 1.5
    #[arg(long, value_name = "CPUS")]
    pub cpu_limit: Option<f64>,
    /// CPU time of its cell that it has before others, in CPUs, as 0.5; in a cluster with `cpus = "gangs"`
    #[arg(long, value_name = "CPUS")]
    pub cpu_reservation: Option<f64>,
    /// Memory of the host that the VM's processes use at most, the guest's included, as 700M
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<Size>,
    /// I/O of the host's devices at most each second:
    /// read_bytes=SIZE,write_bytes=SIZE,reads=NUMBER,writes=NUMBER
    #[arg(long, value_name = "LIMITS")]
    pub io_limit: Option<IoLimitSpec>,
    /// Nothing else runs on a core of the host while the VM does
    #[arg(long)]
    pub core_scheduling: bool,
    /// Start the VM again after it has ended: no, on-failure or always; never after `stop` or `kill`
    #[arg(long, value_name = "WHEN", default_value = "no")]
    pub restart: String,
    /// Maximum size of each disk's temporary overlay, as 4G
    #[arg(long, value_name = "SIZE")]
    pub scratch_limit: Option<Size>,
    /// The cell of the cluster to run in
    #[arg(long)]
    pub cell: Option<u16>,
    /// The cells that the VM may depend on, as 1,0: it runs in one of them, and borrows memory of no other
    #[arg(long, value_name = "CELLS", value_delimiter = ',')]
    pub cells: Vec<u16>,
    /// The cells of the cluster to span, as 0,1, the VM's home first; or auto
    #[arg(long, value_name = "CELLS")]
    pub span: Option<SpanSpec>,
    /// Memory of the cells that it spans: shared between them; or coherent, a copy in each
    #[arg(long, value_name = "KIND", requires = "span")]
    pub span_memory: Option<SpanMemory>,
    /// 4K, thp, 2M or 1G
    #[arg(long, default_value = "4K")]
    pub pages: String,
    /// Time limit until a guest's agent answers, in seconds
    #[arg(long, default_value_t = BOOT_LIMIT_S)]
    pub boot_limit: u64,
    /// Whether to run in the lab
    #[arg(long, value_enum, default_value = "auto")]
    pub lab: LabChoice,
    /// Start this many, named NAME-0, NAME-1 and so on
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub count: Option<u16>,
    /// Return when the VMs run, and leave them running
    #[arg(long, short, conflicts_with = "command")]
    pub detach: bool,
    /// Leave them running in a scope of their own, which does not end with this session or unit (systemd)
    #[arg(long, requires = "detach")]
    pub scope: bool,
    /// Start them once: within 10 minutes the same command with the same ID prints the first result, and does
    /// nothing
    #[arg(long, value_name = "ID", requires = "detach")]
    pub request: Option<String>,
    /// Run this in the guest, then end the VM
    #[arg(last = true)]
    pub command: Vec<String>,
}

/// Parses a flag's value that is one of a spec's words.
pub(super) fn word<T: serde::de::DeserializeOwned>(flag: &str, text: &str) -> Result<T> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|error| miette!("--{flag} {text}: {error}"))
}

/// The host's NUMA nodes that a flag names, such as `0-1,3`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostNodes(pub Vec<u32>);

/// Parses a list of host nodes; none if the text is empty.
pub(super) fn host_nodes(text: &str) -> std::result::Result<HostNodes, &'static str> {
    const NODES_MAX: usize = 1024;
    if text.is_empty() {
        return Ok(HostNodes::default());
    }
    let nodes = cpulist::parse_below(text, NODES_MAX).ok_or("write nodes of the host, as 0 or 0-1,3")?;
    // All are below the limit.
    Ok(HostNodes(nodes.into_iter().map(|node| node as u32).collect()))
}

fn disk(text: &str) -> DiskSpec {
    let (mut path, mut mode, mut persistent) = (text, DiskMode::Private, false);
    loop {
        if let Some(rest) = path.strip_suffix(":persistent") {
            (path, persistent) = (rest, true);
        } else if let Some(rest) = path.strip_suffix(":exclusive") {
            (path, mode) = (rest, DiskMode::Exclusive);
        } else if let Some(rest) = path.strip_suffix(":private") {
            (path, mode) = (rest, DiskMode::Private);
        } else {
            break;
        }
    }
    DiskSpec {
        path: path.into(),
        format: None,
        mode,
        persistent,
        read_only: false,
        device: Default::default(),
        queues: None,
        share: None,
        on_full: Default::default(),
        bandwidth: None,
        operations: None,
    }
}

fn folder(text: &str) -> Result<FolderSpec> {
    let (named, read_only) = match text.strip_suffix(":ro") {
        Some(named) => (named, true),
        None => (text, false),
    };
    let (path, tag) = named
        .rsplit_once(':')
        .filter(|(path, tag)| !path.is_empty() && !tag.is_empty())
        .ok_or_else(|| miette!("--folder {text}: write PATH:TAG or PATH:TAG:ro, as /srv/data:data:ro"))?;
    Ok(FolderSpec {
        path: path.into(),
        tag: tag.to_owned(),
        read_only,
        cache: Default::default(),
        xattr: false,
        share: false,
    })
}

fn net(text: &str) -> Result<Option<NetSpec>> {
    let mut card = NetSpec::of(NetKind::User);
    let mut parts = text.split(',');
    match parts.next() {
        Some("none") => return Ok(None),
        Some("user") => {}
        Some("subnet") => card.kind = NetKind::Subnet,
        Some(other) => match other.strip_prefix("tap=") {
            Some(tap) => (card.kind, card.tap) = (NetKind::Tap, Some(tap.to_owned())),
            None => {
                return Err(miette!(
                    "--net {text}: use user[,host][,forward=[udp:]HOST:GUEST][,mac=MAC], \
                     subnet[,network=NAME][,address=IPV4][,bandwidth=SIZE][,packets=N] with the options of \
                     user, tap=NAME[,mac=MAC] or none"
                ));
            }
        },
        None => {}
    }
    for part in parts {
        match part.split_once('=') {
            None if part == "host" => card.host = true,
            Some(("forward", ports)) => card.forward.push(ports.to_owned()),
            Some(("mac", mac)) => card.mac = Some(mac.to_owned()),
            Some(("network", name)) => card.network = Some(name.to_owned()),
            Some(("address", address)) => card.address = Some(parsed(text, part, address)?),
            Some(("bandwidth", size)) => card.bandwidth = Some(parsed(text, part, size)?),
            Some(("packets", count)) => card.packets = Some(parsed(text, part, count)?),
            _ => {
                return Err(miette!(
                    "--net {text}: {part:?} is not an option; use host, forward=, mac=, and with subnet \
                     network=, address=, bandwidth= or packets="
                ));
            }
        }
    }
    Ok(Some(card))
}

/// Parses the value of the option `part` of a card.
fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str, part: &str, value: &str) -> Result<T> {
    value
        .parse()
        .map_err(|why| miette!("--net {text}: {part:?}: {why}"))
}

/// Returns the cells that it spans.
fn span(args: &RunArgs) -> Result<Option<SpanSpec>> {
    let memory = args.span_memory.unwrap_or_default();
    let span = args.span.clone().map(|span| span.with_memory(memory));
    span.transpose().map_err(|why| miette!("--span-memory: {why}"))
}

/// Returns the VM that the flags describe.
pub fn spec(args: &RunArgs) -> Result<VmSpec> {
    let mut cards = Vec::new();
    for text in &args.net {
        cards.extend(net(text)?);
    }
    let spec = VmSpec {
        name: args.name.clone(),
        after: Vec::new(),
        labels: config::labels::of_flags(&args.label).map_err(|why| miette!("--label: {why}"))?,
        image: args.image.clone(),
        warm: args.warm,
        cpus: args.cpus,
        cpu_weight: args.cpu_weight,
        cpu_limit: args.cpu_limit,
        cpu_reservation: args.cpu_reservation,
        // A VM without a gang is described in a file only.
        gang: true,
        memory_limit: args.memory_limit,
        io_limit: args.io_limit,
        core_scheduling: args.core_scheduling,
        restart: word("restart", &args.restart)?,
        memory: args.memory,
        memory_nodes: args.memory_nodes.0.clone(),
        resident: args.resident,
        paging_file: args.paging_file.clone(),
        paging_disk: args.paging_disk,
        memory_min: args.memory_min,
        memory_weight: args.memory_weight,
        kernel: (args.kernel.is_some() || args.cmdline.is_some()).then(|| KernelSpec {
            path: args.kernel.clone(),
            initrd: args.initrd.clone(),
            cmdline: args.cmdline.clone().unwrap_or_default(),
        }),
        root: Default::default(),
        // Regions are named in files only.
        shared: Vec::new(),
        disks: args.disk.iter().map(|text| disk(text)).collect(),
        folders: args
            .folder
            .iter()
            .map(|text| folder(text))
            .collect::<Result<_>>()?,
        nets: (!args.net.is_empty()).then_some(cards),
        nodes: Vec::new(),
        pages: word("pages", &args.pages)?,
        prefault: false,
        balloon: true,
        command: (!args.command.is_empty()).then(|| args.command.clone()),
        sandbox: word("sandbox", &args.sandbox)?,
        share: args
            .share
            .as_deref()
            .map(|text| word("share", text))
            .transpose()?,
        share_group: args.share_group.clone(),
        scratch_limit: args.scratch_limit,
        cell: args.cell,
        cells: args.cells.clone(),
        span: span(args)?,
    };
    config::check(&spec).map_err(|fault| ConfigError::from_flags(&fault))?;
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Run {
        #[command(flatten)]
        args: RunArgs,
    }

    fn parse(words: &[&str]) -> Result<RunArgs, clap::Error> {
        Run::try_parse_from([&["run"], words].concat()).map(|run| run.args)
    }

    #[test]
    fn cells_are_read_in_their_order_and_checked_like_those_of_a_file() {
        let spec = |words: &[&str]| {
            let args = parse(&[&["--image", "tiny"], words].concat()).unwrap();
            super::spec(&args)
        };
        assert_eq!(spec(&["--cells", "2,0"]).unwrap().cells, [2, 0]);
        assert!(spec(&[]).unwrap().cells.is_empty());
        let refused = spec(&["--cell", "1", "--cells", "2,0"]).unwrap_err();
        assert!(refused.to_string().contains("cell 1"), "{refused}");
    }

    #[test]
    fn a_wrong_number_of_cpus_is_refused_with_the_range_that_holds() {
        for number in ["0", "255", "256", "300", "-1"] {
            let said = parse(&["--image", "tiny", &format!("--cpus={number}")])
                .unwrap_err()
                .to_string();
            assert!(said.contains("1..=254"), "{said}");
        }
        for number in [1, 254] {
            let cpus = ["--image", "tiny", "--cpus", &number.to_string()];
            assert_eq!(parse(&cpus).unwrap().cpus, number);
        }
    }

    #[test]
    fn words_for_the_kernel_go_to_the_image_s_kernel_or_to_the_one_that_is_named() {
        for (words, path) in [
            (&["--image", "debian-12", "--cmdline", "psi=1 debug"][..], None),
            (
                &["--kernel", "vmlinuz", "--cmdline", "psi=1 debug"],
                Some("vmlinuz"),
            ),
        ] {
            let spec = spec(&parse(words).unwrap()).unwrap();
            let kernel = spec.kernel.unwrap();
            assert_eq!(kernel.path, path.map(PathBuf::from));
            assert_eq!(kernel.cmdline, "psi=1 debug");
        }
    }

    #[test]
    fn a_user_card_may_ask_for_the_host_and_a_tap_card_may_not() {
        let card = |text: &str| net(text).unwrap().unwrap();
        assert!(card("user,host,forward=8080:80").host);
        assert!(!card("user,forward=8080:80").host);
        let tap = spec(&parse(&["--image", "debian-12", "--net", "tap=tap0,host"]).unwrap());
        let error = tap.unwrap_err();
        assert_eq!(
            error.to_string(),
            "--net: a TAP device reaches what the host lets it"
        );
        let help = error.help().map(|help| help.to_string());
        assert_eq!(help.as_deref(), Some("drop `host`, or use `user`"));
    }

    #[test]
    fn folder_has_a_path_a_tag_and_perhaps_no_writes() {
        let read = |text: &str| folder(text).map(|folder| (folder.path, folder.tag, folder.read_only));
        let own = |path: &str, tag: &str, ro| (PathBuf::from(path), tag.to_owned(), ro);
        assert_eq!(read("/srv/data:data").unwrap(), own("/srv/data", "data", false));
        assert_eq!(read("/srv/data:data:ro").unwrap(), own("/srv/data", "data", true));
        assert_eq!(read("/srv/a:b:data").unwrap(), own("/srv/a:b", "data", false));
        assert_eq!(read("/srv/data:ro").unwrap_err().to_string().lines().count(), 1);
        for text in ["", "/srv", ":data", "/srv:", "/srv:ro"] {
            let why = read(text).unwrap_err().to_string();
            assert!(why.contains("PATH:TAG"), "{text}: {why}");
        }
        let words = ["--image", "tiny", "--folder", "/a:x", "--folder", "/b:x"];
        let why = spec(&parse(&words).unwrap()).unwrap_err().to_string();
        assert_eq!(why, "--folder (number 2): two folders have the tag x");
        assert!(parse(&["vm.toml", "--folder", "/a:x"]).is_err());
    }

    /// Promise HOSTILE-30.
    #[test]
    fn labels_are_given_one_by_one_and_each_key_once() {
        let words = ["--image", "tiny", "--label", "team=web", "--label", "canary="];
        let labels = spec(&parse(&words).unwrap()).unwrap().labels;
        assert_eq!(
            labels.into_iter().collect::<Vec<_>>(),
            [
                ("canary".to_owned(), String::new()),
                ("team".to_owned(), "web".to_owned())
            ]
        );
        let twice = [&words[..], &["--label", "team=db"]].concat();
        let why = spec(&parse(&twice).unwrap()).unwrap_err().to_string();
        assert_eq!(why, "--label: the label team is given twice; give each key once");
        assert!(parse(&["--image", "tiny", "--label", "team"]).is_err());
        assert!(parse(&["vm.toml", "--label", "team=web"]).is_err());
    }

    #[test]
    fn words_for_no_kernel_are_refused_and_so_are_words_beside_a_vm_file() {
        let error = spec(&parse(&["--cmdline", "psi=1"]).unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--cmdline: neither an image nor a kernel to boot"
        );
        let help = error.help().map(|help| help.to_string());
        assert_eq!(
            help.as_deref(),
            Some("add `--image debian-12`, or `--kernel FILE`")
        );
        let error = parse(&["vm.toml", "--cmdline", "psi=1"]).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict);
    }
}
