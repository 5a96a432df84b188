//! From an object file to functions: finds the program, follows its calls, and gathers the constants they use.
//!
//! Only functions that the program reaches are taken, so that an object may hold other programs too. The layout is
//! that of Documentation/bpf/llvm_reloc.rst; libbpf links in the same way when the kernel loads the object.

use std::collections::{BTreeMap, HashMap};

use object::elf::{self, R_BPF_64_32, R_BPF_64_64};
use object::read::elf::{ElfFile64, ElfSymbol64};
use object::{
    NativeEndian, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags, RelocationTarget, SectionIndex,
    SymbolKind, pod,
};

use crate::error::FramingLoadError;
use crate::instruction::{Fixup, Raw};
use crate::memory::RODATA;
use crate::program::INSTRUCTIONS_MAX;

/// A function as it stands in the object.
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) instructions: Vec<Raw>,
    /// What instructions refer to, by their index.
    pub(crate) fixups: BTreeMap<usize, Fixup>,
}

/// The functions of a program, its entry first.
pub(crate) struct Image {
    pub(crate) functions: Vec<Function>,
    pub(crate) rodata: Box<[u8]>,
}

/// Takes the program called `wanted`, or the only one, out of an object.
pub(crate) fn link(object: &[u8], wanted: Option<&str>) -> Result<Image, FramingLoadError> {
    check_header(object)?;
    let file = File::parse(object).map_err(FramingLoadError::malformed)?;
    let entry = find_program(&file, wanted)?;
    let mut linker = Linker { file: &file, rodata: Rodata::of(&file)?, found: Vec::new(), numbers: HashMap::new() };
    linker.number(&entry)?;
    let mut functions: Vec<Function> = Vec::new();
    let mut instructions = 0;
    while let Some(symbol) = linker.found.get(functions.len()).copied() {
        let function = linker.function(&file.symbol_by_index(symbol).map_err(FramingLoadError::malformed)?)?;
        instructions += function.instructions.len();
        if instructions > INSTRUCTIONS_MAX {
            return Err(FramingLoadError::TooLarge { what: "the program's instructions", limit: INSTRUCTIONS_MAX });
        }
        functions.push(function);
    }
    Ok(Image { functions, rodata: linker.rodata.bytes.into() })
}

/// One function that is not in any object.
pub(crate) fn single_function(code: &[u8]) -> Result<Function, FramingLoadError> {
    if code.len() / Raw::BYTES > INSTRUCTIONS_MAX {
        return Err(FramingLoadError::TooLarge { what: "the program's instructions", limit: INSTRUCTIONS_MAX });
    }
    Ok(Function { name: "program".into(), instructions: slots(code, "program")?, fixups: BTreeMap::new() })
}

/// Where in the file the constant called `name` has its `bytes` bytes of value.
pub(crate) fn constant_in_file(object: &[u8], name: &str, bytes: usize) -> Option<std::ops::Range<usize>> {
    let file = File::parse(object).ok()?;
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok(name))?;
    let section = file.section_by_index(symbol.section_index()?).ok()?;
    let (start, len) = section.file_range()?;
    let at = symbol.address();
    let fits = symbol.size() == bytes as u64 && at.checked_add(symbol.size())? <= len;
    let start = usize::try_from(start.checked_add(at)?).ok()?;
    fits.then(|| start..start + bytes)
}

type File<'data> = ElfFile64<'data, NativeEndian>;
type Symbol<'data, 'file> = ElfSymbol64<'data, 'file, NativeEndian>;

/// Says in plain words what kind of file it is, which the parser would not.
fn check_header(object: &[u8]) -> Result<(), FramingLoadError> {
    const NATIVE: elf::DataEncoding = if cfg!(target_endian = "little") { elf::ELFDATA2LSB } else { elf::ELFDATA2MSB };
    let not = |found: &str| Err(FramingLoadError::NotBpf { found: found.into() });
    if !object.starts_with(&elf::ELFMAG) {
        return not("it has no ELF header");
    }
    let Ok((header, _)) = pod::from_bytes::<elf::FileHeader64<NativeEndian>>(object) else {
        return Err(FramingLoadError::malformed("it ends within its first header"));
    };
    match (header.e_ident.class, header.e_ident.data, header.e_machine.get(NativeEndian)) {
        (class, ..) if class != elf::ELFCLASS64 => not("it is not a 64-bit object"),
        (_, order, _) if order != NATIVE => not("it has the other byte order"),
        (.., elf::EM_BPF) => Ok(()),
        (.., machine) => not(&format!("it is for machine {machine}, BPF is {}", elf::EM_BPF)),
    }
}

