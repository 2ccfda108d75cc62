//! The manifest of a snapshot's directory, and the resources of the host that it is granted.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::LazyLock;

use cell::snapshot::directory::{Directory, caller};
use cell::snapshot::parse_manifest;
use cell::snapshot::trust::{Allowed, Places, grant};
use config::vm::{NetKind, SandboxSpec};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).expect("our own directory");
    folder
});

pub fn fuzz(text: &[u8]) {
    let spec = match parse_manifest(Path::new("snap"), text) {
        Ok((_, spec)) => spec,
        Err(error) => {
            assert!(!error.to_string().contains(['\n', '\x1b']), "{error:?}");
            return;
        }
    };
    let directory = Directory::open(FOLDER.path(), &[caller()]).expect("our own directory");
    let places = Places {
        directory: &directory,
        images: None,
    };
    match grant(&spec, &places, &Allowed::default()) {
        Ok(granted) => {
            // The directory is empty and there is no store, so no file of the host is granted.
            let spec = granted.spec;
            assert!(spec.disks.is_empty() && spec.kernel_files().is_none(), "{spec:?}");
            assert!(spec.sandbox != SandboxSpec::Off && !spec.root.persistent);
            let cards = spec.nets.iter().flatten();
            assert!(
                cards
                    .clone()
                    .all(|card| card.kind == NetKind::User && card.forward.is_empty())
            );
        }
        Err(error) => assert!(!error.to_string().contains('\x1b'), "{error:?}"),
    }
}
