//! `mirrorball generate`: shell completions, man pages and the reference of commands, from the definitions of
//! the command line.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Arg, Command, Subcommand};
use clap_complete::Shell;
use miette::{IntoDiagnostic, Result, miette};

/// Name of the command in generated texts.
const NAME: &str = "mirrorball";
/// Columns of a line of prose.
const COLUMNS_MAX: usize = 110;

/// `mirrorball generate`.
#[derive(Debug, Subcommand)]
pub enum GenerateCommand {
    /// Print the completions of a shell
    Completions {
        /// Shell that reads them
        shell: Shell,
    },
    /// Write a man page for each command into a directory
    Man {
        /// The directory, which is made if it does not exist
        directory: PathBuf,
    },
    /// Print the reference of all commands as Markdown
    Reference,
}

/// Generates from `command`, which is the whole command line.
///
/// # Errors
/// If the directory or a file of it can't be written.
pub fn generate(what: &GenerateCommand, mut command: Command) -> Result<ExitCode> {
    match what {
        GenerateCommand::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, NAME, &mut text);
            std::io::stdout().write_all(&text).into_diagnostic()?;
        }
        GenerateCommand::Man { directory } => man(command, directory)?,
        GenerateCommand::Reference => print!("{}", reference(command)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes `mirrorball.1`, `mirrorball-run.1` and so on.
fn man(command: Command, directory: &Path) -> Result<()> {
    let failed = |error: std::io::Error| {
        miette!(
            help = "name a directory that you may write",
            "{}: {error}",
            directory.display()
        )
    };
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(command, directory).map_err(failed)
}

/// A section for each command, with its usage and a table of its arguments.
fn reference(mut command: Command) -> String {
    let mut text = String::from(
        "# Commands and flags\n\nGenerated from the definitions of the command line by `mirrorball generate \
         reference`. [cli.md](cli.md)\nexplains them.\n",
    );
    command.build();
    section(&mut text, &command, NAME);
    text
}

fn section(text: &mut String, command: &Command, path: &str) {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    // Writing to a string can't fail.
    let _ = write!(text, "\n## {path}\n\n{}.\n", wrapped(&about));
    let arguments: Vec<&Arg> = command
        .get_arguments()
        .filter(|argument| {
            !argument.is_hide_set() && argument.get_id() != "help" && argument.get_id() != "version"
        })
        .collect();
    if !arguments.is_empty() {
        text.push_str("\n| argument | default | meaning |\n| --- | --- | --- |\n");
    }
    for argument in arguments {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(
            text,
            "| `{}` | {} | {} |",
            cell(&name_of(argument)),
            cell(&default_of(argument)),
            cell(&help)
        );
    }
    let below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set() && below.get_name() != "help");
    for below in below {
        section(text, below, &format!("{path} {}", below.get_name()));
    }
}

/// A flag with its short form and its value, or the value of an argument without a flag.
fn name_of(argument: &Arg) -> String {
    let takes_value = argument.get_action().takes_values();
    let names = argument.get_value_names().unwrap_or_default();
    let value = match argument.get_possible_values() {
        possible if takes_value && !possible.is_empty() => {
            let words: Vec<_> = possible.iter().map(|value| value.get_name().to_owned()).collect();
            words.join("|")
        }
        _ => names
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(" "),
    };
    let many = if argument
        .get_num_args()
        .is_some_and(|range| range.max_values() > 1)
        || is_repeatable(argument)
    {
        "..."
    } else {
        ""
    };
    let mut flags: Vec<String> = argument
        .get_short()
        .map(|short| format!("-{short}"))
        .into_iter()
        .collect();
    flags.extend(argument.get_long().map(|long| format!("--{long}")));
    match (flags.is_empty(), takes_value) {
        (true, _) if argument.is_last_set() => format!("-- {value}{many}"),
        (true, _) => format!("{value}{many}"),
        (false, true) => format!("{} {value}{many}", flags.join(", ")),
        (false, false) => flags.join(", "),
    }
}

fn is_repeatable(argument: &Arg) -> bool {
    matches!(argument.get_action(), clap::ArgAction::Append)
}

fn default_of(argument: &Arg) -> String {
    let values = argument.get_default_values().iter();
    let values: Vec<_> = values.map(|value| value.to_string_lossy().into_owned()).collect();
    match argument.get_action().takes_values() && !argument.is_hide_default_value_set() && !values.is_empty()
    {
        true => format!("`{}`", values.join(" ")),
        false => String::new(),
    }
}

/// The text in lines of at most [`COLUMNS_MAX`] columns, with room for the full stop.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("never empty");
        if !line.is_empty() && line.chars().count() + word.chars().count() + 2 > COLUMNS_MAX {
            lines.push(word.to_owned());
        } else {
            let blank = if line.is_empty() { "" } else { " " };
            // Writing to a string can't fail.
            let _ = write!(line, "{blank}{word}");
        }
    }
    lines.join("\n")
}

/// The text in a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    /// Path of the reference.
    const REFERENCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/commands.md");

    #[test]
    fn reference_in_docs_is_that_of_the_command_line() {
        let kept = std::fs::read_to_string(REFERENCE).unwrap();
        assert!(
            kept == reference(Cli::command()),
            "help: `mirrorball generate reference >docs/reference/commands.md`"
        );
    }

    #[test]
    fn each_command_has_a_man_page_and_completions_name_it() {
        let directory = tempfile::tempdir().unwrap();
        man(Cli::command(), directory.path()).unwrap();
        for page in ["mirrorball.1", "mirrorball-run.1", "mirrorball-cluster-up.1"] {
            let text = std::fs::read_to_string(directory.path().join(page)).unwrap();
            assert!(text.contains(".TH"), "{page}");
        }
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), NAME, &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(
                text.contains("snapshot") && text.contains("memory-limit"),
                "{shell}"
            );
        }
    }

    #[test]
    fn directory_that_is_a_file_is_an_error_with_help() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = man(Cli::command(), file.path()).unwrap_err();
        assert!(error.help().is_some() && error.to_string().contains(&file.path().display().to_string()));
    }
}
