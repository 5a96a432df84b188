//! Debian's kernel: downloaded and unpacked once into a cache, never installed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::modules::Modules;
use crate::tools;

/// The package that depends on the newest kernel of this release.
const META_PACKAGE: &str = "linux-image-amd64";

/// A kernel with its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    image: PathBuf,
    modules_dir: PathBuf,
    version: String,
}

impl Kernel {
    /// The kernel to boot where none is named: the directory `KSF_LAB_KERNEL` if set, else Debian's.
    ///
    /// Debian's kernel is downloaded at the first call (70 MB, no root needed) with the machine's own apt, which
    /// checks its signature. It is kept in `ksf-lab` of cargo's target directory for programs that cargo built, else
    /// in `$XDG_CACHE_HOME/ksf-lab`; `KSF_LAB_CACHE` names another directory. Processes that need it at the same time
    /// wait for the first. Remove the directory to get a newer kernel. `scripts/setup.sh test` does the download before
    /// the tests, which then need no network.
    pub fn from_environment() -> Result<Kernel, Error> {
        if let Some(root) = std::env::var_os("KSF_LAB_KERNEL") {
            return Kernel::at(Path::new(&root));
        }
        let cache = cache_dir()?;
        fs::create_dir_all(&cache).map_err(Error::host(format!("create {}", cache.display())))?;
        // The lock goes with the file handle, so it is free again whichever way this process ends.
        let lock = File::create(cache.join("lock")).map_err(Error::host(format!("write to {}", cache.display())))?;
        lock.lock().map_err(Error::host(format!("lock {}", cache.display())))?;

        let root = cache.join("kernel");
        if !root.exists() {
            // Renamed when complete: an interrupted download is not taken for a kernel.
            let partial = cache.join("kernel.partial");
            download(&partial)?;
            fs::rename(&partial, &root).map_err(Error::host(format!("rename {}", partial.display())))?;
        }
        Kernel::at(&root)
    }

    /// The kernel in a directory: `boot/vmlinuz-VERSION` (or `boot/vmlinux-VERSION`, which boots faster) and
    /// `lib/modules/VERSION` with the `modules.dep` of depmod. Of several versions the last in the alphabet is taken.
    pub fn at(root: &Path) -> Result<Kernel, Error> {
        let version = version_in(root)?;
        let modules_dir = root.join("lib/modules").join(&version);
        let image = ["vmlinux", "vmlinuz"].map(|name| root.join(format!("boot/{name}-{version}")));
        let image = image.into_iter().find(|image| image.exists()).ok_or_else(|| Error::NoKernel {
            reason: format!("no vmlinuz-{version} in {}", root.join("boot").display()),
        })?;
        Ok(Kernel { image, modules_dir, version })
    }

    /// The file QEMU boots: an ELF vmlinux, or a bzImage.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// The directory of the modules, `lib/modules/VERSION`.
    pub fn modules_dir(&self) -> &Path {
        &self.modules_dir
    }

    /// The version as in `uname -r`, for example `6.1.0-56-amd64`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The kernel's modules.
    pub fn modules(&self) -> Result<Modules, Error> {
        Modules::read(&self.modules_dir)
    }
}

fn cache_dir() -> Result<PathBuf, Error> {
    if let Some(dir) = std::env::var_os("KSF_LAB_CACHE") {
        return Ok(dir.into());
    }
    // Cargo keeps this file at the top of its target directory, wherever CARGO_TARGET_DIR put that.
    let executable = std::env::current_exe().unwrap_or_default();
    if let Some(target) = executable.ancestors().find(|dir| dir.join(".rustc_info.json").exists()) {
        return Ok(target.join("ksf-lab"));
    }
    let home_cache = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(home_cache)
        .map(|dir| dir.join("ksf-lab"))
        .ok_or_else(|| Error::Description { what: "no place for the kernel: set KSF_LAB_CACHE to a directory".into() })
}

fn version_in(root: &Path) -> Result<String, Error> {
    let dir = root.join("lib/modules");
    let names = fs::read_dir(&dir)
        .map_err(|error| Error::NoKernel { reason: format!("cannot read {}: {error}", dir.display()) })?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.max().ok_or_else(|| Error::NoKernel { reason: format!("{} is empty", dir.display()) })
}

/// Fills `root` with Debian's newest kernel of this release.
fn download(root: &Path) -> Result<(), Error> {
    // Asked for before the long part, so that a missing tool costs nothing.
    let depmod = tools::command("depmod", "kmod")?;
    if root.exists() {
        fs::remove_dir_all(root).map_err(Error::host(format!("remove {}", root.display())))?;
    }
    fs::create_dir_all(root).map_err(Error::host(format!("create {}", root.display())))?;

    let package = newest_package()?;
    let mut download = tools::command("apt-get", "apt")?;
    tools::output(download.args(["download", &package]).current_dir(root)).map_err(no_kernel)?;
    let deb = file_starting_with(root, "linux-image-")?;
    tools::output(tools::command("dpkg-deb", "dpkg")?.arg("-x").arg(&deb).arg(root))?;
    fs::remove_file(&deb).map_err(Error::host(format!("remove {}", deb.display())))?;

    // The package has no modules.dep: its installation would make it.
    let version = version_in(root)?;
    let mut depmod = depmod;
    tools::output(depmod.arg("-b").arg(root).arg(&version))?;
    unpack_image(root, &version)
}

