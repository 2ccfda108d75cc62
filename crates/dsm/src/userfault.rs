//! A userfaultfd: the kernel reports threads that wait for a page, and maps pages for them.
//!
//! The numbers and layouts are those of `linux/userfaultfd.h`. Features beyond Linux 5.19, which brought
//! write protection of shared memory, are found by a trial.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::PAGE_LEN;

const API: u64 = 0xaa;
/// Device that lets accesses by the kernel block too, for any process that is passed its open descriptor.
pub const DEVICE: &str = "/dev/userfaultfd";
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;
/// Flag: accesses by the kernel on behalf of a thread (`read(2)` into the region, KVM) fail instead of
/// blocking.
const USER_MODE_ONLY: libc::c_int = 1;

const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_THREAD_ID: u64 = 1 << 8;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;

const REGISTER_MISSING: u64 = 1 << 0;
const REGISTER_WP: u64 = 1 << 1;
const REGISTER_MINOR: u64 = 1 << 2;

const EVENT_PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1 << 0;
const FLAG_WP: u64 = 1 << 1;

const COPY_WP: u64 = 1 << 1;
const WRITEPROTECT_ON: u64 = 1 << 0;
/// Flag since Linux 6.4.
const CONTINUE_WP: u64 = 1 << 1;

/// Faults read at once.
pub const FAULTS_MAX: usize = 16;

const fn ioctl_number(direction: libc::c_ulong, number: libc::c_ulong, bytes: usize) -> libc::c_ulong {
    direction << 30 | (bytes as libc::c_ulong) << 16 | 0xaa << 8 | number
}
const READ: libc::c_ulong = 2;
const READ_WRITE: libc::c_ulong = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RangeArg {
    start: u64,
    len: u64,
}

#[repr(C)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyArg {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct ZeroArg {
    range: RangeArg,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct WriteProtectArg {
    range: RangeArg,
    mode: u64,
}

#[repr(C)]
struct ContinueArg {
    range: RangeArg,
    mode: u64,
    mapped: i64,
}

/// Requests that a page server makes while it serves, for a filter of system calls.
pub const SERVING: [libc::c_ulong; 5] = [
    UFFDIO_WAKE,
    UFFDIO_COPY,
    UFFDIO_ZEROPAGE,
    UFFDIO_WRITEPROTECT,
    UFFDIO_CONTINUE,
];

const UFFDIO_API: libc::c_ulong = ioctl_number(READ_WRITE, 0x3f, size_of::<ApiArg>());
const UFFDIO_REGISTER: libc::c_ulong = ioctl_number(READ_WRITE, 0x00, size_of::<RegisterArg>());
const UFFDIO_WAKE: libc::c_ulong = ioctl_number(READ, 0x02, size_of::<RangeArg>());
const UFFDIO_COPY: libc::c_ulong = ioctl_number(READ_WRITE, 0x03, size_of::<CopyArg>());
const UFFDIO_ZEROPAGE: libc::c_ulong = ioctl_number(READ_WRITE, 0x04, size_of::<ZeroArg>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = ioctl_number(READ_WRITE, 0x06, size_of::<WriteProtectArg>());
const UFFDIO_CONTINUE: libc::c_ulong = ioctl_number(READ_WRITE, 0x07, size_of::<ContinueArg>());

/// `struct uffd_msg` for a page fault.
#[repr(C)]
#[derive(Clone, Copy)]
struct Event {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}
const _: () = assert!(size_of::<Event>() == 32);

/// A fault of a thread that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Address of the access.
    pub address: usize,
    /// Whether the access is a write.
    pub write: bool,
    /// Kernel number of the thread.
    pub thread: libc::pid_t,
}

/// Receiver of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultDelivery {
    /// The reader of the descriptor.
    Reader,
    /// The faulting thread itself, by SIGBUS.
    Thread,
}

/// Reason why no userfaultfd serves here.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultError {
    /// Neither the system call nor the device is permitted.
    #[error(
        "userfaultfd is refused ({0}); run as root, give access to /dev/userfaultfd, or set sysctl \
         vm.unprivileged_userfaultfd=1"
    )]
    Refused(io::Error),
    /// The kernel is too old.
    #[error("this kernel's userfaultfd can't write-protect shared memory ({0}); Linux 5.19 or newer can")]
    TooOld(io::Error),
    /// The kernel does not accept the region.
    #[error("userfaultfd does not take the region: {0}")]
    Register(io::Error),
}

/// An open userfaultfd, not blocking.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    /// Whether accesses by the kernel block too.
    pub kernel_waits: bool,
}

impl Userfault {
    /// Opens a userfaultfd. Accesses by the kernel block if the process may have that, or if `device` is an
    /// open `/dev/userfaultfd`.
    ///
    /// # Errors
    /// [`UserfaultError::Refused`], [`UserfaultError::TooOld`].
    pub fn open(delivery: FaultDelivery, device: Option<BorrowedFd<'_>>) -> Result<Self, UserfaultError> {
        let (fd, kernel_waits) = match device.map(by_device) {
            Some(Ok(fd)) => (fd, true),
            _ => open()?,
        };
        let mut features = FEATURE_PAGEFAULT_FLAG_WP
            | FEATURE_MISSING_SHMEM
            | FEATURE_MINOR_SHMEM
            | FEATURE_WP_HUGETLBFS_SHMEM;
        features |= match delivery {
            FaultDelivery::Reader => FEATURE_THREAD_ID,
            FaultDelivery::Thread => FEATURE_SIGBUS,
        };
        let mut api = ApiArg {
            api: API,
            features,
            ioctls: 0,
        };
        ioctl(&fd, UFFDIO_API, &mut api).map_err(UserfaultError::TooOld)?;
        Ok(Self { fd, kernel_waits })
    }

