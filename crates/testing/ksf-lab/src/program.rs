//! Programs of the host for the machine: with the shared libraries, or the interpreter, that they need.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::initramfs::Initramfs;
use crate::tools;

/// Bytes from which on a program is worth the start of another that shortens it.
const LONG_PROGRAM: usize = 4 << 20;

/// Copies a file, or a directory with everything in it, to `guest`. With a program comes what it needs to run.
pub(crate) fn copy(files: &mut Initramfs, host: &Path, guest: &Path) -> Result<(), Error> {
    let cannot_read = || format!("read {}", host.display());
    let info = fs::metadata(host).map_err(Error::host(cannot_read()))?;
    if info.is_dir() {
        files.add_directory(guest)?;
        for entry in fs::read_dir(host).map_err(Error::host(cannot_read()))? {
            let entry = entry.map_err(Error::host(cannot_read()))?;
            copy(files, &entry.path(), &guest.join(entry.file_name()))?;
        }
        return Ok(());
    }
    let contents = fs::read(host).map_err(Error::host(cannot_read()))?;
    copy_needs(files, host, &contents)?;
    let contents = without_debug_information(host, contents);
    files.add(guest, info.permissions().mode(), contents)
}

/// The contents of a file of the host as the machine gets them: an ELF file without its debug information, which is most
/// of a program that cargo built for tests, and which an emulated processor takes seconds to unpack. The names of its
/// functions stay. A file stays as it is where there is no `strip`, or one that does not know the format.
fn without_debug_information(host: &Path, contents: Vec<u8>) -> Vec<u8> {
    if contents.len() < LONG_PROGRAM || !contents.starts_with(b"\x7fELF") {
        return contents;
    }
    let strip = || -> Result<Vec<u8>, Error> {
        let short = TemporaryFile::new()?;
        let mut strip = tools::command("strip", "binutils")?;
        tools::output(strip.args(["--strip-debug", "-o"]).arg(&short.0).arg(host))?;
        fs::read(&short.0).map_err(Error::host(format!("read {}", short.0.display())))
    };
    strip().unwrap_or(contents)
}

/// Copies what a program needs to the same paths as on the host: the libraries of an ELF file, the interpreter of a
/// script. Other files need nothing.
fn copy_needs(files: &mut Initramfs, host: &Path, contents: &[u8]) -> Result<(), Error> {
    let needs = if contents.starts_with(b"\x7fELF") {
        shared_libraries(host)?
    } else {
        interpreter(contents).into_iter().collect()
    };
    for path in needs {
        if !files.contains(&path) {
            copy(files, &path, &path)?;
        }
    }
    Ok(())
}

/// The program that a script's first line names.
pub(crate) fn interpreter(contents: &[u8]) -> Option<PathBuf> {
    let line = contents.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    String::from_utf8_lossy(line).split_whitespace().next().map(PathBuf::from)
}

/// The shared libraries of an ELF file, the loader among them, by the host's own loader.
fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut ldd = tools::command("ldd", "libc-bin")?;
    // ldd takes a name without a slash for a command.
    let absolute = std::path::absolute(program).map_err(Error::host(format!("find {}", program.display())))?;
    // It fails for a static program and for objects that are no programs: neither needs anything.
    let output = ldd.arg(&absolute).output().map_err(Error::host("run ldd"))?;
    parse_ldd(program, &String::from_utf8_lossy(&output.stdout))
}

