//! `mirrorball cluster join`: makes this machine a host of a running cluster.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cell::cluster::invitation::{JoinAnswer, JoinRequest, Token};
use config::cluster::{CellSpec, ClusterSpec};
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::files::Files;
use urpc::tls::{Deadline, Exchange, JoinedTexts, KeyRequest, write_joined};

use super::LabChoice;
use super::change::write_file;
use super::plan::host_nodes;
use super::up::up;
use crate::commands::execution_site::{RequiredIsolation, enter_lab};

/// Time limit for connecting to the inviting host.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for its response: all hosts of the cluster apply the new file first.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Maximum bytes of a token from standard input.
const TOKEN_BYTES_MAX: u64 = 4096;
/// Name of the file in its folder.
const FILE: &str = "cluster.toml";

/// Arguments of `join`.
#[derive(Debug, clap::Args)]
pub struct JoinArgs {
    /// The token that `mirrorball cluster invite` printed; `-` reads it from standard input, hidden from
    /// other users
    token: String,
    /// This many cells, instead of one for each NUMA node
    #[arg(long)]
    cells: Option<u16>,
    /// This host's name, when not its host name
    #[arg(long)]
    host: Option<String>,
    /// Where the cluster file and the keys go; /etc/mirrorball/cluster for root, else
    /// ~/.config/mirrorball/cluster
    #[arg(long, value_name = "FOLDER")]
    into: Option<PathBuf>,
    /// Whether to run in the lab
    #[arg(long, value_enum, default_value = "auto")]
    lab: LabChoice,
}

/// Joins, and starts this host's cells.
pub(super) fn join(args: &JoinArgs) -> Result<ExitCode> {
    if let Some(code) = enter_lab(args.lab, RequiredIsolation::default())? {
        return Ok(code);
    }
    let mut typed = String::new();
    if args.token == "-" {
        let input = std::io::stdin().lock();
        std::io::BufRead::read_line(&mut std::io::Read::take(input, TOKEN_BYTES_MAX), &mut typed)
            .into_diagnostic()?;
    }
    let token = if typed.is_empty() {
        &args.token
    } else {
        typed.trim()
    };
    let token: Token = token.parse().map_err(|error| miette!("{error}"))?;
    let own = nix::unistd::gethostname().into_diagnostic()?;
    let name = args
        .host
        .clone()
        .unwrap_or_else(|| own.to_string_lossy().into_owned());
    if name != token.host {
        return Err(miette!(
            help = format!(
                "give the command there, or add `--host {}` if this is it",
                token.host
            ),
            "the token is for host {}, and this is {name}",
            token.host
        ));
    }
    if !Files::open()
        .and_then(|files| files.plan())
        .into_diagnostic()?
        .is_empty()
    {
        return Err(miette!(
            help = "end it with `mirrorball cluster down`",
            "a cluster is up here already"
        ));
    }
    let folder = args.into.clone().map_or_else(default_folder, Ok)?;
    let file = folder.join(FILE);
    let cells = own_cells(args.cells)?;
    let (key, request) = KeyRequest::make(&name, &token.secret).map_err(|error| miette!("{error}"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let request = JoinRequest {
        secret: token.secret,
        host: name.clone(),
        public_key: request.public_key,
        proof: request.proof,
        unix_s: now.as_secs(),
        cells,
    };
    match ask(&token, &request)? {
        JoinAnswer::Refused(why) => return Err(miette!("{name} has not joined: {why}")),
        JoinAnswer::Welcome {
            certificate,
            authority,
            revoked,
            file: text,
        } => {
            let texts = JoinedTexts {
                certificate: &certificate,
                authority: &authority,
                revoked: &revoked,
            };
            keep(&file, &name, &text, &key, &texts)?;
        }
    }
    println!("{name} has joined; its cluster file is {}", file.display());
    up(Some(&file), None, Some(&name), false)
}

/// Writes the keys and the cluster file.
fn keep(file: &Path, name: &str, text: &str, key: &str, texts: &JoinedTexts<'_>) -> Result<()> {
    let spec = ClusterSpec::parse(&file.display().to_string(), text)?;
    let folder = super::plan::folder(file)?;
    hostfiles::private::directories(&folder).into_diagnostic()?;
    let keys = spec.keys(&folder).ok_or_else(super::cells::one_host)?;
    write_joined(&keys, name, key, texts).map_err(|error| miette!("{error}"))?;
    write_file(file, text)
}

/// Returns the cells of this host, as its own file would define them.
fn own_cells(count: Option<u16>) -> Result<Vec<CellSpec>> {
    let host = host_nodes()?;
    let spec = match count {
        Some(count) => ClusterSpec::of_count(&host, count)?,
        None => ClusterSpec::of_nodes(&host),
    };
    Ok(spec.cells)
}

fn default_folder() -> Result<PathBuf> {
    if nix::unistd::geteuid().is_root() {
        return Ok(PathBuf::from("/etc/mirrorball/cluster"));
    }
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let own = own.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let own = own.ok_or_else(|| {
        miette!(
            help = "name a folder with `--into FOLDER`",
            "this user has no home for the cluster file and the keys"
        )
    })?;
    Ok(own.join("mirrorball/cluster"))
}

fn ask(token: &Token, request: &JoinRequest) -> Result<JoinAnswer> {
    let address = token.address;
    let exchange = Exchange::call(address, token.authority, CALL_LIMIT).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => miette!("{address} is not called: {error}"),
        _ => miette!(
            help = "the token has been used or has expired, `cluster invite` has ended there, or a firewall \
                    closes the port",
            "no invitation answers at {address}: {error}"
        ),
    })?;
    let answer = || -> io::Result<JoinAnswer> {
        let mut exchange = exchange.until(Deadline::after(ANSWER_LIMIT));
        exchange.send(&serde_json::to_vec(request)?)?;
        Ok(serde_json::from_slice(&exchange.receive()?)?)
    };
    answer().map_err(|error| {
        miette!(
            help = "see the output of `mirrorball cluster invite` there",
            "{address} has not answered: {error}"
        )
    })
}