    /// Registers a shared mapping for faults of pages that are absent, unmapped (`minor`) or write-protected.
    ///
    /// # Errors
    /// [`UserfaultError::Register`].
    pub fn register(&self, addresses: Range<usize>, minor: bool) -> Result<(), UserfaultError> {
        let mut register = RegisterArg {
            range: range(addresses.start, addresses.len()),
            mode: REGISTER_MISSING | REGISTER_WP | if minor { REGISTER_MINOR } else { 0 },
            ioctls: 0,
        };
        ioctl(&self.fd, UFFDIO_REGISTER, &mut register).map_err(UserfaultError::Register)
    }

    /// Maps pages of the page cache, and wakes the threads that wait for them.
    ///
    /// # Errors
    /// `EEXIST` if one is mapped; `EINVAL` if the kernel can't map a read-only page.
    pub fn map_cached(&self, pages: Range<usize>, writable: bool) -> io::Result<()> {
        let mut arg = ContinueArg {
            range: range(pages.start, pages.len()),
            mode: if writable { 0 } else { CONTINUE_WP },
            mapped: 0,
        };
        ioctl(&self.fd, UFFDIO_CONTINUE, &mut arg)
    }

    /// Copies a page into an empty page cache, maps it, and wakes the threads that wait for it.
    ///
    /// # Errors
    /// `EEXIST` if there is one.
    pub fn map_copy(&self, page: usize, bytes: &[u8; PAGE_LEN], writable: bool) -> io::Result<()> {
        let mut arg = CopyArg {
            to: page as u64,
            from: bytes.as_ptr() as u64,
            len: PAGE_LEN as u64,
            mode: if writable { 0 } else { COPY_WP },
            copied: 0,
        };
        ioctl(&self.fd, UFFDIO_COPY, &mut arg)
    }

    /// Puts zero pages into an empty page cache, maps them for writing, and wakes the threads that wait for
    /// them.
    ///
    /// # Errors
    /// `EEXIST` if there is one.
    pub fn map_zeroes(&self, pages: Range<usize>) -> io::Result<()> {
        let mut arg = ZeroArg {
            range: range(pages.start, pages.len()),
            mode: 0,
            zeroed: 0,
        };
        ioctl(&self.fd, UFFDIO_ZEROPAGE, &mut arg)
    }

    /// Sets or clears the write protection of a mapped page. Clearing it wakes the threads that wait to
    /// write.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_writable(&self, page: usize, writable: bool) -> io::Result<()> {
        let mut arg = WriteProtectArg {
            range: range(page, PAGE_LEN),
            mode: if writable { 0 } else { WRITEPROTECT_ON },
        };
        ioctl(&self.fd, UFFDIO_WRITEPROTECT, &mut arg)
    }

    /// Wakes the threads that wait for a page, which then fault again.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn wake(&self, page: usize) -> io::Result<()> {
        ioctl(&self.fd, UFFDIO_WAKE, &mut range(page, PAGE_LEN))
    }

    /// Reads at most as many faults as `faults` holds. Returns their number, 0 if there are none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&self, faults: &mut [Fault; FAULTS_MAX]) -> io::Result<usize> {
        const NONE: Event = Event {
            event: 0,
            reserved: [0; 7],
            flags: 0,
            address: 0,
            thread: 0,
            padding: 0,
        };
        let mut events = [NONE; FAULTS_MAX];
        // SAFETY: `events` has that many bytes, and any bytes are events.
        let count = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                events.as_mut_ptr().cast(),
                size_of_val(&events),
            )
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
                _ => Err(error),
            };
        }
        let mut found = 0;
        for event in &events[..count as usize / size_of::<Event>()] {
            if event.event == EVENT_PAGEFAULT {
                faults[found] = Fault {
                    address: event.address as usize,
                    write: event.flags & (FLAG_WRITE | FLAG_WP) != 0,
                    thread: event.thread.cast_signed(),
                };
                found += 1;
            }
        }
        Ok(found)
    }
}

impl Fault {
    /// Placeholder in a list.
    pub const NONE: Self = Self {
        address: 0,
        write: false,
        thread: 0,
    };
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens a descriptor by the system call, by the device, or without accesses by the kernel, which every
/// process may have.
fn open() -> Result<(OwnedFd, bool), UserfaultError> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let refused = match call(flags) {
        Ok(fd) => return Ok((fd, true)),
        Err(error) => error,
    };
    if let Ok(device) = OpenOptions::new().read(true).write(true).open(DEVICE)
        && let Ok(fd) = by_device(device.as_fd())
    {
        return Ok((fd, true));
    }
    call(flags | USER_MODE_ONLY)
        .map(|fd| (fd, false))
        .map_err(|_| UserfaultError::Refused(refused))
}

/// Opens a descriptor for this process's memory by the open device.
fn by_device(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the device's only request; it takes flags and gives a descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that no other code has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn call(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes flags and gives a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that no other code has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn range(start: usize, bytes: usize) -> RangeArg {
    RangeArg {
        start: start as u64,
        len: bytes as u64,
    }
}

/// Repeats a request while the kernel returns `EAGAIN`: the address space is being changed.
fn ioctl<T>(fd: &OwnedFd, request: libc::c_ulong, arg: &mut T) -> io::Result<()> {
    loop {
        // SAFETY: the request's number says how large its argument is, and `T` is that argument.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), request, std::ptr::from_mut(arg)) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if !matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
        ) {
            return Err(error);
        }
    }
}
