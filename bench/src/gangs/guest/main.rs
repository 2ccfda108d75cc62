//! The program that `bench-gangs` runs in a guest of two vCPUs.
//! `bench-gangs-guest --program calibrate` prints how much work takes 100 us, as JSON.
//! `bench-gangs-guest --program spin|sleep|lock --work N --rounds N --warm-ms N --limit-ms N` starts a worker
//! on each CPU, and prints `READY`. After a line of input the workers run rounds: first for `--warm-ms`, then
//! the timed ones. It prints their number and time as JSON. The workers go on until the input ends, so that
//! the other VM has the same load until its own end.

mod program;
mod spin_barrier;
mod workers;

use std::io::{BufRead, Read};
use std::process::ExitCode;
use std::time::Duration;

use bench::Outcome;
use bench::options::Options;

use program::Program;
use workers::{Plan, run_rounds};

const USAGE: &str = "bench-gangs-guest --program calibrate|spin|sleep|lock [--work N --rounds N --warm-ms N \
                     --limit-ms N]";

fn run() -> Outcome<()> {
    let options = Options::of_process(USAGE)?;
    let name = options.needed("program")?;
    if name == "calibrate" {
        bench::cpu::pin(0)?;
        let [iterations, calls] = [Program::Spin, Program::Lock].map(Program::calibrate);
        println!("{{\"iterations\":{iterations},\"calls\":{calls}}}");
        return Ok(());
    }
    let program = Program::of_name(name).ok_or(USAGE)?;
    let number = |name: &str| -> Outcome<u64> { Ok(options.needed(name)?.parse()?) };
    let plan = Plan {
        program,
        work: number("work")?,
        rounds: number("rounds")?,
        warm_up: Duration::from_millis(number("warm-ms")?),
        limit: Duration::from_millis(number("limit-ms")?),
    };
    let mut input = std::io::stdin().lock();
    println!("READY");
    if input.read_line(&mut String::new())? == 0 {
        return Err("the input ended before the start".into());
    }
    let timed = run_rounds(&plan)?;
    println!(
        "{{\"rounds\":{},\"seconds\":{}}}",
        timed.rounds,
        timed.time.as_secs_f64()
    );
    // The workers end with the process.
    input.read_to_end(&mut Vec::new())?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-gangs-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
