//! A VM over two hosts, alpha and beta: processes on the loopback with runtime directories of their own.
//! Beta's cell, the command that starts a part, the part's monitor and the shards are this same program,
//! started again. Everything between the hosts is real, and so are KVM and userfaultfd. Only the links of the
//! cells are missing, so each cell takes itself for the only one. In one story these are real, too, with an
//! etcd.

mod hosts {
    pub mod beta;
    pub mod deaf;
    pub mod etcd;
    pub mod herald;
    pub mod site;
    pub mod stories;
    pub mod two;
}

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::process::ExitCode;

use cell::programs;
use cell::remote::{launch, monitor};
use shard::launch::CONTROL_FD;
use shard_api::control::ControlSocket;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let done = match arguments.get(1).map(String::as_str) {
        Some(name) if arguments[0] == programs::SHARD => {
            // SAFETY: the parent has put the control socket there, and nothing else here uses it.
            let control = ControlSocket::from(unsafe { OwnedFd::from_raw_fd(CONTROL_FD) });
            if let Some((home, life)) = hosts::deaf::kind(name) {
                return hosts::deaf::run(&control, home, life);
            }
            if name == hosts::herald::NAME {
                return hosts::herald::run(&control);
            }
            // As the program of shards does.
            let log = process_log::Settings::from_args([]).and_then(process_log::Settings::begin);
            log.expect("the first log of this process");
            return shard::process::run(&control);
        }
        Some(_) if arguments[0] == programs::KEEPER => {
            let monitor = std::io::stdin().as_fd().try_clone_to_owned();
            monitor.and_then(keeper::server::run)
        }
        Some(launch::COMMAND) => launch::launch(std::io::stdin(), std::io::stdout()),
        Some(launch::MONITOR) => {
            let socket = std::io::stdin().as_fd().try_clone_to_owned();
            socket.and_then(|socket| monitor::run(socket.into(), shard::PLATFORM, Ok(hosts::two::programs())))
        }
        Some("beta") => hosts::beta::serve(&[1, 2]),
        Some("home") => hosts::two::home(),
        Some("cell") => cell::cluster::serve::serve(u16::from(arguments[2] != "0"), false, shard::PLATFORM),
        Some("story") => return hosts::stories::tell(&arguments[2]),
        other => return hosts::stories::tell_all(other),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