fn find_program<'data, 'file>(
    file: &'file File<'data>,
    wanted: Option<&str>,
) -> Result<Symbol<'data, 'file>, FramingLoadError> {
    let mut programs = Vec::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text) {
        let Some(section) = symbol.section_index() else { continue };
        let section = file.section_by_index(section).map_err(FramingLoadError::malformed)?;
        let section = section.name().map_err(FramingLoadError::malformed)?;
        if section == "socket" || section.starts_with("socket/") {
            programs.push((symbol.name().map_err(FramingLoadError::malformed)?, section, symbol));
        }
    }
    let found = programs.iter().map(|(name, ..)| (*name).to_owned()).collect();
    programs.retain(|(name, section, _)| wanted.is_none_or(|wanted| wanted == *name || wanted == *section));
    match programs.len() {
        0 => Err(FramingLoadError::NoProgram { wanted: wanted.map(str::to_owned), found }),
        1 => Ok(programs.remove(0).2),
        _ => Err(FramingLoadError::SeveralPrograms {
            found: programs.iter().map(|(name, ..)| (*name).to_owned()).collect(),
        }),
    }
}

struct Linker<'data, 'file> {
    file: &'file File<'data>,
    rodata: Rodata,
    /// Functions in the order of their numbers.
    found: Vec<object::SymbolIndex>,
    /// Number of the function that starts at a place of a section.
    numbers: HashMap<(SectionIndex, u64), usize>,
}

impl Linker<'_, '_> {
    /// The function's number; a new one if it was not met before.
    fn number(&mut self, function: &Symbol<'_, '_>) -> Result<usize, FramingLoadError> {
        let section =
            function.section_index().ok_or_else(|| FramingLoadError::malformed("a function without a section"))?;
        let next = self.found.len();
        let number = *self.numbers.entry((section, function.address())).or_insert(next);
        if number == next {
            self.found.push(function.index());
        }
        Ok(number)
    }

    fn function(&mut self, symbol: &Symbol<'_, '_>) -> Result<Function, FramingLoadError> {
        let name = symbol.name().map_err(FramingLoadError::malformed)?.to_owned();
        let index =
            symbol.section_index().ok_or_else(|| FramingLoadError::malformed("a function without a section"))?;
        let section = self.file.section_by_index(index).map_err(FramingLoadError::malformed)?;
        let (start, bytes) = (symbol.address(), symbol.size());
        let code = section.data().map_err(FramingLoadError::malformed)?;
        let range = usize::try_from(start).ok().zip(start.checked_add(bytes).and_then(|end| usize::try_from(end).ok()));
        let code = range.and_then(|(start, end)| code.get(start..end));
        let code =
            code.ok_or_else(|| FramingLoadError::malformed(format!("function {name} is not within its section")))?;
        let instructions = slots(code, &name)?;
        let mut fixups = BTreeMap::new();
        for (at, relocation) in section.relocations() {
            let Some(at) = at.checked_sub(start).filter(|at| *at < bytes) else { continue };
            let slot = (at / Raw::BYTES as u64) as usize;
            let fixup = self.relocate(&name, slot, &instructions[slot], &relocation)?;
            fixups.insert(slot, fixup);
        }
        for (slot, raw) in instructions.iter().enumerate() {
            if raw.is_local_call() && !fixups.contains_key(&slot) {
                // Within one section the compiler needs no relocation: the distance is in the instruction.
                let target = start as i64 + (slot as i64 + 1 + i64::from(raw.imm)) * Raw::BYTES as i64;
                fixups.insert(slot, self.call(&name, slot, index, target)?);
            }
        }
        Ok(Function { name, instructions, fixups })
    }

