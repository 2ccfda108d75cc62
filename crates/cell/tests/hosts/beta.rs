//! A host: it accepts connections of other hosts, and its cells answer monitors. Alpha's is a thread, beta's
//! a process, which ends with its standard input.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};

use cell::cluster::hosts::Hosts;
use cell::cluster::link::CallTable;
use cell::cluster::state::{Action, State};
use registry::cluster::files::{CellLock, Files};
use registry::cluster::interface::{CellRequest, CellResponse, CellStatus};

use super::site::plan;
use super::two::READY;

/// Serves as the host of these cells, in the runtime directory of the environment.
pub fn serve(cells: &[u16]) -> io::Result<()> {
    let files = Files::open()?;
    let site = files.site()?.ok_or(io::ErrorKind::NotFound)?;
    let hosts = Hosts::open(site).map_err(io::Error::other)?;
    let mut claims = Vec::new();
    for number in cells {
        claims.push(answer(&files, *number)?);
        let (hosts, listener) = (hosts.clone(), hosts.listen(*number)?);
        let me = protocol::CellId {
            number: *number,
            life: 1,
        };
        std::thread::spawn(move || hosts.take(&listener, &Arc::new(CallTable::new(me)), drop));
    }
    println!("{READY}");
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new()).map(drop)
}

/// Answers the monitors of a cell's VMs for as long as the process lives.
pub fn answer(files: &Files, number: u16) -> io::Result<CellLock> {
    let own = files.cell(number);
    let claim = own.claim(number)?;
    let mut state = State::new(claim.id, std::process::id(), plan(number), None, []);
    state.handle_all_linked();
    let state = Arc::new(Mutex::new(state));
    let listener = UnixListener::bind(own.socket())?;
    std::thread::spawn(move || {
        for (client, stream) in (0..).zip(listener.incoming().flatten()) {
            let state = state.clone();
            std::thread::spawn(move || {
                let mut lines = BufReader::new(stream);
                let mut line = String::new();
                while lines.read_line(&mut line).is_ok_and(|count| count > 0) {
                    let ask: CellRequest = serde_json::from_str(&line).expect("a question");
                    line.clear();
                    let acts = state.lock().expect("no panic").handle_request(client, ask);
                    for act in acts {
                        if let Action::Answer(_, answer) = act {
                            let mut line = serde_json::to_vec(&knowing_of_all(answer)).expect("JSON");
                            line.push(b'\n');
                            // The client may have gone.
                            let _ = lines.get_mut().write_all(&line);
                        }
                    }
                }
                state.lock().expect("no panic").handle_disconnect(client);
            });
        }
    });
    Ok(claim)
}

/// Changes the answer as if the cells had links: each has a record that the others live.
fn knowing_of_all(answer: CellResponse) -> CellResponse {
    let CellResponse::Status(mut status) = answer else {
        return answer;
    };
    for number in 0..4 {
        if status.cells.iter().all(|cell| cell.plan.number != number) {
            status.cells.push(CellStatus {
                plan: plan(number),
                pid: 0,
                life: Some(1),
                failed: false,
                cordoned: false,
                given_bytes: 0,
                lent: Vec::new(),
                borrowed: Vec::new(),
                vcpus: 0,
                vms: Vec::new(),
                regions: Vec::new(),
                lent_on_request: Vec::new(),
                lent_cpus: Vec::new(),
            });
        }
    }
    CellResponse::Status(status)
}
