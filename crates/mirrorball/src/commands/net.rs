//! `mirrorball net`: the networks of this user's subnet on this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use miette::{IntoDiagnostic, Result, WrapErr, miette};
use operations::networks::{self, Subnet};
use registry::runtime;
use registry::subnet::{Captured, CardReport, Connection, NetworkReport, Request, Response};
use serde::Serialize;

#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// List networks and their cards
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the cards of a network or of a VM, with counters and reasons of dropped frames
    Inspect {
        /// Name of a network or of a VM
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Write the frames of a network's or a VM's cards in the format of pcap, until Ctrl-C
    Capture {
        /// Name of a network or of a VM
        name: String,
        /// A file that does not exist yet; `-`, also the default, is standard output
        #[arg(long, short, value_name = "FILE", default_value = "-")]
        output: PathBuf,
    },
}

/// Runs the command.
pub fn run(command: &NetCommand) -> Result<()> {
    match command {
        NetCommand::Ls { json } => {
            let Subnet { networks, gateway } = listed()?;
            if *json {
                return print_json(&serde_json::json!({ "gateway": gateway, "networks": networks }));
            }
            print!("{}", table(&networks));
            Ok(())
        }
        NetCommand::Inspect { name, json } => {
            let found = find(listed()?.networks, name)?.0;
            if *json {
                return print_json(&found);
            }
            print!("{}", details(&found));
            Ok(())
        }
        NetCommand::Capture { name, output } => capture(name, output),
    }
}

fn print_json(report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(report).into_diagnostic()?;
    println!("{text}");
    Ok(())
}

/// Connects to the gateway; returns none if it does not run.
fn gateway() -> Result<Option<Connection>> {
    let runtime = runtime::directory().into_diagnostic()?;
    networks::connect(&runtime).map_err(|error| miette!("the subnet's gateway can't be reached: {error}"))
}

