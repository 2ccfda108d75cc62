//! Real configurations of apt, and invalid ones.

use std::fs;
use std::path::Path;

use super::{ImageError, Mirror, Sources};

/// Creates a machine's apt folder with these files.
fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("sources.list.d")).unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// URIs, suites and keys, a stanza each.
fn read(folder: &Path) -> Result<Vec<(String, String, String)>, ImageError> {
    let text = Sources::of_machine(folder, "bookworm")?.text;
    let stanzas = text.split("\n\n").map(|stanza| {
        let field = |name: &str| {
            let mut lines = stanza.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            value.unwrap_or_default().to_owned()
        };
        assert_eq!(
            (field("Types"), field("Components")),
            ("deb".into(), "main".into())
        );
        (field("URIs"), field("Suites"), field("Signed-By"))
    });
    Ok(stanzas.collect())
}

fn uris(files: &[(&str, &str)]) -> Vec<(String, String)> {
    let read = read(machine(files).path()).unwrap();
    read.into_iter().map(|(uri, suite, _)| (uri, suite)).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    let pairs = expected.iter();
    pairs
        .map(|(uri, suite)| ((*uri).to_owned(), (*suite).to_owned()))
        .collect()
}

#[track_caller]
fn refused(files: &[(&str, &str)], expected: &[&str]) {
    let error = read(machine(files).path()).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    for words in expected.iter().chain(&["help: ", "--mirror"]) {
        assert!(error.contains(words), "{words:?} is not in: {error}");
    }
}

const DEB822: &str = "sources.list.d/debian.sources";

#[test]
fn the_machines_own_mirror_is_used_and_others_archives_are_not() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("sources.list.d")).unwrap();
    let deb822 = "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian/\nSuites: bookworm \
                  bookworm-updates bookworm-backports\nComponents: main\n\nEnabled: no\nTypes: deb\nURIs: \
                  http://off.example/debian\nSuites: bookworm\n";
    fs::write(folder.path().join("sources.list.d/debian.sources"), deb822).unwrap();
    let lines = "# deb http://no.example/debian bookworm main\ndeb [signed-by=/k] \
                 http://sec.example/debian-security bookworm-security main\ndeb http://other.example/apt bookworm \
                 main\n";
    fs::write(folder.path().join("sources.list"), lines).unwrap();

    let text = Sources::of_machine(folder.path(), "bookworm").unwrap().text;

    let uris: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("URIs: "))
        .collect();
    let mirror = "http://mirror.example/debian/";
    assert_eq!(uris, ["http://sec.example/debian-security", mirror, mirror]);
    assert!(!text.contains("backports"));
}

#[test]
fn a_machine_of_another_suite_uses_its_own_archive_for_the_wanted_one() {
    let lines = "deb http://mirror.example/debian trixie main\ndeb http://mirror.example/debian trixie-updates main\n\
                 deb http://sec.example/debian-security trixie-security main\ndeb http://other.example/apt trixie main\n";
    let expected = [
        ("http://mirror.example/debian", "bookworm"),
        ("http://mirror.example/debian", "bookworm-updates"),
        ("http://sec.example/debian-security", "bookworm-security"),
    ];
    assert_eq!(uris(&[("sources.list", lines)]), pairs(&expected));
}

#[test]
fn lines_have_options_comments_and_discs() {
    let lines = "  deb   [ arch=amd64,i386 signed-by=/k ]   http://a.example/debian bookworm contrib main # ours\n\
                 deb [arch=arm64] http://b.example/debian bookworm main\n\
                 deb cdrom:[Debian 12 _Bookworm_ - DVD]/ bookworm main\n\
                 deb-src http://c.example/debian bookworm main\n\
                 deb http://d.example/debian bookworm contrib\n\
                 rpm http://e.example/debian bookworm main\n\n";
    let folder = machine(&[("sources.list", lines)]);
    let expected = ("http://a.example/debian".into(), "bookworm".into(), "/k".into());
    assert_eq!(read(folder.path()).unwrap(), [expected]);
}

#[test]
fn stanzas_have_fields_of_several_lines_and_can_be_off() {
    let stanzas = "# first\n\n\ntypes: deb\nUris:\n http://a.example/debian\n# between\n http://b.example/debian\nSuites: \
                   bookworm\nComponents: main\nSigned-By:\n -----BEGIN\n .\n key\n -----END\n \t\nTypes: \
                   deb-src\nURIs: \
                   http://c.example/debian\nSuites: bookworm\nComponents: main\n\nTypes: deb\nURIs: \
                   http://d.example/debian\nSuites: bookworm\nComponents: main\nEnabled: false\n\nTypes: deb\nURIs: \
                   http://e.example/debian\nSuites: bookworm\nComponents: main\nArchitectures: arm64\n";
    let files = [
        (DEB822, stanzas),
        ("sources.list.d/old.sources.disabled", stanzas),
    ];
    let expected = [
        ("http://a.example/debian", "bookworm"),
        ("http://b.example/debian", "bookworm"),
    ];
    assert_eq!(uris(&files), pairs(&expected));
    let text = Sources::of_machine(machine(&files).path(), "bookworm")
        .unwrap()
        .text;
    assert!(
        text.contains("Signed-By: \n -----BEGIN\n .\n key\n -----END\n"),
        "{text}"
    );
}

