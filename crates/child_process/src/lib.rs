//! How this program's processes start others: ones that outlive them, and ones with fewer rights.

pub mod arguments;
mod bounded_log;
mod credentials;
pub mod sealed;
pub mod service_process;

pub use arguments::{Seal, UnknownWord};
pub use bounded_log::BoundedLog;
pub use credentials::{Credentials, CredentialsError};
pub use sealed::SealedProgram;
pub use service_process::{LeftProcess, ServiceProcess};

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the child the leader of a new session, `setsid(2)`: signals of the terminal and to the process group
/// of this process don't reach it. The spawn fails if the session can't be created.
///
/// Later calls of [`CommandExt::pre_exec`] run in the new session.
pub fn in_new_session(command: &mut Command) -> &mut Command {
    // SAFETY: setsid is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use nix::unistd::{Pid, getsid};

    use super::*;

    #[test]
    fn child_leads_a_session_of_its_own() {
        let mut child = in_new_session(Command::new("sleep").arg("60")).spawn().unwrap();
        let pid = Pid::from_raw(child.id().cast_signed());
        let session = getsid(Some(pid)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(session, pid);
        assert_ne!(session, getsid(None).unwrap());
    }
}
