//! Tests in separate network namespaces; they need root and /dev/net/tun.

use std::process::Command;

use super::*;
use crate::samples::drop_capabilities;

fn in_own_namespace(setup: &[&str], test: impl FnOnce() + Send + 'static) {
    let setup: Vec<String> = setup.iter().map(|line| (*line).to_owned()).collect();
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .expect("this test needs root (CAP_SYS_ADMIN) to make a network namespace");
        for line in setup {
            let status = Command::new("ip")
                .args(line.split(' '))
                .status()
                .expect("this test needs iproute2");
            assert!(status.success(), "ip {line}");
        }
        test();
    });
    thread.join().unwrap();
}

#[test]
fn a_missing_device_is_not_created() {
    in_own_namespace(&[], || {
        let error = open("nosuch0", 1).unwrap_err();
        assert!(matches!(error, SubnetError::NoSuchTap(..)), "{error}");
        assert!(!interface_exists("nosuch0"));
    });
}

#[test]
fn a_device_is_opened_once() {
    in_own_namespace(&["tuntap add tap0 mode tap"], || {
        let files = open("tap0", 1).unwrap();
        assert_eq!(files.len(), 1);
        let error = open("tap0", 1).unwrap_err();
        assert!(matches!(error, SubnetError::TapBusy(_)), "{error}");
    });
}

#[test]
fn a_device_has_a_file_for_each_queue_pair() {
    in_own_namespace(&["tuntap add tap0 mode tap multi_queue"], || {
        assert_eq!(open("tap0", 4).unwrap().len(), 4);
    });
}

#[test]
fn a_single_queue_device_refuses_several() {
    in_own_namespace(&["tuntap add tap0 mode tap"], || {
        let error = open("tap0", 2).unwrap_err();
        assert!(matches!(error, SubnetError::TapKind(..)), "{error}");
        assert!(error.to_string().contains("multi_queue"));
    });
}

#[test]
fn invalid_names_are_refused() {
    for name in ["", "a/b", "tap%d", "a name", "sixteen-letters-"] {
        assert!(matches!(open(name, 1), Err(SubnetError::TapName(_))), "{name:?}");
    }
}

#[test]
fn another_users_device_is_refused() {
    in_own_namespace(&["tuntap add tap0 mode tap user 65534"], || {
        drop_capabilities();
        let error = open("tap0", 1).unwrap_err();
        assert!(matches!(error, SubnetError::TapPermission(_)), "{error}");
        assert!(error.to_string().contains("ip tuntap add tap0 mode tap user"));
    });
}

#[test]
fn a_device_file_that_may_not_be_opened_is_named() {
    in_own_namespace(&["tuntap add tap0 mode tap"], || {
        become_nobody();
        match open("tap0", 1).unwrap_err() {
            SubnetError::TunPermission(_) => {}
            // If everyone may open /dev/net/tun, the device itself is refused; this one has no owner.
            SubnetError::TapPermission(_) => {}
            error => panic!("{error}"),
        }
    });
}

/// Changes this thread only to the user 65534, by the system call itself, which libc would apply to all
/// threads.
fn become_nobody() {
    let nobody = 65_534;
    // SAFETY: plain numbers.
    let done = unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}
