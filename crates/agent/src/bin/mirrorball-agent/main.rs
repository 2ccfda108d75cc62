//! The agent's program inside the guest.
//!
//! One file for three uses:
//! - as a service of a full system, it listens on vsock port 1024;
//! - as `/init` of an initramfs, it loads the guest's modules and switches to the root disk's own init;
//! - as `/init` when the command line names no root, it is the whole user space: a shell on the console and
//!   the agent.

mod balance;
mod cpus;
mod held_programs;
mod housekeeping;
mod init;
mod listen;
mod modules;
mod power;
mod root;

fn main() -> std::process::ExitCode {
    agent::panic::ends_the_process();
    if std::process::id() == 1 {
        init::run();
    }
    match std::env::args().nth(1).as_deref() {
        None => {}
        Some("--version") => {
            println!("mirrorball-agent {}", agent::VERSION);
            return std::process::ExitCode::SUCCESS;
        }
        Some(_) => {
            eprintln!(
                "usage: mirrorball-agent [--version]\nListens on vsock port {}.",
                agent::VSOCK_PORT
            );
            return std::process::ExitCode::from(2);
        }
    }
    let error = listen::listen();
    eprintln!(
        "mirrorball-agent: can't listen on vsock port {}: {error}",
        agent::VSOCK_PORT
    );
    std::process::ExitCode::FAILURE
}