/// Sends a request, and waits for its response.
fn ask(connection: &mut Connection, request: &Request) -> Result<Response> {
    let response = connection
        .send(request, &[])
        .and_then(|()| connection.receive())
        .map_err(|error| miette!("the subnet's gateway does not answer: {error}"))?;
    match response {
        Some(Response::Refused { why }) => Err(miette!("{}", printable(&why))),
        Some(response) => Ok(response),
        None => Err(miette!(
            help = "try again",
            "the subnet's gateway ended before it answered"
        )),
    }
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Returns the networks of this user, and the gateway's process; none without a gateway.
fn listed() -> Result<Subnet> {
    let runtime = runtime::directory().into_diagnostic()?;
    networks::list(&runtime).map_err(|error| {
        miette!(
            help = "try again",
            "the subnet's gateway does not answer: {error}"
        )
    })
}

/// Returns the network of this name, or else the VM's cards with their networks, and the meaning of the name.
fn find(networks: Vec<NetworkReport>, name: &str) -> Result<(Vec<NetworkReport>, Captured)> {
    if let Some(network) = networks.iter().find(|network| network.name == name) {
        return Ok((vec![network.clone()], Captured::Network(name.to_owned())));
    }
    let of_vm = networks.into_iter().filter_map(|mut network| {
        network.cards.retain(|card| card.vm == name);
        (!network.cards.is_empty()).then_some(network)
    });
    let of_vm: Vec<_> = of_vm.collect();
    if of_vm.is_empty() {
        return Err(miette!(
            help = "`mirrorball net ls` lists them",
            "no network and no VM with a card of a subnet is called {name:?}"
        ));
    }
    Ok((of_vm, Captured::Vm(name.to_owned())))
}

fn capture(name: &str, output: &Path) -> Result<()> {
    let (_, of) = find(listed()?.networks, name)?;
    let mut connection = gateway()?.ok_or_else(|| miette!("the subnet's gateway has ended"))?;
    let mut target: Box<dyn Write> = if output == Path::new("-") {
        Box::new(io::stdout().lock())
    } else {
        let file = File::options().write(true).create_new(true).open(output);
        let file = file
            .into_diagnostic()
            .wrap_err_with(|| format!("{}: name a new file", output.display()))?;
        Box::new(file)
    };
    match ask(&mut connection, &Request::Capture { of })? {
        Response::Capturing => {}
        _ => return Err(miette!("the subnet's gateway sent another answer than a capture")),
    }
    connection.set_limit(None).into_diagnostic()?;
    let (mut stream, begun) = connection.into_stream();
    let written = target.write_all(&begun).and_then(|()| {
        let mut bytes = vec![0; 64 << 10];
        loop {
            match stream.read(&mut bytes)? {
                0 => return Ok(()),
                // A reader sees each frame at once.
                count => target.write_all(&bytes[..count]).and_then(|()| target.flush())?,
            }
        }
    });
    match written {
        // The reader of a pipe has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written
            .into_diagnostic()
            .wrap_err_with(|| output.display().to_string()),
    }
}

/// Formats networks as a table.
fn table(networks: &[NetworkReport]) -> String {
    let mut rows = vec![["NETWORK", "VM", "CARD", "MAC", "ADDRESSES", "NAME"].map(str::to_owned)];
    for network in networks {
        rows.extend(network.cards.iter().map(|card| {
            [
                network.name.clone(),
                card.vm.clone(),
                format!("net{}", card.card),
                card.mac.clone(),
                joined(&card.addresses),
                card.names.first().cloned().unwrap_or_default(),
            ]
        }));
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..6).map(width).collect();
    let line = |row: &[String; 6]| {
        let cells: Vec<_> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Formats networks with the counters of their cards.
fn details(networks: &[NetworkReport]) -> String {
    let mut text = String::new();
    for network in networks {
        text += &format!(
            "{}: {}, gateway {}{}{}\n",
            network.name,
            network.ranges.join(", "),
            joined(&network.gateway),
            if network.isolated { ", isolated" } else { "" },
            if network.peers {
                ""
            } else {
                ", no card reaches another"
            },
        );
        network.cards.iter().for_each(|card| text += &of_card(card));
    }
    text
}

fn of_card(card: &CardReport) -> String {
    let mut text = format!(
        "  {} net{}: {}, {}\n    names: {}\n",
        card.vm,
        card.card,
        card.mac,
        joined(&card.addresses),
        card.names.join(", ")
    );
    if !card.forward.is_empty() {
        text += &format!("    forwarded: {}\n", card.forward.join(", "));
    }
    if card.host {
        text += "    reaches the host\n";
    }
    if card.offloads {
        text += "    offloads: checksums, TCP segmentation\n";
    }
    if !card.outside {
        text += "    does not reach the outside\n";
    }
    text += &format!("    counters: {}\n", pairs(&card.counters));
    if !card.dropped.is_empty() {
        text += &format!("    dropped: {}\n", pairs(&card.dropped));
    }
    text
}

fn joined(items: &[impl ToString]) -> String {
    let items: Vec<_> = items.iter().map(ToString::to_string).collect();
    items.join(", ")
}

fn pairs(counters: &BTreeMap<String, u64>) -> String {
    let pairs: Vec<_> = counters
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    pairs.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(name: &str, vms: &[&str]) -> NetworkReport {
        let card = |vm: &&str| CardReport {
            vm: (*vm).to_owned(),
            card: 0,
            names: vec![(*vm).to_owned()],
            mac: "02:00:00:00:00:01".to_owned(),
            addresses: vec![[10, 213, 0, 5].into()],
            forward: vec!["8080:80".to_owned()],
            host: false,
            offloads: true,
            outside: false,
            counters: BTreeMap::from([("from_guest_frames".to_owned(), 3)]),
            dropped: BTreeMap::from([("from_guest_source_mac".to_owned(), 1)]),
        };
        NetworkReport {
            name: name.to_owned(),
            ranges: vec!["10.213.0.0/16".to_owned()],
            gateway: vec![[10, 213, 0, 1].into()],
            isolated: true,
            peers: false,
            cards: vms.iter().map(card).collect(),
        }
    }

    #[test]
    fn name_is_a_networks_first_and_then_a_vms() {
        let all = || vec![network("a", &["web", "db"]), network("web", &["db"])];
        let (found, of) = find(all(), "web").unwrap();
        assert_eq!((found.len(), of), (1, Captured::Network("web".to_owned())));
        let (found, of) = find(all(), "db").unwrap();
        assert_eq!((found.len(), found[0].cards.len()), (2, 1));
        assert_eq!(of, Captured::Vm("db".to_owned()));
        let error = find(all(), "nobody").unwrap_err().to_string();
        assert!(error.contains("\"nobody\""), "{error}");
    }

    #[test]
    fn table_and_details_show_addresses_counters_and_reasons() {
        let all = [network("a", &["web"])];
        let table = table(&all);
        assert!(table.starts_with("NETWORK  VM   CARD"), "{table}");
        assert!(table.contains("10.213.0.5"), "{table}");
        let details = details(&all);
        for part in [
            "8080:80",
            ", isolated, no card reaches another\n",
            "does not reach the outside",
            "from_guest_frames 3",
            "dropped: from_guest_source_mac 1",
        ] {
            assert!(details.contains(part), "{details}");
        }
    }
}
