//! Processes that the calling thread traces, with breakpoints at their fault points.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use super::notes::{self, Point};

const NO_OP: u8 = 0x90;
const BREAKPOINT: u8 = 0xCC;

/// Processes that this thread traces.
pub struct Tracees {
    /// By the address behind the breakpoint.
    points: BTreeMap<(u32, u64), String>,
    /// The process of each thread.
    threads: BTreeMap<i32, u32>,
}

impl Tracees {
    /// Traces all threads of these processes, those to come included, and sets the breakpoints.
    pub fn attach(pids: &[u32]) -> io::Result<Self> {
        let mut tracees = Self {
            points: BTreeMap::new(),
            threads: BTreeMap::new(),
        };
        for pid in pids {
            tracees.seize_all(*pid)?;
            tracees.set_breakpoints(*pid)?;
        }
        Ok(tracees)
    }

    /// The names of all points, sorted.
    pub fn points(&self) -> Vec<String> {
        let names: BTreeSet<_> = self.points.values().cloned().collect();
        names.into_iter().collect()
    }

    /// Traces the threads until none is new.
    fn seize_all(&mut self, pid: u32) -> io::Result<()> {
        loop {
            let mut is_new = false;
            for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
                let name = entry?.file_name();
                let thread = name.to_str().and_then(|name| name.parse::<i32>().ok());
                let thread = thread.ok_or_else(|| io::Error::other("not a thread's number"))?;
                if let std::collections::btree_map::Entry::Vacant(entry) = self.threads.entry(thread) {
                    match request(libc::PTRACE_SEIZE, thread, libc::PTRACE_O_TRACECLONE as usize) {
                        // One that its traced parent has just made is traced already.
                        Err(error)
                            if error.raw_os_error() == Some(libc::EPERM) && is_traced(pid, thread)? => {}
                        // It has ended since the folder was read.
                        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
                        other => other?,
                    }
                    entry.insert(pid);
                    is_new = true;
                }
            }
            if !is_new {
                return Ok(());
            }
        }
    }

    fn set_breakpoints(&mut self, pid: u32) -> io::Result<()> {
        let program = fs::read(format!("/proc/{pid}/exe"))?;
        let points = notes::points(&program).map_err(io::Error::other)?;
        let start = load_address(pid)?;
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        for Point { name, address } in points {
            let at = start + address;
            set_breakpoint(&memory, at)
                .map_err(|error| io::Error::other(format!("{name} at {at:#x} of {pid}: {error}")))?;
            self.points.insert((pid, at + 1), name);
        }
        Ok(())
    }

    /// Lets the threads run, and calls `hit` with the name and the process for each that comes to a point,
    /// until all processes have ended.
    pub fn run(&mut self, mut hit: impl FnMut(&str, u32)) {
        loop {
            let mut status = 0;
            // Children of other threads of this process are not for this thread.
            let flags = libc::__WALL | libc::__WNOTHREAD;
            // SAFETY: the kernel writes one integer.
            let thread = unsafe { libc::waitpid(-1, &raw mut status, flags) };
            if thread < 0 {
                // No tracee is left.
                return;
            }
            if !libc::WIFSTOPPED(status) {
                self.threads.remove(&thread);
                continue;
            }
            let mut signal = libc::WSTOPSIG(status);
            let event = status >> 16;
            if event != 0 {
                // A new thread, or the stop of one that this thread just began to trace.
                signal = 0;
            } else if signal == libc::SIGTRAP
                && let Some((name, pid)) = self.point_of(thread)
            {
                hit(&name, pid);
                signal = 0;
            }
            // It may have been killed meanwhile.
            let _ = request(libc::PTRACE_CONT, thread, signal as usize);
        }
    }

    /// The point at which a thread stands. The instruction behind the breakpoint is next.
    fn point_of(&mut self, thread: i32) -> Option<(String, u32)> {
        let pid = *self.threads.entry(thread).or_insert_with(|| process_of(thread));
        let name = self.points.get(&(pid, next_instruction(thread)?))?;
        Some((name.clone(), pid))
    }
}

fn set_breakpoint(memory: &File, at: u64) -> io::Result<()> {
    let mut byte = [0];
    memory.read_exact_at(&mut byte, at)?;
    if byte != [NO_OP] {
        return Err(io::Error::other(format!("{byte:x?} is no no-op")));
    }
    memory.write_all_at(&[BREAKPOINT], at)
}

/// The address of the beginning of a process's program.
fn load_address(pid: u32) -> io::Result<u64> {
    let program = fs::read_link(format!("/proc/{pid}/exe"))?;
    let program = program
        .to_str()
        .ok_or_else(|| io::Error::other("a path that is not UTF-8"))?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let first = maps.lines().find(|line| line.ends_with(program));
    let start = first.and_then(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
    start.ok_or_else(|| io::Error::other(format!("{program} is not in the maps of {pid}:\n{maps}")))
}

/// The process of a thread that began after [`Tracees::attach`]; 0 for one that is gone.
fn process_of(thread: i32) -> u32 {
    field(&format!("/proc/{thread}/status"), "Tgid:").unwrap_or(0)
}

/// Whether this process traces the thread.
fn is_traced(pid: u32, thread: i32) -> io::Result<bool> {
    let tracer = field(&format!("/proc/{pid}/task/{thread}/status"), "TracerPid:");
    Ok(tracer == Some(std::process::id()))
}

fn field(path: &str, name: &str) -> Option<u32> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

fn next_instruction(thread: i32) -> Option<u64> {
    // SAFETY: all zeroes are valid registers.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    let into = (&raw mut registers).expose_provenance();
    request(libc::PTRACE_GETREGS, thread, into).ok()?;
    Some(registers.rip)
}

/// A request of ptrace(2) without an address.
fn request(request: libc::c_uint, thread: i32, data: usize) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: of the requests here one writes memory of this process: the registers, whose address the caller
    // has from a live variable.
    let result = unsafe {
        libc::ptrace(
            request,
            thread,
            none,
            std::ptr::with_exposed_provenance_mut::<libc::c_void>(data),
        )
    };
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
