//! Can a preloaded library help a program? Read from its file, before it runs.
//!
//! A library that the dynamic linker loads sees what a program asks libc for. So the program must have a dynamic linker
//! (`PT_INTERP`, elf(5)), of the same machine and the same libc as the library, must listen by libc (Go makes its system
//! calls itself, also where it is linked with libc), and must not run with more rights than its caller, because the
//! linker then ignores the caller's libraries (ld.so(8), secure-execution mode).

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use object::elf::{FileHeader32, FileHeader64, Machine};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader};
use object::{Endianness, ReadCache};

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
    machine: Machine,
    interpreter: Option<PathBuf>,
    is_go: bool,
}

enum NotRead {
    NoElf,
    /// Of another word size or byte order.
    OtherMachine,
}

/// More than any linker makes; what lies behind is not looked at.
const PROGRAM_HEADERS_MAX: usize = 256;
/// Longer segments of this kind are of no known linker.
const NOTE_BYTES_MAX: u64 = 65536;

impl Elf {
    fn read(file: &File) -> Result<Self, NotRead> {
        let file = ReadCache::new(file);
        let header: &FileHeader64<Endianness> = match FileHeader64::parse(&file) {
            Ok(header) => header,
            Err(_) if FileHeader32::<Endianness>::parse(&file).is_ok() => return Err(NotRead::OtherMachine),
            Err(_) => return Err(NotRead::NoElf),
        };
        let endian = header.endian().map_err(|_| NotRead::NoElf)?;
        if endian != Endianness::default() {
            return Err(NotRead::OtherMachine);
        }
        let mut elf = Self { machine: header.e_machine(endian), interpreter: None, is_go: false };
        let segments = header.program_headers(endian, &file).unwrap_or_default();
        for segment in &segments[..segments.len().min(PROGRAM_HEADERS_MAX)] {
            if segment.p_filesz(endian) > NOTE_BYTES_MAX {
                continue;
            }
            if let Ok(Some(path)) = segment.interpreter(endian, &file) {
                elf.interpreter = (!path.is_empty()).then(|| OsStr::from_bytes(path).into());
            }
            elf.is_go |= segment.notes(endian, &file).ok().flatten().is_some_and(|notes| has_go_note(endian, notes));
        }
        Ok(elf)
    }
}

/// Go's linker leaves its build id in a note of the owner "Go" with type 4, which `strip` keeps.
fn has_go_note(endian: Endianness, notes: NoteIterator<'_, FileHeader64<Endianness>>) -> bool {
    notes.map_while(Result::ok).any(|note| note.name() == b"Go" && note.n_type(endian).0 == 4)
}
