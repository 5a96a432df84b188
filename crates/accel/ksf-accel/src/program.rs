//! Can a preloaded library help a program? Read from its file, before it runs.
//!
//! A library that the dynamic linker loads sees what a program asks libc for. So the program must have a dynamic linker
//! (`PT_INTERP`, elf(5)), of the same machine and the same libc as the library, must listen by libc (Go makes its system
//! calls itself, also where it is linked with libc), and must not run with more rights than its caller, because the
//! linker then ignores the caller's libraries (ld.so(8), secure-execution mode).

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why a library cannot help.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Obstacle {
    /// It has no dynamic linker.
    Static,
    /// It is written in Go.
    Go,
    /// It would run with more rights than its caller.
    Privileged,
    /// It is for another machine than ksf.
    OtherMachine,
    /// Its dynamic linker is not that of ksf.
    OtherLibc {
        /// The linker it asks for.
        interpreter: PathBuf,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static => f.write_str("it is statically linked, so no library can be loaded into it"),
            Self::Go => f.write_str("it is written in Go, which makes its system calls without libc"),
            Self::Privileged => f.write_str(
                "it runs with more rights than its caller (setuid, setgid or file capabilities), so the caller's \
                 libraries are not loaded into it",
            ),
            Self::OtherMachine => f.write_str("it is made for another machine than ksf"),
            Self::OtherLibc { interpreter } => {
                write!(f, "it is linked with another C library than ksf ({})", interpreter.display())
            }
        }
    }
}

/// The file that `execvp()` would run. `path`: the value of `PATH`.
pub fn find(program: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).is_file().then(|| program.into());
    }
    let is_program =
        |file: &PathBuf| file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0);
    // As libc does it where there is no PATH.
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin"));
    std::env::split_paths(path).map(|folder| folder.join(program)).find(is_program)
}

/// What is in the way of a library in this program; `None`: nothing that can be seen. Of a script, its interpreter is
/// looked at. A file that cannot be read or is of no known form has no obstacle: the kernel will say what it is.
pub fn obstacle(program: &Path) -> Option<Obstacle> {
    let own = File::open("/proc/self/exe").ok().and_then(|file| Elf::read(&file).ok());
    let mut program = program.to_owned();
    for _ in 0..SCRIPTS_MAX {
        let file = File::open(&program).ok()?;
        match script_interpreter(&file) {
            Some(interpreter) => program = interpreter,
            None => return of_file(&file, own.as_ref()),
        }
    }
    None
}

/// The kernel follows as many scripts that are interpreted by scripts (fs/exec.c, `exec_binprm`).
const SCRIPTS_MAX: usize = 6;

/// Of `#!/path/to/interpreter argument`, the path (fs/binfmt_script.c).
fn script_interpreter(file: &File) -> Option<PathBuf> {
    let mut head = [0; 256];
    let len = file.read_at(&mut head, 0).ok()?;
    let line = head[..len].strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n').next()?;
    let word = line.split(|byte| b" \t\0".contains(byte)).find(|word| !word.is_empty())?;
    Some(OsString::from_vec(word.to_vec()).into())
}

fn of_file(file: &File, own: Option<&Elf>) -> Option<Obstacle> {
    let elf = match Elf::read(file) {
        Ok(elf) => elf,
        Err(NotRead::OtherMachine) => return Some(Obstacle::OtherMachine),
        Err(NotRead::NoElf) => return None,
    };
    if own.is_some_and(|own| own.machine != elf.machine) {
        return Some(Obstacle::OtherMachine);
    }
    if gains_rights(file) {
        return Some(Obstacle::Privileged);
    }
    if elf.is_go {
        return Some(Obstacle::Go);
    }
    let Some(interpreter) = elf.interpreter else { return Some(Obstacle::Static) };
    // The same linker may lie in several places; libcs differ in its name.
    let expected = own.and_then(|own| own.interpreter.as_deref()).and_then(Path::file_name);
    if expected.is_some_and(|expected| interpreter.file_name() != Some(expected)) {
        return Some(Obstacle::OtherLibc { interpreter });
    }
    None
}

/// As the kernel decides for `AT_SECURE` (security/commoncap.c, `cap_bprm_creds_from_file`): another effective user or
/// group, or capabilities of the file for a caller who is not root.
fn gains_rights(file: &File) -> bool {
    let Ok(metadata) = file.metadata() else { return false };
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let sets_user = metadata.mode() & 0o4000 != 0 && metadata.uid() != user;
    // Without the right to execute for the group, this bit means locking.
    let sets_group = metadata.mode() & 0o2010 == 0o2010 && metadata.gid() != group;
    let has_capabilities = !rustix::process::getuid().is_root()
        && rustix::fs::fgetxattr(file, "security.capability", &mut [0u8; 64]).is_ok();
    sets_user || sets_group || has_capabilities
}

