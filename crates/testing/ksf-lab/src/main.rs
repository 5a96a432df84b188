//! `ksf-lab`: a virtual machine with Debian's kernel, by hand.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use ksf_lab::{Error, Kernel, Lab, RunStatus};

/// What the command returns where the machine, and not the program in it, failed.
const LAB_FAILED: u8 = 125;

#[derive(Parser)]
#[command(name = "ksf-lab", version, about = "Runs a program under Debian's kernel, in QEMU")]
struct CommandLine {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Boot a machine, run a program in it, return its exit status (125: the machine failed)
    Run(Box<LabRunArgs>),
    /// Download the kernel if it is not here yet; print its version, image and modules
    Kernel,
}

#[derive(clap::Args)]
struct LabRunArgs {
    /// Load a kernel module, after those it depends on; options after a comma: nd_pmem,opt=1
    #[arg(short, long = "module", value_name = "NAME[,OPTIONS]")]
    modules: Vec<String>,
    /// Copy a file or directory into the machine; programs bring their libraries
    #[arg(short, long = "file", value_name = "HOST:GUEST")]
    files: Vec<String>,
    /// Copy a command of this machine to /bin of the other
    #[arg(short, long = "tool", value_name = "COMMAND")]
    tools: Vec<String>,
    /// Set a variable of the program's environment
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Make a TCP port of the machine reachable on loopback; the address is printed
    #[arg(short = 'p', long = "forward", value_name = "PORT")]
    ports: Vec<u16>,
    /// Let the machine reach this one, as 10.0.2.2
    #[arg(long)]
    reach_host: bool,
    /// Add a QEMU device
    #[arg(short, long = "device", value_name = "DEVICE")]
    devices: Vec<String>,
    /// Add an argument to QEMU's command line
    #[arg(long = "qemu", value_name = "ARGUMENT", allow_hyphen_values = true)]
    qemu_arguments: Vec<String>,
    /// Add an argument to the kernel's command line
    #[arg(short, long = "append", value_name = "ARGUMENT")]
    append: Vec<String>,
    /// Memory
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    memory_mib: u32,
    /// Processors
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Stop the machine when the program has run that long
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    time_limit_s: u64,
    /// Print the kernel's log on standard error at the end
    #[arg(short, long)]
    console: bool,
    /// A program or script of this machine, or a C file
    program: PathBuf,
    /// Its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    let result = match CommandLine::parse().command {
        Verb::Run(run) => run.run(),
        Verb::Kernel => print_kernel(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("ksf-lab: {error}");
        LAB_FAILED.into()
    })
}

fn print_kernel() -> Result<ExitCode, Error> {
    let kernel = Kernel::from_environment()?;
    println!("{} {} {}", kernel.version(), kernel.image().display(), kernel.modules_dir().display());
    Ok(ExitCode::SUCCESS)
}

impl LabRunArgs {
    fn run(&self) -> Result<ExitCode, Error> {
        let vm = self.lab()?.spawn()?;
        for port in &self.ports {
            if let Some(address) = vm.address_of_port(*port) {
                eprintln!("ksf-lab: port {port} is {address}");
            }
        }
        let outcome = vm.wait()?;
        if self.console {
            eprint!("{}", outcome.console);
        }
        Ok(match outcome.status {
            RunStatus::Exited(code) => code.into(),
            // As a shell reports it.
            RunStatus::Signaled(signal) => (128 + signal).into(),
        })
    }

    fn lab(&self) -> Result<Lab, Error> {
        let mut lab = Lab::new(&self.program)
            .memory_mib(self.memory_mib)
            .cpus(self.cpus)
            .time_limit(Duration::from_secs(self.time_limit_s))
            .qemu_arguments(&self.qemu_arguments)
            .echo(true);
        for arg in &self.args {
            lab = lab.arg(arg);
        }
        for module in &self.modules {
            let (name, options) = module.split_once(',').unwrap_or((module, ""));
            lab = lab.module_with(name, options);
        }
        for file in &self.files {
            let (host, guest) = split(file, ':', "--file is HOST:GUEST")?;
            lab = lab.file(host, guest);
        }
        for variable in &self.env {
            let (name, value) = split(variable, '=', "--env is NAME=VALUE")?;
            lab = lab.env(name, value);
        }
        lab = self.tools.iter().fold(lab, Lab::tool);
        lab = self.devices.iter().fold(lab, Lab::device);
        lab = self.append.iter().fold(lab, Lab::kernel_argument);
        lab = self.ports.iter().fold(lab, |lab, port| lab.forward_tcp(*port));
        Ok(if self.reach_host { lab.reach_host() } else { lab })
    }
}

fn split<'a>(text: &'a str, at: char, usage: &str) -> Result<(&'a str, &'a str), Error> {
    text.split_once(at).ok_or_else(|| Error::Description { what: format!("{usage}, not '{text}'") })
}