fn no_kernel(error: Error) -> Error {
    match error {
        Error::Tool { command, messages } => Error::NoKernel { reason: format!("'{command}' failed: {messages}") },
        other => other,
    }
}

fn newest_package() -> Result<String, Error> {
    let mut query = tools::command("apt-cache", "apt")?;
    let depends = tools::output(query.args(["depends", "--important", META_PACKAGE])).map_err(no_kernel)?;
    let depends = String::from_utf8_lossy(&depends);
    let package = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: ")).next();
    package.map(str::to_owned).ok_or_else(|| Error::NoKernel { reason: format!("apt does not know {META_PACKAGE}") })
}

fn file_starting_with(dir: &Path, prefix: &str) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(dir).map_err(Error::host(format!("read {}", dir.display())))?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .ok_or_else(|| Error::NoKernel { reason: format!("apt-get left no {prefix}* in {}", dir.display()) })
}

/// Takes the ELF kernel out of a bzImage and puts it next to it as `vmlinux-VERSION`: an emulated processor would
/// spend 2.5 seconds of each boot on that. An image that is not as expected is left as it is, it boots as well.
fn unpack_image(root: &Path, version: &str) -> Result<(), Error> {
    let path = root.join(format!("boot/vmlinuz-{version}"));
    let image = fs::read(&path).map_err(Error::host(format!("read {}", path.display())))?;
    let Some(payload) = compressed_kernel(&image) else { return Ok(()) };
    let Some((tool, package)) = decompressor(payload) else { return Ok(()) };
    let vmlinux = decompress(payload, tool, package)?;
    if vmlinux.starts_with(b"\x7fELF") {
        let path = root.join(format!("boot/vmlinux-{version}"));
        fs::write(&path, vmlinux).map_err(Error::host(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// The compressed kernel in a bzImage. Fields of its header: the kernel's Documentation/x86/boot.rst (protocol 2.08).
fn compressed_kernel(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let setup_sectors = usize::from(*image.get(0x1f1)?);
    let start = (setup_sectors + 1) * 512 + word(0x248)?;
    // The last word is the length of the kernel when unpacked, and not of the compressed stream.
    let end = start.checked_add(word(0x24c)?)?.checked_sub(4)?;
    image.get(start..end)
}

/// The command for a compressed stream, by its first bytes, and its Debian package.
fn decompressor(stream: &[u8]) -> Option<(&'static str, &'static str)> {
    match stream {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(("xz", "xz-utils")),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(("zstd", "zstd")),
        [0x1f, 0x8b, ..] => Some(("gzip", "gzip")),
        _ => None,
    }
}

/// The contents of a module's file, decompressed if need be: a kernel may be built without a decompressor for it.
pub(crate) fn read_module(path: &Path) -> Result<Vec<u8>, Error> {
    let contents = fs::read(path).map_err(Error::host(format!("read {}", path.display())))?;
    match decompressor(&contents) {
        Some((tool, package)) => decompress(&contents, tool, package),
        None => Ok(contents),
    }
}

fn decompress(stream: &[u8], tool: &str, package: &'static str) -> Result<Vec<u8>, Error> {
    let mut command = tools::command(tool, package)?;
    let output = tools::feed(command.args(["-d", "-c"]), stream)?;
    tools::succeeded(&command, output)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with one setup sector and this payload after 16 bytes of code.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * 512 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32 + 4).to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(&[1, 2, 3, 4]);
        image
    }

    #[test]
    fn the_compressed_kernel_is_found_by_the_header() {
        assert_eq!(compressed_kernel(&image(b"payload")), Some(&b"payload"[..]));
    }

    #[test]
    fn an_image_that_ends_early_is_left_alone() {
        let image = image(b"payload");
        for len in 0..image.len() - 4 {
            assert_eq!(compressed_kernel(&image[..len]), None, "cut at {len}");
        }
    }

    #[test]
    fn a_compressed_module_is_read_as_if_it_were_not() {
        let dir = tempfile();
        let plain = dir.join("plain.ko");
        fs::write(&plain, b"\x7fELF module").unwrap();
        let status = std::process::Command::new("gzip").arg("-k").arg(&plain).status().unwrap();
        assert!(status.success());
        assert_eq!(read_module(&plain).unwrap(), b"\x7fELF module");
        assert_eq!(read_module(&dir.join("plain.ko.gz")).unwrap(), b"\x7fELF module");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_directory_without_a_kernel_is_named() {
        let error = Kernel::at(Path::new("/no/such/place")).unwrap_err();
        assert!(error.is_unavailable());
        assert!(error.to_string().contains("/no/such/place/lib/modules"), "{error}");
    }

    fn tempfile() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("ksf-lab-module-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}
