//! Process 1 of an initramfs.
//!
//! With a root on the command line it becomes that root's init. Without one it stays: it mounts the file
//! systems that programs need, starts the agent and a shell on the console, and reaps processes.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use child_process::in_new_session;
use nix::mount::{MsFlags, mount};
use nix::sys::wait::wait;
use nix::unistd::{ForkResult, fork};

use crate::{listen, modules, power, root::RootSpec};

/// Runs process 1. Never returns: the kernel panics when process 1 ends.
pub fn run() -> ! {
    for (kind, place, options) in [
        ("proc", "/proc", ""),
        ("sysfs", "/sys", ""),
        ("devtmpfs", "/dev", "mode=0755"),
    ] {
        attach(kind, place, options);
    }
    modules::load();
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let spec = RootSpec::parse(&cmdline);
    if spec.exists() {
        let reason = spec.enter();
        give_up(&reason.to_string());
    }
    userland()
}

/// Ends the guest as a kernel without a root does: by a panic that reports the reason.
fn give_up(reason: &str) -> ! {
    eprintln!("mirrorball: {reason}");
    // The line must precede the kernel's own.
    std::thread::sleep(Duration::from_millis(100));
    std::process::exit(1)
}

fn attach(kind: &str, place: &str, options: &str) {
    // Reported, not fatal: programs that need the mount will fail with their own errors.
    let _ = fs::create_dir_all(place);
    let busy = nix::errno::Errno::EBUSY;
    match mount(Some(kind), place, Some(kind), MsFlags::empty(), Some(options)) {
        Ok(()) => {}
        Err(error) if error == busy => {}
        Err(error) => eprintln!("mirrorball: can't mount {kind} on {place}: {error}"),
    }
}

/// Runs the whole user space of a guest without a root disk.
fn userland() -> ! {
    for (kind, place, options) in [
        ("devpts", "/dev/pts", "mode=0620,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", "mode=1777"),
        ("tmpfs", "/run", "mode=0755"),
        ("tmpfs", "/tmp", "mode=1777"),
    ] {
        attach(kind, place, options);
    }
    for folder in ["/root", "/etc", "/mnt", "/var", "/usr/bin", "/usr/sbin", "/sbin"] {
        let _ = fs::create_dir_all(folder);
    }
    // The initramfs has one file for every applet.
    let busybox = "/bin/busybox";
    if fs::metadata(busybox).is_ok() {
        run_and_wait(busybox, &["--install", "-s", "/bin"]);
        let _ = symlink("/bin/busybox", "/sbin/init");
    }
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ] {
        let _ = symlink(target, format!("/dev/{name}"));
    }
    let _ = fs::write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    let _ = fs::write("/etc/group", "root:x:0:\n");
    let _ = nix::unistd::sethostname("tiny");
    run_and_wait("/bin/ip", &["link", "set", "lo", "up"]);
    start(|| {
        let error = listen::listen();
        eprintln!("mirrorball: no agent: can't listen on vsock: {error}");
    });
    start(console_shell);
    start(power::wait_for_button);
    loop {
        // Without children (which never happens, as the shell is restarted) this must not spin.
        if wait().is_err() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Runs `body` in a child process.
fn start(body: impl FnOnce()) {
    // SAFETY: process 1 has one thread, so the child may do anything.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            body();
            std::process::exit(0);
        }
        Ok(ForkResult::Parent { .. }) => {}
        Err(error) => eprintln!("mirrorball: can't start a process: {error}"),
    }
}

/// Runs a shell on the console, and restarts it when it ends.
fn console_shell() {
    if fs::metadata("/bin/sh").is_err() {
        return;
    }
    loop {
        let console = || {
            fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(console_device())
        };
        let (Ok(input), Ok(output), Ok(errors)) = (console(), console(), console()) else {
            return;
        };
        let mut shell = Command::new("/bin/sh");
        shell
            .arg("-l")
            .env("HOME", "/root")
            .env("PATH", "/bin:/sbin:/usr/bin:/usr/sbin")
            .current_dir("/root");
        shell.stdin(input).stdout(output).stderr(errors);
        in_new_session(&mut shell);
        // SAFETY: ioctl is async-signal-safe; fd 0 is the console by then.
        unsafe {
            shell.pre_exec(|| {
                // Without a controlling terminal the shell still works, but for job control.
                libc::ioctl(0, libc::TIOCSCTTY, 1);
                Ok(())
            });
        }
        let _ = shell.status();
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns the last console of the command line: `/dev/console` itself can't be a controlling terminal.
fn console_device() -> String {
    let active = fs::read_to_string("/sys/class/tty/console/active").unwrap_or_default();
    active
        .split_ascii_whitespace()
        .last()
        .map_or("/dev/console".into(), |name| format!("/dev/{name}"))
}

fn run_and_wait(program: &str, arguments: &[&str]) {
    // A guest without the program does not need it.
    let _ = Command::new(program)
        .args(arguments)
        .stderr(Stdio::null())
        .status();
}