/// What is read of an ELF file for the machine that this is compiled for.
struct Elf {
    machine: u16,
    interpreter: Option<PathBuf>,
    is_go: bool,
}

enum NotRead {
    NoElf,
    /// Of another word size or byte order.
    OtherMachine,
}

// elf.h
const CLASS64: u8 = 2;
const DATA: u8 = if cfg!(target_endian = "little") { 1 } else { 2 };
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;
/// More than any linker makes; what lies behind is not looked at.
const PROGRAM_HEADERS_MAX: u16 = 256;
const NOTE_BYTES_MAX: u64 = 65536;

impl Elf {
    fn read(file: &File) -> Result<Self, NotRead> {
        let header: [u8; HEADER_BYTES] = read_array(file, 0).ok_or(NotRead::NoElf)?;
        if header[..4] != *b"\x7fELF" {
            return Err(NotRead::NoElf);
        }
        if header[4] != CLASS64 || header[5] != DATA {
            return Err(NotRead::OtherMachine);
        }
        let mut elf = Self { machine: u16_at(&header, 18), interpreter: None, is_go: false };
        let (first, size, count) = (u64_at(&header, 32), u16_at(&header, 54), u16_at(&header, 56));
        if usize::from(size) != PROGRAM_HEADER_BYTES {
            return Ok(elf);
        }
        for index in 0..count.min(PROGRAM_HEADERS_MAX) {
            let Some(at) = first.checked_add(u64::from(index) * u64::from(size)) else { break };
            let Some(segment) = read_array::<PROGRAM_HEADER_BYTES>(file, at) else { break };
            let (offset, bytes) = (u64_at(&segment, 8), u64_at(&segment, 32));
            match u32_at(&segment, 0) {
                PT_INTERP => elf.interpreter = read_bytes(file, offset, bytes.min(4096)).and_then(path),
                PT_NOTE => {
                    elf.is_go |= read_bytes(file, offset, bytes.min(NOTE_BYTES_MAX)).is_some_and(|it| has_go_note(&it));
                }
                _ => {}
            }
        }
        Ok(elf)
    }
}

/// A string that ends with NUL.
fn path(mut bytes: Vec<u8>) -> Option<PathBuf> {
    bytes.truncate(bytes.iter().position(|byte| *byte == 0)?);
    (!bytes.is_empty()).then(|| OsString::from_vec(bytes).into())
}

/// Go's linker leaves its build id in a note of the owner "Go" with type 4, which `strip` keeps.
fn has_go_note(mut notes: &[u8]) -> bool {
    let padded = |bytes: u32| (bytes as usize).next_multiple_of(4);
    while notes.len() >= 12 {
        let (name_bytes, data_bytes, kind) = (u32_at(notes, 0), u32_at(notes, 4), u32_at(notes, 8));
        let name = notes.get(12..).and_then(|rest| rest.get(..name_bytes as usize));
        if kind == 4 && name == Some(b"Go\0\0") {
            return true;
        }
        let Some(rest) = notes.get(12..).and_then(|rest| rest.get(padded(name_bytes)..)) else { return false };
        let Some(rest) = rest.get(padded(data_bytes)..) else { return false };
        notes = rest;
    }
    false
}

fn read_array<const N: usize>(file: &File, at: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

fn read_bytes(file: &File, at: u64, bytes: u64) -> Option<Vec<u8>> {
    let mut reader = file;
    let mut read = Vec::new();
    io::Seek::seek(&mut reader, io::SeekFrom::Start(at)).ok()?;
    reader.take(bytes).read_to_end(&mut read).ok()?;
    (read.len() as u64 == bytes).then_some(read)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_go_note_is_found_among_others_and_broken_ones_are_no_matter() {
        let note = |name: &[u8], data: &[u8], kind: u32| {
            let mut bytes =
                [(name.len() as u32).to_ne_bytes(), (data.len() as u32).to_ne_bytes(), kind.to_ne_bytes()].concat();
            for part in [name, data] {
                bytes.extend(part);
                bytes.resize(bytes.len().next_multiple_of(4), 0);
            }
            bytes
        };
        let gnu = note(b"GNU\0", &[7; 20], 3);
        let go = note(b"Go\0\0", b"abc", 4);
        assert!(has_go_note(&[gnu.clone(), go.clone()].concat()));
        assert!(!has_go_note(&[gnu.clone(), note(b"Go\0\0", b"abc", 5)].concat()));
        assert!(!has_go_note(&gnu));
        assert!(!has_go_note(&go[..14]));
        assert!(!has_go_note(&[0xff; 64]));
    }
}
