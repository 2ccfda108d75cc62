//! The egress policy of a user-mode card: the process of its filter, and the log of its end.

use std::io;
use std::sync::Arc;

use config::vm::SandboxSpec;
use registry::cluster::files::Files;
use subnet::Egress;
use subnet::process::{Count, FLAG};

use crate::cluster::addresses;
use crate::programs::{self, BuildProgram};
use crate::shard_log::ShardLog;
use crate::text::printable;

/// The egress policy of the card `id`, whose filter is `program` and counts in `count`. A line goes to `log`
/// when the card is cut off.
pub(super) fn egress(
    id: &str,
    program: &BuildProgram,
    sandbox: SandboxSpec,
    log: Arc<ShardLog>,
    count: Count,
) -> io::Result<Egress> {
    let id = id.to_owned();
    Ok(Egress {
        cluster: Arc::new(addresses::listing(Files::open()?)),
        count: Arc::new(count),
        program: program.sealed(FLAG),
        seal: programs::seal(sandbox),
        cut_off: Arc::new(move |why| log.note(&cut_off_line(&id, why))),
    })
}

/// The line of a log for a card that was cut off. The filter's message may be a guest's.
fn cut_off_line(id: &str, why: &str) -> String {
    let why = printable(why);
    format!("{id}: {why}; the card's link is down until the VM boots again")
}

#[cfg(test)]
mod tests {
    use child_process::Seal;

    use super::*;

    #[test]
    fn line_of_a_card_that_was_cut_off_names_it_and_carries_no_terminal_escapes() {
        assert_eq!(
            cut_off_line(
                "net1",
                "the frame filter left with status 1; it said: \x1b[31mred\nnet0: fine"
            ),
            "net1: the frame filter left with status 1; it said:  [31mred net0: fine; \
             the card's link is down until the VM boots again"
        );
    }

    #[test]
    fn filter_of_a_card_is_the_program_of_shards_with_the_vms_strictness_and_its_end_is_in_the_log() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("shard.log");
        let log = Arc::new(ShardLog::create(&path).unwrap());
        let program = BuildProgram::open(std::path::Path::new("/bin/true")).unwrap();
        let policy = egress("net0", &program, SandboxSpec::Require, log, Count::new().unwrap()).unwrap();
        assert_eq!(policy.program.words, ["mirrorball-shard", "--frame-filter"]);
        assert!(Arc::ptr_eq(&policy.program.file, program.file()));
        assert_eq!(policy.seal, Seal::Require);
        (policy.cut_off)("passt has ended");
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            text,
            "monitor: net0: passt has ended; the card's link is down until the VM boots again\n"
        );
    }
}
