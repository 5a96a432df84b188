//! Which files to load for a kernel module, and in which order.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The modules of one kernel, as `depmod` found them.
///
/// Hard dependencies only: a module that asks for another by an alias while it runs ("softdep", `request_module`)
/// finds nothing in a machine without modprobe, so such modules are named one by one.
#[derive(Debug, Clone)]
pub struct Modules {
    version: String,
    list: PathBuf,
    /// Module name to (file, files it needs), files relative to the directory of the list.
    files: HashMap<String, (String, Vec<String>)>,
    built_in: HashSet<String>,
}

impl Modules {
    /// Reads `modules.dep` and `modules.builtin` of `dir`, which is `lib/modules/VERSION`.
    pub fn read(dir: &Path) -> Result<Modules, Error> {
        let list = dir.join("modules.dep");
        let text = std::fs::read_to_string(&list).map_err(Error::host(format!("read {}", list.display())))?;
        let built_in = std::fs::read_to_string(dir.join("modules.builtin")).unwrap_or_default();
        let version = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Modules::parse(&version, list, &text, &built_in))
    }

    fn parse(version: &str, list: PathBuf, dependencies: &str, built_in: &str) -> Modules {
        let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
        let files = lines
            .map(|(file, needs)| {
                (module_name(file), (file.to_owned(), needs.split_whitespace().map(str::to_owned).collect()))
            })
            .collect();
        Modules { version: version.to_owned(), list, files, built_in: built_in.lines().map(module_name).collect() }
    }

    /// The files to load for these modules, each after everything it needs and none twice. Paths are relative to
    /// `lib/modules/VERSION`. Names as in modprobe: `-` and `_` are the same. Built-in modules need no file.
    pub fn files_in_order(&self, modules: &[impl AsRef<str>]) -> Result<Vec<String>, Error> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        for module in modules {
            let name = module_name(module.as_ref());
            if self.files.contains_key(&name) {
                self.visit(&name, &mut seen, &mut order);
            } else if !self.built_in.contains(&name) {
                return Err(Error::NoSuchModule {
                    module: module.as_ref().to_owned(),
                    version: self.version.clone(),
                    list: self.list.clone(),
                });
            }
        }
        Ok(order)
    }

    fn visit<'a>(&'a self, name: &str, seen: &mut HashSet<&'a str>, order: &mut Vec<String>) {
        let Some((file, needs)) = self.files.get(name) else { return };
        // Marked before its needs are visited: a file with a cycle in it must not loop for ever.
        if !seen.insert(file) {
            return;
        }
        for need in needs {
            self.visit(&module_name(need), seen, order);
        }
        order.push(file.clone());
    }
}

/// The name of a module from its file: `kernel/fs/dns-resolver.ko.xz` is `dns_resolver`.
pub(crate) fn module_name(file: &str) -> String {
    let base = file.rsplit('/').next().unwrap_or(file);
    let name = base.split_once(".ko").map_or(base, |(name, _)| name);
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "\
kernel/net/kcm/kcm.ko:
kernel/fs/nfs/nfsv4.ko: kernel/net/dns_resolver/dns_resolver.ko kernel/fs/nfs/nfs.ko kernel/net/sunrpc/sunrpc.ko
kernel/fs/nfs/nfs.ko: kernel/net/sunrpc/sunrpc.ko kernel/fs/fscache/fscache.ko
kernel/fs/fscache/fscache.ko: kernel/fs/netfs/netfs.ko
kernel/fs/netfs/netfs.ko:
kernel/net/sunrpc/sunrpc.ko:
kernel/net/dns_resolver/dns_resolver.ko:
kernel/drivers/nvdimm/nd-pmem.ko.xz: kernel/drivers/nvdimm/libnvdimm.ko.xz
kernel/drivers/nvdimm/libnvdimm.ko.xz:
";

    fn modules() -> Modules {
        Modules::parse("6.1.0-test", "modules.dep".into(), DEPENDENCIES, "kernel/net/strparser/strparser.ko\n")
    }

    fn names(modules: &[&str]) -> Vec<String> {
        self::modules().files_in_order(modules).unwrap().iter().map(|file| module_name(file)).collect()
    }

    #[test]
    fn everything_comes_after_what_it_needs() {
        assert_eq!(names(&["kcm"]), ["kcm"]);
        assert_eq!(names(&["nfsv4"]), ["dns_resolver", "sunrpc", "netfs", "fscache", "nfs", "nfsv4"]);
    }

    #[test]
    fn nothing_comes_twice() {
        assert_eq!(
            names(&["netfs", "nfs", "netfs", "nfsv4"]),
            ["netfs", "sunrpc", "fscache", "nfs", "dns_resolver", "nfsv4"]
        );
    }

    #[test]
    fn names_are_those_of_modprobe() {
        assert_eq!(
            modules().files_in_order(&["nd_pmem"]).unwrap(),
            ["kernel/drivers/nvdimm/libnvdimm.ko.xz", "kernel/drivers/nvdimm/nd-pmem.ko.xz"]
        );
        assert_eq!(names(&["nd-pmem"]), names(&["nd_pmem"]));
    }

    #[test]
    fn a_module_that_is_built_in_needs_no_file() {
        assert!(names(&["strparser"]).is_empty());
    }

    #[test]
    fn a_module_that_does_not_exist_is_named() {
        let error = modules().files_in_order(&["kcm", "kmc"]).unwrap_err();
        assert!(matches!(&error, Error::NoSuchModule { module, .. } if module == "kmc"));
        assert_eq!(error.to_string(), "kernel 6.1.0-test has no module 'kmc'; look for its name in modules.dep");
    }

    #[test]
    fn a_cycle_ends() {
        let modules = Modules::parse("test", PathBuf::new(), "a.ko: b.ko\nb.ko: a.ko\n", "");
        assert_eq!(modules.files_in_order(&["a"]).unwrap(), ["b.ko", "a.ko"]);
    }
}
