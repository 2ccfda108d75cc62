//! Handling of panics in the programs of Mirrorball.

/// Makes a panic in any thread end the process after a report: no thread continues with state that another
/// left incomplete.
///
/// `panic = "abort"` in the release profile would do the same, but tests have to unwind: all crates would be
/// compiled for each of the two.
pub fn ends_the_process() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const CHILD: &str = "MIRRORBALL_TEST_PANICS";

    #[test]
    fn panic_in_any_thread_is_reported_and_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            super::ends_the_process();
            let _ = std::thread::spawn(|| panic!("of a thread")).join();
            return;
        }
        let tests = std::env::current_exe().unwrap();
        let filter = "panic_in_any_thread_is_reported";
        let child = Command::new(tests)
            .args([filter, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(libc::SIGABRT));
        let told = String::from_utf8_lossy(&child.stderr);
        assert!(told.contains("of a thread"), "{told}");
    }
}
