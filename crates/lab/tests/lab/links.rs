//! A link's delay and loss, as the lab's file has them and as a command changes them, measured between two
//! hosts.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use crate::background::Background;
use crate::command::{Ended, lab, turn};

const LAB: &str = r#"
links = [{ hosts = ["left", "right"], delay = "2ms" }]
[[hosts]]
name = "left"
cpus = 1
memory = "512M"
[[hosts]]
name = "right"
cpus = 1
memory = "512M"
"#;

const TOOL: &str = env!("CARGO_BIN_EXE_lab-tool");

/// Runs `lab link` between the two hosts. Returns its output.
#[track_caller]
fn link(running: &Background, change: &[&str]) -> String {
    let command = [&["link", "--lab", &running.name, "left", "right"], change].concat();
    Ended::of(lab(&command)).expect(0).text().trim().to_owned()
}

/// A program that answers each datagram, in `right`.
struct Reflector(Child);

impl Reflector {
    #[track_caller]
    fn start(running: &Background) -> Self {
        let mut command = lab(&running.command("right", &[TOOL, "reflect", "7777"]));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut up = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut up)
            .unwrap();
        assert_eq!(up, "up\n");
        Self(child)
    }
}

impl Drop for Reflector {
    fn drop(&mut self) {
        // The lab's end takes the program itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends `count` datagrams from `left`; returns the number of replies, and the shortest round trip in
/// microseconds.
#[track_caller]
fn probe(running: &Background, count: u32) -> (u32, u64) {
    let said = running.on("left", &[TOOL, "probe", "10.77.0.2", "7777", &count.to_string()]);
    eprint!("probe: {said}");
    let words: Vec<&str> = said.split_whitespace().collect();
    let number = |at: usize| words[at].parse().unwrap();
    (u32::try_from(number(0)).unwrap(), number(8))
}

/// Promise LAB-03.
#[test]
fn link_has_the_delay_and_loss_of_its_file_or_of_the_last_command() {
    let _turn = turn();
    let running = Background::up(LAB);
    let _reflector = Reflector::start(&running);

    assert_eq!(
        link(&running, &[]),
        "left and right, each way: delay 2ms, loss 0%"
    );
    let (came, best_us) = probe(&running, 50);
    // The first one waits for a neighbour's address.
    assert!(
        came >= 48,
        "{came} of 50 came back over a link that loses nothing"
    );
    assert!(best_us >= 4_000, "2 ms each way, and back after {best_us} us");

    // Half of all that go there and back: 5 and 45 are more than five standard deviations away.
    let said = link(&running, &["--loss", "30%"]);
    assert_eq!(said, "left and right, each way: delay 2ms, loss 30%");
    let (came, best_us) = probe(&running, 50);
    assert!((5..45).contains(&came), "{came} of 50 came back");
    assert!(best_us >= 4_000, "2 ms each way, and back after {best_us} us");

    link(&running, &["--delay", "25ms", "--loss", "0%"]);
    let (came, best_us) = probe(&running, 50);
    assert!(
        came >= 48,
        "{came} of 50 came back over a link that loses nothing"
    );
    assert!(best_us >= 50_000, "25 ms each way, and back after {best_us} us");

    link(&running, &["--down"]);
    assert_eq!(probe(&running, 10).0, 0, "over a link that is down");

    let said = link(&running, &["--restore"]);
    assert_eq!(said, "left and right, each way: delay 2ms, loss 0%");
    let (came, best_us) = probe(&running, 50);
    assert!(came >= 40, "{came} of 50 came back over a restored link");
    assert!((4_000..50_000).contains(&best_us), "back after {best_us} us");

    let wrong = |hosts: [&str; 2], change: &[&str], help: &str| {
        let command = [&["link", "--lab", &running.name][..], &hosts, change].concat();
        let ended = Ended::of(lab(&command));
        assert!(!matches!(ended.status, Some(0)), "{ended}");
        assert!(ended.stderr.contains(help), "{ended}");
    };
    let no_link = format!(
        "lab {} has no link between left and left: its file names those that it has",
        running.name
    );
    wrong(["left", "left"], &[], &no_link);
    wrong(["left", "middle"], &[], "has no host middle: it has left, right");
    let help = "\"2\" is not a delay: write a whole number and us, ms or s";
    wrong(["left", "right"], &["--delay", "2"], help);
    wrong(
        ["left", "right"],
        &["--loss", "1"],
        "write a percentage from 0% to 100%",
    );
}
