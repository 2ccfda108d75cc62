//! Control socket of a lab in the background: changes the quality of a link. Requests and responses are one
//! line of JSON each, over a socket in the lab's directory.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::lab::{Delay, Loss, Quality};
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::error::Context;
use crate::links::Links;

/// The socket, in the lab's directory.
const SOCKET: &str = "control";

/// How long either side may take.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(10);

/// A question's length in bytes, at most.
const REQUEST_BYTES_MAX: u64 = 4 << 10;

/// Change of a link. An empty change only queries the link.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Change {
    /// Whether to restore the link of the lab's file first.
    pub restore: bool,
    /// Stays as it is when absent.
    pub delay: Option<Delay>,
    /// Stays as it is when absent.
    pub loss: Option<Loss>,
}

impl Change {
    /// A link of this quality, and of that in the lab's file, afterwards.
    fn of(&self, now: Quality, file: Quality) -> Quality {
        let before = if self.restore { file } else { now };
        Quality {
            delay: self.delay.unwrap_or(before.delay),
            loss: self.loss.unwrap_or(before.loss),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Request {
    hosts: [String; 2],
    change: Change,
}

/// The quality of the link; none when there is no such link.
type Response = Option<Quality>;

/// The socket's path, however long the directory's: a socket's address has 107 bytes.
fn path(directory: &File) -> PathBuf {
    format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd()).into()
}

/// Serves requests as long as the process lives, on a separate thread.
pub fn serve(directory: &Path, links: Links) -> Result<(), LabError> {
    let what = || format!("could not listen in {}", directory.display());
    let _ = fs::remove_file(directory.join(SOCKET));
    // The directory is this user's only, and so is the socket in it.
    let opened = File::open(directory).context(what)?;
    let listener = UnixListener::bind(path(&opened)).context(what)?;
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                // A malformed request, or one whose sender is gone, gets no response.
                let _ = serve_request(&stream, &links);
            }
        })
        .context(what)?;
    Ok(())
}

fn serve_request(mut stream: &UnixStream, links: &Links) -> std::io::Result<()> {
    stream.set_read_timeout(Some(SOCKET_TIMEOUT))?;
    stream.set_write_timeout(Some(SOCKET_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST_BYTES_MAX)).read_line(&mut line)?;
    let Request { hosts, change } = serde_json::from_str(&line)?;
    let response: Response = links.change(&hosts, |now, file| change.of(now, file));
    stream.write_all(&serde_json::to_vec(&response)?)
}

/// Changes the link between two hosts of the lab in `directory`. Returns its new quality; `None` if the hosts
/// share no link.
pub fn request_change(
    directory: &Path,
    hosts: [String; 2],
    change: Change,
) -> Result<Option<Quality>, LabError> {
    let request_change = || -> std::io::Result<Response> {
        let opened = File::open(directory)?;
        let mut stream = UnixStream::connect(path(&opened))?;
        stream.set_read_timeout(Some(SOCKET_TIMEOUT))?;
        let mut line = serde_json::to_vec(&Request { hosts, change })?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(serde_json::from_str(&text)?)
    };
    request_change().context(|| {
        format!(
            "the lab in {} does not take orders: end it with `mirrorball lab down`, and start it again by \
             this program",
            directory.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use config::lab::LabSpec;

    use super::*;

    fn change(delay: Option<&str>, loss: Option<&str>, restore: bool) -> Change {
        Change {
            restore,
            delay: delay.map(|text| text.parse().unwrap()),
            loss: loss.map(|text| text.parse().unwrap()),
        }
    }

    #[test]
    fn unchanged_settings_are_kept_and_restore_applies_the_file() {
        let text = "links = [{ hosts = [\"a\", \"b\"], delay = \"2ms\" }]\n\
                    [[hosts]]\nname = \"a\"\n[[hosts]]\nname = \"b\"\n[[hosts]]\nname = \"c\"\n";
        let (links, _ends) = Links::start(&LabSpec::parse("lab.toml", text).unwrap()).unwrap();
        let place = tempfile::tempdir().unwrap();
        // Longer than a socket's address.
        let directory = place.path().join("x".repeat(120));
        fs::create_dir(&directory).unwrap();
        serve(&directory, links).unwrap();
        let said = |one: &str, other: &str, change: Change| {
            let quality = request_change(&directory, [one.into(), other.into()], change).unwrap();
            quality.map(|quality| quality.to_string())
        };
        let is = |text: &str| Some(text.to_string());
        assert_eq!(said("a", "b", Change::default()), is("delay 2ms, loss 0%"));
        let worse = change(None, Some("1%"), false);
        assert_eq!(said("b", "a", worse), is("delay 2ms, loss 1%"));
        let slower = change(Some("500us"), None, false);
        assert_eq!(said("a", "b", slower), is("delay 500us, loss 1%"));
        assert_eq!(said("a", "b", change(None, None, true)), is("delay 2ms, loss 0%"));
        for (one, other) in [("a", "c"), ("a", "a"), ("a", "nobody")] {
            assert_eq!(said(one, other, Change::default()), None);
        }
    }

    #[test]
    fn malformed_request_is_dropped_and_the_next_one_is_served() {
        let spec = LabSpec::one_host();
        let place = tempfile::tempdir().unwrap();
        serve(place.path(), Links::start(&spec).unwrap().0).unwrap();
        let opened = File::open(place.path()).unwrap();
        let mut stream = UnixStream::connect(path(&opened)).unwrap();
        stream.write_all(b"nonsense\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert_eq!(text, "");
        let response = request_change(place.path(), ["a".into(), "b".into()], Change::default());
        assert_eq!(response.unwrap(), None);
    }

    #[test]
    fn missing_control_socket_is_reported() {
        let place = tempfile::tempdir().unwrap();
        let error = request_change(place.path(), ["a".into(), "b".into()], Change::default()).unwrap_err();
        assert!(
            error.chain().contains("does not take orders"),
            "{}",
            error.chain()
        );
    }
}