#[test]
fn third_parties_with_suites_of_debians_name_are_no_archives_of_debian() {
    let lines = "deb [signed-by=/k] http://a.example/linux/debian bookworm stable\n\
                 deb [signed-by=/k] http://b.example/debian/12/prod bookworm main\n\
                 deb http://c.example/php bookworm main\n\
                 deb http://dated.example/archive/debian/20250520T000000Z bookworm main\n";
    let expected = [("http://dated.example/archive/debian/20250520T000000Z", "bookworm")];
    assert_eq!(uris(&[("sources.list", lines)]), pairs(&expected));
}

#[test]
fn debians_own_keyring_goes_by_its_name_in_the_guest() {
    let lines = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.pgp] http://a.example/debian bookworm main\n";
    let read = read(machine(&[("sources.list", lines)]).path()).unwrap();
    assert_eq!(read[0].2, "/usr/share/keyrings/debian-archive-keyring.gpg");
}

#[test]
fn an_entry_that_is_there_twice_is_taken_once() {
    let line = "deb http://a.example/debian bookworm main\n";
    let files = [
        ("sources.list", line),
        (
            "sources.list.d/a.list",
            "deb http://b.example/debian bookworm main\n",
        ),
        ("sources.list.d/b.list", line),
    ];
    let expected = [
        ("http://a.example/debian", "bookworm"),
        ("http://b.example/debian", "bookworm"),
    ];
    assert_eq!(uris(&files), pairs(&expected));
}

#[test]
fn of_a_list_of_mirrors_the_first_by_priority_is_used() {
    let folder = machine(&[(
        "mirrors",
        "# near ones\nhttp://far.example/debian\tpriority:2\nhttp://near.example/debian\tpriority:1\nhttp://any.example/debian\n",
    )]);
    let list = folder.path().join("mirrors");
    for uri in [
        format!("mirror+file:{}", list.display()),
        format!("mirror+file://{}", list.display()),
    ] {
        let stanza = format!("Types: deb\nURIs: {uri}\nSuites: bookworm\nComponents: main\n");
        fs::write(folder.path().join(DEB822), stanza).unwrap();
        assert_eq!(read(folder.path()).unwrap()[0].0, "http://near.example/debian");
    }
    fs::write(&list, "# none\n").unwrap();
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("mirrors is empty") && error.contains("debian.sources:1"),
        "{error}"
    );
    fs::remove_file(&list).unwrap();
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("No such file") && error.contains("help: "),
        "{error}"
    );
}

#[test]
fn error_without_an_archive_of_debian_lists_the_entries_and_the_flag() {
    refused(&[], &["bookworm", "sources.list", "no entry"]);
    let lines = "deb http://user:secret@archive.example/ubuntu noble main\ndeb http://a.example/b x main\ndeb \
                 http://a.example/c x main\ndeb http://a.example/d x main\n";
    refused(
        &[("sources.list", lines)],
        &["http://archive.example/ubuntu noble", "and 1 more"],
    );
    let folder = machine(&[("sources.list", lines)]);
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn an_entry_that_makes_no_sense_is_named_with_its_line() {
    let fine = "deb http://a.example/debian bookworm main\n";
    let with = |line: &str| format!("{fine}{line}\n");
    refused(
        &[("sources.list", &with("deb [signed-by=/k http://a bookworm main"))],
        &["sources.list:2", "]"],
    );
    refused(
        &[("sources.list", &with("deb http://a.example/debian"))],
        &["sources.list:2", "suite"],
    );
    refused(
        &[(DEB822, "Types: deb\nSuites: bookworm\n")],
        &["debian.sources:1", "URIs"],
    );
    refused(
        &[(DEB822, "\nTypes: deb\nnonsense\n")],
        &["debian.sources:3", "`:`"],
    );
    refused(&[(DEB822, " Types: deb\n")], &["debian.sources:1"]);
}

#[test]
fn a_mirror_is_a_whole_url_of_a_kind_that_apt_fetches() {
    for good in [
        "http://mirror.example/debian",
        "https://mirror.example:8080/debian/",
        "file:///srv/debian",
        "file:/srv/debian",
    ] {
        assert!(Mirror::parse(good).is_ok(), "{good}");
    }
    for bad in [
        "",
        "mirror.example/debian",
        "ftp://mirror.example/debian",
        "http:/mirror.example/debian",
        "http://",
        "http:///debian",
        "file:srv/debian",
        "http://mirror.example/a b",
        "http://mirror.example/debian\nTrusted: yes",
    ] {
        let error = Mirror::parse(bad).unwrap_err().to_string();
        assert!(
            error.contains("help: ") && !error.contains('\n'),
            "{bad:?}: {error}"
        );
    }
}

#[test]
fn a_mirror_that_is_named_is_the_only_one() {
    let mirror = Mirror::parse("http://user:secret@mirror.example/debian/").unwrap();
    let sources = Sources::of_mirrors(&mirror, &mirror.security(), "bookworm");
    let uris: Vec<&str> = sources
        .text
        .lines()
        .filter_map(|line| line.strip_prefix("URIs: "))
        .collect();
    let own = "http://user:secret@mirror.example/debian";
    assert_eq!(
        uris,
        [own, own, "http://user:secret@mirror.example/debian-security"]
    );
    assert_eq!(sources.origin, "--mirror http://mirror.example/debian");
}
