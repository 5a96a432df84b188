//! The description of a machine.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::error::Error;
use crate::evaluate::{RunLimits, RunOutcome};
use crate::initramfs::Initramfs;
use crate::kernel::{self, Kernel};
use crate::program;
use crate::tools;
use crate::vm::{Forward, Start, Vm};

/// The first process of every machine.
const INIT: &str = include_str!("../../../../lab/init.c");

/// Addresses of QEMU's user-mode network.
const GUEST_ADDRESS: &str = "10.0.2.15";
const HOST_ADDRESS: &str = "10.0.2.2";

/// Attempts to find a free port for a forward, which another process may take before QEMU does.
const PORT_ATTEMPTS: usize = 4;

/// How often a machine is booted whose emulated CPUs waited for one another before the program started.
const BOOT_ATTEMPTS: usize = 3;

/// A machine to be: what it runs, what it has, how long it may take.
///
/// A description can be run any number of times, at the same time too; machines share nothing but files that devices
/// are given.
#[derive(Debug, Clone)]
#[must_use = "a description does nothing until it is run"]
pub struct Lab {
    program: Program,
    args: Vec<String>,
    env: Vec<(String, String)>,
    files: Vec<(PathBuf, PathBuf)>,
    texts: Vec<(PathBuf, String)>,
    tools: Vec<String>,
    modules: Vec<(String, String)>,
    ports: Vec<u16>,
    reach_host: bool,
    qemu_arguments: Vec<OsString>,
    kernel_arguments: Vec<String>,
    kernel: Option<Kernel>,
    memory_mib: u32,
    cpus: u32,
    limits: RunLimits,
    echo: bool,
}

#[derive(Debug, Clone)]
enum Program {
    File(PathBuf),
    Script(String),
}

impl Lab {
    /// A machine that runs a program of the host: an ELF file, which brings its shared libraries; a script, which
    /// brings its interpreter; or a C file (`*.c`), which is compiled to a static program first.
    ///
    /// It runs as root, as `/lab/NAME`, with standard output and standard error going to [`RunOutcome::output`]. The
    /// machine has 512 MiB of memory, one processor, lo, 60 seconds to boot and 60 for the program.
    pub fn new(program: impl Into<PathBuf>) -> Lab {
        Lab::with(Program::File(program.into()))
    }

    /// A machine that runs the text of a shell script, by the host's `/bin/sh -eu`. Commands that are not built into the
    /// shell come by [`tool`](Self::tool).
    pub fn script(text: impl Into<String>) -> Lab {
        Lab::with(Program::Script(text.into()))
    }

    fn with(program: Program) -> Lab {
        Lab {
            program,
            args: Vec::new(),
            env: Vec::new(),
            files: Vec::new(),
            texts: Vec::new(),
            tools: Vec::new(),
            modules: Vec::new(),
            ports: Vec::new(),
            reach_host: false,
            qemu_arguments: Vec::new(),
            kernel_arguments: Vec::new(),
            kernel: None,
            memory_mib: 512,
            cpus: 1,
            limits: RunLimits { boot: Duration::from_secs(60), program: Duration::from_secs(60) },
            echo: false,
        }
    }

    /// One more argument of the program.
    pub fn arg(mut self, arg: impl Into<String>) -> Lab {
        self.args.push(arg.into());
        self
    }

    /// A variable of the program's environment, which otherwise holds PATH and HOME.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Lab {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Copies a file of the host, or a directory with all it holds, to an absolute path of the machine. A program
    /// brings its shared libraries or its interpreter.
    pub fn file(mut self, host: impl Into<PathBuf>, guest: impl Into<PathBuf>) -> Lab {
        self.files.push((host.into(), guest.into()));
        self
    }

    /// A file of the machine with this text.
    pub fn text(mut self, guest: impl Into<PathBuf>, text: impl Into<String>) -> Lab {
        self.texts.push((guest.into(), text.into()));
        self
    }