/// Lines are "NAME => PATH (ADDRESS)", "NAME => not found", or "PATH (ADDRESS)" for the loader.
fn parse_ldd(program: &Path, text: &str) -> Result<Vec<PathBuf>, Error> {
    let mut libraries = Vec::new();
    for line in text.lines() {
        let (name, place) = line.split_once("=>").unwrap_or((line, line));
        let place = place.trim();
        if place.starts_with("not found") {
            return Err(Error::MissingLibrary { program: program.to_owned(), library: name.trim().to_owned() });
        }
        if let Some((path, _)) = place.split_once(" (").filter(|(path, _)| path.starts_with('/')) {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

/// Compiles C to a static program and returns its bytes. `name` is the file in messages, and where its `#include "..."`
/// starts to look.
pub(crate) fn compile(name: &Path, source: &str) -> Result<Vec<u8>, Error> {
    let mut gcc = tools::command("gcc", "gcc")?;
    let binary = TemporaryFile::new()?;
    gcc.args(["-static", "-O1", "-g", "-pthread", "-x", "c", "-o"]).arg(&binary.0);
    gcc.arg("-iquote").arg(name.parent().unwrap_or(Path::new("."))).arg("-");
    let output = tools::feed(&mut gcc, format!("#line 1 \"{}\"\n{source}", name.display()).as_bytes())?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Compile { source_file: name.to_owned(), messages });
    }
    fs::read(&binary.0).map_err(Error::host(format!("read {}", binary.0.display())))
}

/// A file of this process alone, removed when dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new() -> Result<TemporaryFile, Error> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ksf-lab-{}-{number}", std::process::id()));
        // Refuses a file, or a link to one, that another user has put there.
        fs::File::create_new(&path).map_err(Error::host(format!("create {}", path.display())))?;
        Ok(TemporaryFile(path))
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        // Nobody is left to be told; a file that is gone already is as good.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LDD: &str = "\
\tlinux-vdso.so.1 (0x00007ffc)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f00)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f01)
";

    #[test]
    fn libraries_and_the_loader_are_found() {
        let found = parse_ldd(Path::new("p"), LDD).unwrap();
        assert_eq!(found, [Path::new("/lib/x86_64-linux-gnu/libc.so.6"), Path::new("/lib64/ld-linux-x86-64.so.2")]);
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = parse_ldd(Path::new("p"), "\tlibksf.so.1 => not found\n").unwrap_err();
        assert_eq!(error.to_string(), "p needs the shared library libksf.so.1, which is not installed here");
    }

    #[test]
    fn a_static_program_needs_nothing() {
        assert!(parse_ldd(Path::new("p"), "\tstatically linked\n").unwrap().is_empty());
    }

    #[test]
    fn a_script_brings_its_interpreter() {
        assert_eq!(interpreter(b"#! /bin/sh -e\necho"), Some("/bin/sh".into()));
        assert_eq!(interpreter(b"#!\n"), None);
        assert_eq!(interpreter(b"\x7fELF"), None);
    }

    /// What is left runs, and cargo's debug information is not in it.
    #[test]
    fn a_long_program_comes_without_debug_information() {
        let own = std::env::current_exe().unwrap();
        let contents = fs::read(&own).unwrap();
        let length = contents.len().max(LONG_PROGRAM);
        let padded = [contents.as_slice(), &vec![0; length - contents.len()]].concat();
        let short = without_debug_information(&own, padded);
        assert!(short.len() < length, "{} of {length} bytes are left", short.len());

        let program = std::env::temp_dir().join(format!("ksf-lab-short-{}", std::process::id()));
        fs::write(&program, &short).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
        let output = std::process::Command::new(&program).arg("--list").output();
        fs::remove_file(&program).unwrap();
        let output = output.unwrap();
        let this = "a_long_program_comes_without_debug_information: test";
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains(this), "{output:?}");
    }

    #[test]
    fn files_that_no_strip_can_shorten_stay_as_they_are() {
        let text = vec![b'x'; LONG_PROGRAM];
        assert_eq!(without_debug_information(Path::new("/etc/hostname"), text.clone()), text);
        let broken = [b"\x7fELF".as_slice(), &text].concat();
        assert_eq!(without_debug_information(Path::new("/does/not/exist"), broken.clone()), broken);
    }

    #[test]
    fn c_that_does_not_compile_is_shown_with_its_line() {
        let error = compile(Path::new("lab/broken.c"), "int main(void)\n{\n\treturn x;\n}\n").unwrap_err();
        assert!(matches!(error, Error::Compile { .. }));
        assert!(error.to_string().contains("lab/broken.c:3"), "{error}");
    }
}
