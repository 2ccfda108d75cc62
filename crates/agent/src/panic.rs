//! What a panic does to the programs of Mirrorball.

/// From now on a panic in any thread ends the process, after it was told: no thread goes on with what another
/// left half done.
///
/// `panic = "abort"` in the release profile would say the same, but tests have to unwind: all crates would be
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
    fn a_panic_in_any_thread_is_told_and_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            super::ends_the_process();
            let _ = std::thread::spawn(|| panic!("of a thread")).join();
            return;
        }
        let tests = std::env::current_exe().unwrap();
        let filter = "a_panic_in_any_thread_is_told";
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
