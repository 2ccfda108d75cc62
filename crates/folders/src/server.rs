//! Serves a guest's requests: one packet in, one packet out.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use fuse_backend_rs::api::filesystem::FileSystem;
use fuse_backend_rs::api::server::Server;
use fuse_backend_rs::passthrough::{CachePolicy, Config, PassthroughFs};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::arguments::{Arguments, Cache};
use crate::init;
use crate::lend::Lender;
use crate::link;
use crate::packet::{PACKET_BYTES_MAX, ReplyHeader, RequestHeader, node_of, opcode};
use crate::request::{Rights, Verdict, admit};

/// The server of one folder.
pub struct FolderServer {
    files: Arc<PassthroughFs>,
    server: Server<Arc<PassthroughFs>>,
    rights: Rights,
    /// Passes files to the shard, if it shares their pages.
    lender: Option<RefCell<Lender>>,
}

impl FolderServer {
    /// Creates the server of the folder at `root`.
    ///
    /// # Errors
    /// Fails if this process's own descriptors can't be named (`/proc/self/fd`).
    pub fn new(root: &str, arguments: &Arguments) -> io::Result<Self> {
        let validity = arguments.cache.validity();
        let config = Config {
            root_dir: root.to_owned(),
            entry_timeout: validity,
            attr_timeout: validity,
            cache_policy: match arguments.cache {
                Cache::None => CachePolicy::Never,
                Cache::Auto => CachePolicy::Auto,
                Cache::Always => CachePolicy::Always,
            },
            xattr: arguments.rights.xattr,
            // Without it, the number of each file that was ever seen stays in memory.
            use_host_ino: true,
            allow_direct_io: false,
            ..Config::default()
        };
        let files = Arc::new(PassthroughFs::new(config)?);
        Ok(Self {
            server: Server::new(files.clone()),
            files,
            rights: arguments.rights,
            lender: arguments.lends.then(RefCell::default),
        })
    }

    /// Serves the socket until its other end closes.
    ///
    /// # Errors
    /// Fails if the socket fails.
    pub fn run(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut request = vec![0; PACKET_BYTES_MAX];
        let mut reply = vec![0; PACKET_BYTES_MAX];
        loop {
            // The result is the packet's length, however much of it there was room for.
            match recv(socket.as_raw_fd(), &mut request, MsgFlags::MSG_TRUNC) {
                Ok(0) | Err(Errno::ECONNRESET) => return Ok(()),
                Ok(length) => {
                    let served = request
                        .get_mut(..length)
                        .map_or(Ok(()), |request| self.serve(request, &mut reply, socket));
                    match served {
                        Err(Errno::EPIPE | Errno::ECONNRESET) => return Ok(()),
                        other => other?,
                    }
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn serve(&self, request: &mut [u8], reply: &mut [u8], socket: &OwnedFd) -> Result<(), Errno> {
        let verdict = admit(request, self.rights);
        let Some(header) = RequestHeader::read(request) else {
            return Ok(());
        };
        let unique = header.unique;
        match verdict {
            Verdict::Ignore => Ok(()),
            Verdict::Refuse(errno) => refuse(socket, unique, errno),
            Verdict::Init => match self.begin() {
                Ok(()) => answer(socket, &init::reply(request, unique)),
                Err(error) => refuse(socket, unique, error.raw_os_error().unwrap_or(libc::EIO)),
            },
            Verdict::Destroy => {
                self.files.destroy();
                answer(socket, &ReplyHeader::of_error(unique, 0).bytes())
            }
            Verdict::Serve if header.opcode == opcode::LINK => match link::make(&self.files, request) {
                Ok(length) => self.reply(&mut request[..length], header, reply, socket),
                Err(error) => refuse(socket, unique, error.raw_os_error().unwrap_or(libc::EIO)),
            },
            Verdict::Serve => {
                if let (opcode::READ, Some(lender), Some(node)) =
                    (header.opcode, &self.lender, node_of(request))
                {
                    lender.borrow_mut().lend(&self.files, node, socket)?;
                }
                self.reply(request, header, reply, socket)
            }
        }
    }

    /// Replies to a request as the file system does, or by an error.
    fn reply(
        &self,
        request: &mut [u8],
        header: RequestHeader,
        reply: &mut [u8],
        socket: &OwnedFd,
    ) -> Result<(), Errno> {
        match self.pass_on(request, reply, socket) {
            Ok(()) => Ok(()),
            // The file system may have replied before it failed. The shard ignores a second reply.
            Err(()) if header.has_reply() => refuse(socket, header.unique, libc::EIO),
            Err(()) => Ok(()),
        }
    }

    /// Begins a connection, which has nothing of the one before.
    fn begin(&self) -> io::Result<()> {
        if let Some(lender) = &self.lender {
            lender.borrow_mut().forget();
        }
        self.files.destroy();
        self.files.import()
    }

    /// Lets the file system serve the request and send the reply.
    fn pass_on(&self, request: &mut [u8], reply: &mut [u8], socket: &OwnedFd) -> Result<(), ()> {
        let reader = Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).map_err(|_| ())?;
        let writer = FuseDevWriter::<()>::new(socket.as_fd().as_raw_fd(), reply).map_err(|_| ())?;
        let served = self.server.handle_message(reader, writer.into(), None, None);
        served.map(|_| ()).map_err(|_| ())
    }
}

fn refuse(socket: &OwnedFd, unique: u64, errno: i32) -> Result<(), Errno> {
    answer(socket, &ReplyHeader::of_error(unique, errno).bytes())
}

fn answer(socket: &OwnedFd, bytes: &[u8]) -> Result<(), Errno> {
    loop {
        match send(socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL) {
            Err(Errno::EINTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests;