    /// Copies a command of the host's PATH or system directories, such as `mount.nfs`, to `/bin`.
    pub fn tool(mut self, name: impl Into<String>) -> Lab {
        self.tools.push(name.into());
        self
    }

    /// Loads a kernel module, after those it depends on. Modules are loaded in the order of the calls.
    pub fn module(self, name: impl Into<String>) -> Lab {
        self.module_with(name, "")
    }

    /// Loads a kernel module with options, as `"debug=1 size=64"`.
    pub fn module_with(mut self, name: impl Into<String>, options: impl Into<String>) -> Lab {
        self.modules.push((name.into(), options.into()));
        self
    }

    /// Adds a QEMU device, as after `-device`: `"virtio-rng-pci"`. The machine is a `pc`; the device's module is to be
    /// named too.
    pub fn device(self, device: impl Into<String>) -> Lab {
        self.qemu_arguments(["-device".to_owned(), device.into()])
    }

    /// Adds arguments to QEMU's command line, after the laboratory's own: options such as `-machine nvdimm=on` or
    /// `-m slots=4,maxmem=2G` add to what is there.
    pub fn qemu_arguments<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Lab {
        self.qemu_arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Makes a TCP port of the machine reachable on the host's loopback, at [`Vm::address_of_port`]. The machine gets
    /// a network card; unless [`reach_host`](Self::reach_host) is asked for, that is all it can reach.
    pub fn forward_tcp(mut self, guest_port: u16) -> Lab {
        self.ports.push(guest_port);
        self
    }

    /// Gives the machine a network card through which it reaches the host: 10.0.2.2 is the host's loopback.
    pub fn reach_host(mut self) -> Lab {
        self.reach_host = true;
        self
    }

    /// Adds an argument to the kernel's command line.
    pub fn kernel_argument(mut self, argument: impl Into<String>) -> Lab {
        self.kernel_arguments.push(argument.into());
        self
    }

    /// Boots this kernel instead of [`Kernel::from_environment`].
    pub fn kernel(mut self, kernel: Kernel) -> Lab {
        self.kernel = Some(kernel);
        self
    }

    /// The machine's memory. Everything copied into it takes from that.
    pub fn memory_mib(mut self, memory_mib: u32) -> Lab {
        self.memory_mib = memory_mib;
        self
    }

    /// The number of processors, each emulated by a thread of the host.
    pub fn cpus(mut self, cpus: u32) -> Lab {
        self.cpus = cpus;
        self
    }

    /// The time the program may take, from its start until the machine is off. The boot before has a limit of its own.
    pub fn time_limit(mut self, time_limit: Duration) -> Lab {
        self.limits.program = time_limit;
        self
    }

    /// The time the machine may take to boot, from QEMU's start to the program's.
    pub fn boot_limit(mut self, boot_limit: Duration) -> Lab {
        self.limits.boot = boot_limit;
        self
    }

    /// Passes the program's output on to standard output while it comes.
    pub fn echo(mut self, echo: bool) -> Lab {
        self.echo = echo;
        self
    }

    /// Boots the machine, waits for the program and for the power-off.
    ///
    /// A program that fails is an [`RunOutcome`]; a machine that does not come that far is an error.
    pub fn run(&self) -> Result<RunOutcome, Error> {
        self.spawn()?.wait()
    }

    /// Boots the machine and returns when the program is about to start.
    pub fn spawn(&self) -> Result<Vm, Error> {
        let qemu = tools::find("qemu-system-x86_64")
            .ok_or_else(|| Error::MissingTool { tool: "qemu-system-x86_64".into(), package: "qemu-system-x86" })?;
        let kernel = self.kernel.clone().map_or_else(Kernel::from_environment, Ok)?;
        let initramfs = self.initramfs(&kernel)?.archive();
        for attempt in 1.. {
            let forwards = free_ports(&self.ports)?;
            let started = Vm::start(Start {
                qemu: self.qemu(Command::new(&qemu), &kernel, &forwards),
                initramfs: initramfs.clone(),
                forwards,
                limits: self.limits,
                echo: self.echo,
            });
            match started {
                Err(error) if port_was_taken(&error) && attempt < PORT_ATTEMPTS => {}
                Err(error) if hung_at_boot(&error) && attempt < BOOT_ATTEMPTS => {}
                other => return other,
            }
        }
        unreachable!("the last attempt returns")
    }

    fn initramfs(&self, kernel: &Kernel) -> Result<Initramfs, Error> {
        let mut files = Initramfs::default();
        let mut plan = InitPlan::default();
        for dir in ["/proc", "/sys", "/dev", "/tmp", "/run", "/bin"] {
            files.add_directory(Path::new(dir))?;
        }
        files.add("/init", 0o755, program::compile(Path::new("lab/init.c"), INIT)?)?;
        self.add_modules(kernel, &mut files, &mut plan)?;
        if self.has_network() {
            plan.add("address", GUEST_ADDRESS)?;
            plan.add("gateway", HOST_ADDRESS)?;
        }
        for (name, value) in &self.env {
            plan.add("env", &format!("{name}={value}"))?;
        }
        for tool in &self.tools {
            let host = tools::find(tool)
                .ok_or_else(|| Error::Description { what: format!("there is no command '{tool}' here to copy") })?;
            program::copy(&mut files, &host, &Path::new("/bin").join(tool))?;
        }
        for (host, guest) in &self.files {
            program::copy(&mut files, host, guest)?;
        }
        for (guest, text) in &self.texts {
            files.add(guest, 0o755, text.clone().into_bytes())?;
        }
        for arg in self.add_program(&mut files)?.iter().chain(&self.args) {
            plan.add("arg", arg)?;
        }
        files.add("/lab/plan", 0o644, plan.0)?;
        Ok(files)
    }

    fn add_modules(&self, kernel: &Kernel, files: &mut Initramfs, plan: &mut InitPlan) -> Result<(), Error> {
        let mut wanted = Vec::new();
        if self.has_network() {
            wanted.extend([("virtio_pci", ""), ("virtio_net", "")]);
        }
        wanted.extend(self.modules.iter().map(|(name, options)| (name.as_str(), options.as_str())));
        if wanted.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
        for file in kernel.modules()?.files_in_order(&names)? {
            let name = crate::modules::module_name(&file);
            // modules.dep knows no options: they belong to the module that was asked for.
            for (_, options) in wanted.iter().filter(|(module, _)| crate::modules::module_name(module) == name) {
                plan.add("options", options)?;
            }
            let guest = format!("/lab/modules/{name}.ko");
            plan.add("module", &guest)?;
            files.add(guest, 0o644, kernel::read_module(&kernel.modules_dir().join(&file))?)?;
        }
        Ok(())
    }

    /// Adds the program; the words that run it.
    fn add_program(&self, files: &mut Initramfs) -> Result<Vec<String>, Error> {
        let path = match &self.program {
            Program::Script(text) => {
                let shell = Path::new("/bin/sh");
                program::copy(files, shell, shell)?;
                files.add("/lab/script", 0o755, text.clone().into_bytes())?;
                return Ok(vec!["/bin/sh".into(), "-eu".into(), "/lab/script".into()]);
            }
            Program::File(path) => path,
        };
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(|| Error::Description {
            what: format!("a program needs a file name in UTF-8: {}", path.display()),
        })?;
        if path.extension().is_none_or(|extension| extension != "c") {
            let guest = format!("/lab/{name}");
            program::copy(files, path, Path::new(&guest))?;
            return Ok(vec![guest]);
        }
        let source = std::fs::read_to_string(path).map_err(Error::host(format!("read {}", path.display())))?;
        let guest = format!("/lab/{}", name.trim_end_matches(".c"));
        files.add(&guest, 0o755, program::compile(path, &source)?)?;
        Ok(vec![guest])
    }

    fn has_network(&self) -> bool {
        self.reach_host || !self.ports.is_empty()
    }

    fn qemu(&self, mut qemu: Command, kernel: &Kernel, forwards: &[Forward]) -> Command {
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.args(["-machine", "pc", "-accel", "tcg,thread=multi", "-cpu", "max"]);
        qemu.arg("-m").arg(format!("size={}M", self.memory_mib)).arg("-smp").arg(self.cpus.to_string());
        qemu.arg("-kernel").arg(kernel.image()).arg("-append").arg(self.kernel_command_line());
        if self.has_network() {
            let mut network = String::from("user,id=lab");
            if !self.reach_host {
                network += ",restrict=on";
            }
            for Forward { guest, host } in forwards {
                network += &format!(",hostfwd=tcp:127.0.0.1:{host}-{GUEST_ADDRESS}:{guest}");
            }
            // No boot from the network: its option ROM would only cost time.
            qemu.args(["-netdev", &network, "-device", "virtio-net-pci,netdev=lab,romfile="]);
        }
        qemu.args(&self.qemu_arguments);
        qemu
    }

    fn kernel_command_line(&self) -> String {
        // A panic ends QEMU at once (-no-reboot), and an oops is a panic: a test must not pass over one. Warnings and
        // worse reach the log. Protections that cost time under emulation guard nothing here. The check of the timer
        // fails, by a panic, on a host so busy that the emulated processor gets no ticks for a while.
        let own = "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off no_timer_check";
        let own = own.split(' ').map(str::to_owned);
        own.chain(self.kernel_arguments.iter().cloned()).collect::<Vec<_>>().join(" ")
    }
}

/// The file /lab/plan of lab/init.c.
#[derive(Default)]
struct InitPlan(Vec<u8>);

impl InitPlan {
    fn add(&mut self, key: &str, value: &str) -> Result<(), Error> {
        if value.contains('\0') {
            return Err(Error::Description { what: format!("a NUL character in '{}'", value.escape_debug()) });
        }
        for word in [key, value] {
            self.0.extend_from_slice(word.as_bytes());
            self.0.push(0);
        }
        Ok(())
    }
}

/// A port of the host's loopback for each port of the machine, free at this moment.
fn free_ports(guest_ports: &[u16]) -> Result<Vec<Forward>, Error> {
    // All are held until all are chosen, so that none is chosen twice.
    let mut held = Vec::new();
    for guest in guest_ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::host("find a free port"))?;
        let host = listener.local_addr().map_err(Error::host("find a free port"))?.port();
        held.push((listener, Forward { guest: *guest, host }));
    }
    Ok(held.into_iter().map(|(_, forward)| forward).collect())
}

fn port_was_taken(error: &Error) -> bool {
    matches!(error, Error::Qemu { messages, .. } if messages.contains("Could not set up host forwarding"))
}

/// Seen with an emulated machine of four CPUs on a host of two: one waited for an interrupt between CPUs to be answered
/// (smp_call_function_many_cond) until the limit. Nothing of the program had run, so another boot tells as much.
fn hung_at_boot(error: &Error) -> bool {
    matches!(error, Error::TimedOut { started: false, console, .. } if console.contains("soft lockup"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_booted_again_only_if_its_cpus_hung_before_the_program() {
        let timed_out = |started, console: &str| Error::TimedOut {
            limit: Duration::from_secs(60),
            started,
            output: String::new(),
            console: console.into(),
        };
        let hang = "watchdog: BUG: soft lockup - CPU#2 stuck for 52s! [kworker/2:0:27]";
        assert!(hung_at_boot(&timed_out(false, hang)));
        assert!(!hung_at_boot(&timed_out(true, hang)));
        assert!(!hung_at_boot(&timed_out(false, "Waiting for root device")));
    }
}
