//! Templates: snapshots of guests that have booted and that nobody has used, from which VMs start warm.
//!
//! [`Basis`] is all that a template stands on; its digest is the template's [`Key`]. [`TemplateStore`] has
//! the templates of a user on disk (`docs/design/warm-starts.md`).

mod basis;
mod store;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

pub use self::basis::{Basis, HostIdentity, Key, TemplateMachine};
pub use self::store::{Begun, Found, Making, PLACEHOLDER_SECTORS, Template, TemplateEntry, TemplateStore};
use crate::snapshot::SnapshotError;

/// The reason why a template can't be used, made or removed.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The snapshot can't be read or written.
    #[error("the template: {0}")]
    Snapshot(#[from] SnapshotError),
    /// The host refused the access.
    #[error("the template's {path}: {source}")]
    Host {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

fn at(path: &Path) -> impl Fn(io::Error) -> TemplateError {
    let path = path.to_owned();
    move |source| TemplateError::Host {
        path: path.clone(),
        source,
    }
}