    fn relocate(
        &mut self,
        function: &str,
        slot: usize,
        raw: &Raw,
        relocation: &object::Relocation,
    ) -> Result<Fixup, FramingLoadError> {
        let RelocationTarget::Symbol(symbol) = relocation.target() else {
            return Err(FramingLoadError::malformed("a relocation without a symbol"));
        };
        let symbol = self.file.symbol_by_index(symbol).map_err(FramingLoadError::malformed)?;
        let section = symbol.section_index().and_then(|index| self.file.section_by_index(index).ok());
        let section_name = section.as_ref().and_then(|section| section.name().ok()).unwrap_or_default();
        let name = symbol.name().ok().filter(|name| !name.is_empty()).unwrap_or(section_name);
        let refuse = |problem| {
            Err(FramingLoadError::Reference { function: function.into(), index: slot, symbol: name.into(), problem })
        };
        let RelocationFlags::Elf { r_type, .. } = relocation.flags() else {
            return refuse("by a relocation of an unknown kind");
        };
        let Some(section) = section else { return refuse("which is not in the object") };
        if r_type == R_BPF_64_32 && raw.is_local_call() {
            // The immediate counts from the symbol, which may be the section's start; -1 is its first instruction.
            let distance = (i64::from(raw.imm) + 1) * Raw::BYTES as i64;
            let target = symbol.address().wrapping_add_signed(distance) as i64;
            self.call(function, slot, section.index(), target)
        } else if r_type == R_BPF_64_64 && raw.is_load_imm64() {
            let offset = symbol.address().wrapping_add_signed(i64::from(raw.imm));
            match self.rodata.starts.get(&section.index()) {
                Some(start) => Ok(Fixup::Data(RODATA.wrapping_add(*start).wrapping_add(offset))),
                None => refuse("a map, a variable or a function"),
            }
        } else {
            refuse("by a relocation of an unknown kind")
        }
    }

    fn call(&mut self, from: &str, slot: usize, section: SectionIndex, target: i64) -> Result<Fixup, FramingLoadError> {
        let callee = self.file.symbols().find(|symbol| {
            symbol.kind() == SymbolKind::Text
                && symbol.section_index() == Some(section)
                && i64::try_from(symbol.address()) == Ok(target)
        });
        match callee {
            Some(callee) => self.number(&callee).map(Fixup::Call),
            None => {
                Err(FramingLoadError::malformed(format!("function {from}, instruction {slot} calls into no function")))
            }
        }
    }
}

/// Every section of constants, one behind the other.
struct Rodata {
    bytes: Vec<u8>,
    starts: HashMap<SectionIndex, u64>,
}

impl Rodata {
    const BYTES_MAX: usize = 1 << 20;

    fn of(file: &File<'_>) -> Result<Self, FramingLoadError> {
        let mut all = Self { bytes: Vec::new(), starts: HashMap::new() };
        for section in file.sections() {
            if !section.name().is_ok_and(|name| name.starts_with(".rodata")) {
                continue;
            }
            let data = section.data().map_err(FramingLoadError::malformed)?;
            if all.bytes.len() + data.len() > Self::BYTES_MAX {
                return Err(FramingLoadError::TooLarge { what: "the bytes of the constants", limit: Self::BYTES_MAX });
            }
            all.bytes.resize(all.bytes.len().next_multiple_of(16), 0);
            all.starts.insert(section.index(), all.bytes.len() as u64);
            all.bytes.extend_from_slice(data);
        }
        Ok(all)
    }
}

fn slots(code: &[u8], function: &str) -> Result<Vec<Raw>, FramingLoadError> {
    let (slots, rest) = code.as_chunks::<{ Raw::BYTES }>();
    if slots.is_empty() || !rest.is_empty() {
        let what = format!("function {function} has {} bytes, not a positive multiple of 8", code.len());
        return Err(FramingLoadError::malformed(what));
    }
    Ok(slots.iter().map(|slot| Raw::from_bytes(*slot)).collect())
}
