//! The host file: settings for all VMs that a user starts on this host.
//!
//! Unknown keys are errors. `docs/reference/host-file.md` documents the schema.

pub mod members;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;
use crate::size::Size;
pub use members::{MemberPolicy, Usage};

/// Environment variable that names the file, instead of the default places.
pub const VARIABLE: &str = "MIRRORBALL_HOST_FILE";
/// File of root, and of users without a file of their own.
const OF_THE_HOST: &str = "/etc/mirrorball/host.toml";
/// Maximum space of templates without a limit in the file: some 40 of a Debian guest.
const TEMPLATE_LIMIT: Size = Size(8 << 30);

/// The settings of a host.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Rule for sharing pages of memory; see [`Settings::share_between`].
    pub share_between: Option<ShareBetween>,
    /// Maximum space of the user's templates; see [`Settings::template_limit`].
    pub template_limit: Option<Size>,
    /// Policy for VMs of the API group's members.
    pub members: Option<MemberPolicy>,
}

/// Rule for sharing pages of memory between VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareBetween {
    /// Between VMs of one `share_group`. VMs of one command without a group form a group, and so does a VM
    /// with its clones.
    Group,
    /// Between all VMs of one user that name no other `share_group`.
    All,
}

/// Program that starts a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// A command run by root.
    Root,
    /// A command run by an ordinary user.
    User,
    /// The API, for its own user or a member of its group.
    Api,
}

impl Settings {
    /// Parses and checks a host file. Never panics, whatever `text` is.
    pub fn parse(source_name: &str, text: &str) -> Result<Self, ConfigError> {
        let settings: Self =
            toml::from_str(text).map_err(|error| ConfigError::from_toml(source_name, text, &error))?;
        if let Some(members) = &settings.members {
            members
                .check()
                .map_err(|fault| ConfigError::from_fault(source_name, text, &fault))?;
        }
        Ok(settings)
    }

    /// Reads the host file; the defaults when there is none.
    ///
    /// # Errors
    /// When the file is wrong or can't be read, or [`VARIABLE`] names one that does not exist.
    pub fn load(is_root: bool) -> Result<Self, ConfigError> {
        let variable = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let named = variable(VARIABLE);
        let is_named = named.is_some();
        let own = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
        for path in places(named, own, is_root) {
            if let Some(settings) = Self::read(&path, is_named)? {
                return Ok(settings);
            }
        }
        Ok(Self::default())
    }

    /// Reads the file at `path`. Returns none if it does not exist and is not required.
    fn read(path: &Path, must_exist: bool) -> Result<Option<Self>, ConfigError> {
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&path.display().to_string(), &text).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !must_exist => Ok(None),
            Err(error) => Err(ConfigError::without_text(
                format!("the host file {}: {error}", path.display()),
                format!("let this user read the file, or name another with {VARIABLE}"),
            )),
        }
    }

    /// Returns the rule for VMs that `starter` starts. Root and the API serve several tenants, so their VMs
    /// share within a group unless the file has another rule; the VMs of an ordinary user share with one
    /// another.
    pub fn share_between(&self, starter: Starter) -> ShareBetween {
        self.share_between.unwrap_or(match starter {
            Starter::Root | Starter::Api => ShareBetween::Group,
            Starter::User => ShareBetween::All,
        })
    }

    /// Returns the maximum space of the user's templates for warm starts, in bytes.
    pub fn template_limit(&self) -> u64 {
        self.template_limit.unwrap_or(TEMPLATE_LIMIT).0
    }
}

impl Starter {
    /// Returns the starter for a command of root or of another user.
    pub fn command(is_root: bool) -> Self {
        if is_root { Self::Root } else { Self::User }
    }
}

/// Returns the places of the host file: the first that exists counts.
fn places(named: Option<PathBuf>, own_configuration: Option<PathBuf>, is_root: bool) -> Vec<PathBuf> {
    if let Some(named) = named {
        return vec![named];
    }
    let own = own_configuration.filter(|_| !is_root);
    let own = own.map(|directory| directory.join("mirrorball/host.toml"));
    own.into_iter().chain([PathBuf::from(OF_THE_HOST)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vms_of_root_and_of_the_api_share_within_a_group_by_default() {
        let between = |text: &str| {
            let settings = Settings::parse("host.toml", text).unwrap();
            [Starter::Root, Starter::Api, Starter::User].map(|starter| settings.share_between(starter))
        };
        use ShareBetween::{All, Group};
        assert_eq!(between(""), [Group, Group, All]);
        assert_eq!(between("share_between = \"all\""), [All; 3]);
        assert_eq!(between("share_between = \"group\""), [Group; 3]);
    }

    #[test]
    fn templates_take_8_gib_unless_the_file_has_another_limit() {
        let limit = |text: &str| Settings::parse("host.toml", text).unwrap().template_limit();
        assert_eq!(limit(""), 8 << 30);
        assert_eq!(limit("template_limit = \"512M\""), 512 << 20);
    }

    #[test]
    fn an_error_in_the_file_names_its_place() {
        for (text, message) in [
            ("template_limit = 5", "no unit"),
            ("share_between = \"some\"", "some"),
            ("share = \"all\"", "share"),
            ("[members]\nmemory = \"1G\"", "cpus"),
            ("[members]\nmemory = \"1G\"\ncpus = 0", "0 CPUs"),
            ("[members]\nmemory = \"1G\"\ncpus = 1\npaths = [\"vms\"]", "vms"),
            ("[members]\nmemory = \"1G\"\ncpus = 1\nsandbox = \"off\"", "off"),
        ] {
            let error = Settings::parse("host.toml", text).unwrap_err();
            assert!(error.message.contains(message), "{text:?}: {error}");
            assert!(error.span.is_some() && error.help.is_some(), "{text:?}");
        }
    }

    #[test]
    fn the_variable_replaces_all_places_and_root_reads_no_file_of_a_user() {
        let own = || Some(PathBuf::from("/home/u/.config"));
        let etc = PathBuf::from(OF_THE_HOST);
        assert_eq!(
            places(None, own(), false),
            [PathBuf::from("/home/u/.config/mirrorball/host.toml"), etc.clone()]
        );
        assert_eq!(places(None, own(), true), [etc]);
        assert_eq!(places(Some("/x".into()), own(), false), [PathBuf::from("/x")]);
    }

    #[test]
    fn a_named_file_must_exist_and_another_need_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.toml");
        assert!(Settings::read(&path, false).unwrap().is_none());
        let error = Settings::read(&path, true).unwrap_err();
        assert!(error.message.contains("host.toml"), "{error}");
        std::fs::write(&path, "share_between = \"all\"").unwrap();
        let settings = Settings::read(&path, true).unwrap().unwrap();
        assert_eq!(settings.share_between, Some(ShareBetween::All));
    }
}
