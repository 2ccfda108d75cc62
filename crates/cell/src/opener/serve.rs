//! The process itself: takes the owner's rights, then opens what its monitor requests.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use child_process::Credentials;
use diskstore::disk::{Format, OpenDisk, allocate_whole, open_files};
use hostfiles::names::{Access, Below, Kind};
use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use shard_api::chain::chain;
use shard_api::launch::{DiskFormat, Fd};
use shard_api::message::{ReceiveError, receive, send};

use super::protocol::{Answer, NamedDisk, NamedLayer, Request, Wanted};

/// Descriptors from here on are closed: the standard ones are below.
const FIRST_OTHER: libc::c_uint = 3;

/// Opens files for the monitor at the other end of `socket`, with the rights of the owner whose ids are
/// `words`: the user's, the group's, and those of further groups. Returns when the monitor is gone. The
/// process is started for this alone: all other descriptors are closed.
///
/// # Errors
/// If the ids are none, or this process can't take the rights.
pub fn serve(words: &[&str], mut socket: UnixStream) -> io::Result<()> {
    close_others(&socket)?;
    let owner = owner(words).ok_or_else(|| io::Error::from(ErrorKind::InvalidInput))?;
    owner.take_for_good().map_err(io::Error::other)?;
    // After the ids: a change of them clears it.
    set_pdeathsig(Signal::SIGKILL)?;
    loop {
        let request = match receive::<Request>(&mut socket) {
            Ok((request, _)) => request,
            Err(ReceiveError::Incomplete) => return Ok(()),
            Err(error) => return Err(io::Error::other(error)),
        };
        let (answer, files) = open(request);
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&mut socket, &answer, &files).map_err(io::Error::other)?;
    }
}

/// Closes all descriptors but the standard ones and the socket: a program that starts for another user has
/// none of root's.
fn close_others(socket: &UnixStream) -> io::Result<()> {
    let own = socket.as_raw_fd().cast_unsigned();
    let close = |first, last| {
        if first > last {
            return Ok(());
        }
        // SAFETY: this process has opened nothing yet, so no value owns one of these descriptors.
        match Errno::result(unsafe { libc::close_range(first, last, 0) }) {
            // Before Linux 5.9. The monitor's descriptors are closed at an exec all the same.
            Ok(_) | Err(Errno::ENOSYS) => Ok(()),
            Err(error) => Err(error),
        }
    };
    close(FIRST_OTHER, own.saturating_sub(1))?;
    close(FIRST_OTHER.max(own + 1), libc::c_uint::MAX)?;
    Ok(())
}

fn owner(words: &[&str]) -> Option<Credentials> {
    let ids: Option<Vec<u32>> = words.iter().map(|word| word.parse().ok()).collect();
    match &ids?[..] {
        [uid, gid, groups @ ..] => Some(Credentials {
            uid: *uid,
            gid: *gid,
            groups: groups.to_vec(),
        }),
        _ => None,
    }
}

/// Opens the files of one name. The locks of a disk last as long as the files.
fn open(request: Request) -> (Answer, Vec<File>) {
    let below = Below {
        directories: request.directories,
        setting: request.setting,
    };
    let refused = |why: String| (Answer::Refused { why }, Vec::new());
    match request.wanted {
        Wanted::File { what, path } => match below.open(&path, Kind::File, Access::Read) {
            Ok(file) => (Answer::File(Fd(0)), vec![file]),
            Err(error) => refused(format!("{what} {}: {error}", path.display())),
        },
        Wanted::Disk(disk) => match open_disk(disk, below) {
            Ok(disk) => {
                let (size_bytes, mut layers, mut files) = (disk.size_bytes, Vec::new(), Vec::new());
                for layer in disk.layers {
                    layers.push(NamedLayer {
                        file: Fd(files.len()),
                        format: match layer.format {
                            Format::Raw => DiskFormat::Raw,
                            Format::Qcow2 => DiskFormat::Qcow2,
                            Format::Scratch => DiskFormat::Scratch,
                        },
                    });
                    files.push(layer.file);
                }
                (Answer::Disk { layers, size_bytes }, files)
            }
            Err(why) => refused(why),
        },
    }
}

/// Opens the files of a disk, with room for the whole of one that is to be allocated. The room counts in the
/// owner's quota. An error is one line.
fn open_disk(disk: NamedDisk, below: Below) -> Result<OpenDisk, String> {
    let allocate = disk.allocate;
    let request = disk.request(below);
    let disk = open_files(&request).map_err(|error| chain(&error))?;
    if let (true, [own]) = (allocate && !disk.read_only, &disk.layers[..]) {
        allocate_whole(&own.file)
            .map_err(|error| format!("disk {}: no room for all of it: {error}", request.path.display()))?;
    }
    Ok(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_an_owner_are_a_user_a_group_and_further_groups() {
        let read = owner(&["1001", "100", "36", "900"]).unwrap();
        assert_eq!(
            (read.uid, read.gid, &read.groups[..]),
            (1001, 100, &[36, 900][..])
        );
        for wrong in [
            &["1001"][..],
            &[],
            &["alice", "1"],
            &["1001", "100", "-1"],
            &["1", "2", ""],
        ] {
            assert_eq!(owner(wrong), None, "{wrong:?}");
        }
    }
}
