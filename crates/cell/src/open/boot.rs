//! The files that a VM boots from: KVM, and a kernel, of an image or another one.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use diskstore::image::{Image, ImageStore};
use shard_api::launch::{Fd, Share};

use super::files::readable;
use super::launch::share_boot;
use super::{OpenError, Opening};
use crate::share_group::maps_pages;

/// Files that a VM boots from.
pub(super) struct Boot {
    /// Keeps the image in the store as long as the VM runs.
    pub image: Option<Box<Image>>,
    pub kernel: Fd,
    pub kernel_path: PathBuf,
    pub initrd: Option<Fd>,
    /// The sharing mode of both.
    pub share: Share,
}

impl Opening<'_> {
    /// Opens `/dev/kvm` and passes it to the shard.
    pub fn kvm(&mut self) -> Result<Fd, OpenError> {
        let path = Path::new("/dev/kvm");
        let kvm = OpenOptions::new().read(true).write(true).open(path);
        let kvm = kvm.map_err(|source| OpenError::File {
            what: "KVM",
            path: path.to_owned(),
            help: "load the kvm module, join the group `kvm`, or use --lab=always",
            source,
        })?;
        Ok(self.files.add(kvm))
    }

    /// Whether the VM maps pages of files with this sharing mode.
    pub fn maps(&self, share: Share) -> bool {
        share != Share::Never && maps_pages(self.spec)
    }

    /// Opens the image, and the kernel and the initramfs of the spec or of the image.
    pub fn boot(&mut self) -> Result<Boot, OpenError> {
        let image = match &self.spec.image {
            Some(image) => Some(Box::new(ImageStore::open_default()?.get(image)?)),
            None => None,
        };
        let (kernel_path, initrd_path) = match (self.spec.kernel_files(), &image) {
            (Some((kernel, initrd)), _) => (kernel.to_owned(), initrd.map(Path::to_owned)),
            (None, Some(image)) => (
                image.kernel.clone().ok_or(OpenError::NoKernel)?,
                image.initrd.clone(),
            ),
            (None, None) => return Err(OpenError::NoKernel),
        };
        let is_named = self.spec.kernel_files().is_some();
        let kernel = self.boot_file("kernel", &kernel_path, is_named)?;
        let initrd = match initrd_path {
            Some(path) => Some(self.boot_file("initrd", &path, is_named)?),
            None => None,
        };
        let mut share = share_boot(self.spec);
        let is_mapped = self.maps(share);
        let mapped = [Some(kernel), initrd].into_iter().flatten();
        let mapped = mapped.map(|fd| &self.files.0[fd.0]);
        if is_mapped && !self.claims.claim(mapped, &kernel_path) {
            (self.apart.boot, share) = (true, Share::Never);
        }
        Ok(Boot {
            image,
            kernel,
            kernel_path,
            initrd,
            share,
        })
    }

    /// Opens a kernel or an initramfs, which the spec names or the image store has.
    fn boot_file(&mut self, what: &'static str, path: &Path, is_named: bool) -> Result<Fd, OpenError> {
        let names = &mut self.names;
        let mut open = || match is_named {
            true => names.file(what, path),
            false => readable(what, path),
        };
        let file = match self.grouped.copy(what, path, &mut open)? {
            Some(copy) => readable(what, &copy)?,
            None => open()?,
        };
        Ok(self.files.add(file))
    }
}
