//! `rpctest`: calls the NULL procedure of an ONC RPC program (NFSv3 by default) and checks every reply.

mod client;
mod oncrpc;

use crate::drive::protocol::Factory;
use crate::echo::AFTER_HELP;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_in};
use crate::options::{CommonArgs, Pace, Plan, ToolDefaults};
use crate::report::columns::Style;
use crate::report::tool::{Io, Outcome, measure, with_process_io};
use crate::rpc::client::{CallTemplate, ReadMethod, RpcDatagramFactory, RpcStreamFactory};
use crate::rpc::oncrpc::{Auth, Procedure, SysCredential, call_message};

const TOOL: ToolDefaults = ToolDefaults { name: "rpctest", port: 62049, iterations: 99, nice: -20 };

/// Options of rpctest.
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure an ONC RPC server with NULL calls, and check every reply",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct Args {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: CommonArgs,

    /// Credentials: none, sys or unix (the same as sys)
    #[arg(short = 'A', long = "auth", value_name = "TYPE", default_value = "none")]
    pub auth: String,

    /// Send each call as three record fragments (first byte, middle, last byte) in one send
    #[arg(short = 'f', long = "fragments", overrides_with = "fragments")]
    pub fragments: bool,

    /// Program number
    #[arg(long, value_name = "N", default_value = "100003", value_parser = word)]
    pub program: u64,

    /// Program version
    #[arg(long, value_name = "N", default_value = "3", value_parser = word)]
    pub program_version: u64,

    /// Procedure number; calls carry no arguments
    #[arg(long, value_name = "N", default_value = "0", value_parser = word)]
    pub procedure: u64,
}

fn word(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 0, u64::from(u32::MAX))
}

/// Runs rpctest on stdout and stderr until it is done or interrupted.
pub fn run(args: Args) -> Result<Outcome, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs rpctest with the given output.
pub fn run_with(args: &Args, io: &mut Io<'_>) -> Result<Outcome, LoadError> {
    let mut plan = args.common.plan(&TOOL)?;
    let auth = Auth::parse(&args.auth)
        .ok_or_else(|| LoadError::Usage(format!("-A {}: must be none, sys or unix", args.auth)))?;
    let credential = match auth {
        Auth::None => None,
        Auth::Sys => Some(SysCredential::of_this_process()),
    };
    let procedure = Procedure {
        program: args.program as u32,
        version: args.program_version as u32,
        procedure: args.procedure as u32,
    };
    // NULL returns nothing; of other procedures only the status is judged.
    let results = procedure.procedure != 0;
    let call = call_message(procedure, credential.as_ref());
    let about = [
        ("auth", auth.to_string()),
        ("fragments", if args.fragments { "3" } else { "1" }.to_string()),
        ("program", procedure.program.to_string()),
        ("program_version", procedure.version.to_string()),
        ("procedure", procedure.procedure.to_string()),
    ];
    if plan.socket.transport.is_datagram() {
        if args.fragments {
            return Err(LoadError::Usage("-f needs a stream: datagrams have no record fragments".into()));
        }
        let call = CallTemplate::bare(&call);
        return go(&mut plan, &RpcDatagramFactory { call, results }, &about, io);
    }
    let factory = RpcStreamFactory {
        call: CallTemplate::marked(&call, args.fragments),
        method: match plan.pace {
            Pace::Closed { synchronous: true } => ReadMethod::MarkThenBody,
            _ => ReadMethod::MarkAhead,
        },
        results,
    };
    go(&mut plan, &factory, &about, io)
}

fn go<F: Factory>(
    plan: &mut Plan,
    factory: &F,
    about: &[(&str, String)],
    io: &mut Io<'_>,
) -> Result<Outcome, LoadError> {
    plan.fit(factory.request_bytes(), factory.id_bits())?;
    measure(plan, Style::Rpctest, factory, about, io)
}
