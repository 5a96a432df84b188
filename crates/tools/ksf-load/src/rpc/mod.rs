//! `rpctest`: calls the NULL procedure of an ONC RPC program (NFSv3 by default) and checks every reply.

mod client;
pub(crate) mod oncrpc;

use crate::calls::CallArgs;
use crate::calls::args::ToolDefaults;
use crate::calls::columns::Style;
use crate::calls::report::CallReport;
use crate::calls::session::measure;
use crate::echo::AFTER_HELP;
use crate::error::LoadError;
use crate::options::{number, usage};
use crate::report::{Io, with_process_io};

use self::client::{CallTemplate, ReadMethod, datagrams, streams};
use self::oncrpc::call_message;

const TOOL: ToolDefaults = ToolDefaults { name: "rpctest", port: 62049, iterations: 99, nice: -20 };

/// Options of rpctest.
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure an ONC RPC server with NULL calls, and check every reply",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct RpctestArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: CallArgs,

    /// Credentials: none, sys or unix (the same as sys)
    #[arg(short = 'A', long = "auth", value_name = "TYPE", default_value = "none")]
    pub auth: String,

    /// Send each call as three record fragments (first byte, middle, last byte) in one send
    #[arg(short = 'f', long = "fragments", overrides_with = "fragments")]
    pub fragments: bool,

    /// Program number
    #[arg(long, value_name = "N", default_value = "100003", value_parser = number::<0, { u32::MAX as u64 }>)]
    pub program: u64,

    /// Program version
    #[arg(long, value_name = "N", default_value = "3", value_parser = number::<0, { u32::MAX as u64 }>)]
    pub program_version: u64,

    /// Procedure number; calls carry no arguments
    #[arg(long, value_name = "N", default_value = "0", value_parser = number::<0, { u32::MAX as u64 }>)]
    pub procedure: u64,
}

/// Runs rpctest on stdout and stderr until it is done or interrupted.
pub fn run(args: RpctestArgs) -> Result<CallReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs rpctest with the given output.
pub fn run_with(args: &RpctestArgs, io: &mut Io<'_>) -> Result<CallReport, LoadError> {
    let plan = args.common.plan(&TOOL)?;
    let credential = oncrpc::credential(&args.auth)?;
    // NULL returns nothing; of other procedures only the status is judged.
    let results = args.procedure != 0;
    let program = (args.program as u32, args.program_version as u32);
    let call = call_message(program, args.procedure as u32, credential.as_deref());
    let message = [
        ("auth", if credential.is_some() { "sys" } else { "none" }.to_owned()),
        ("fragments", if args.fragments { "3" } else { "1" }.to_owned()),
        ("program", args.program.to_string()),
        ("program_version", args.program_version.to_string()),
        ("procedure", args.procedure.to_string()),
    ];
    if plan.socket.transport.is_datagram() {
        if args.fragments {
            return usage("-f needs a stream: datagrams have no record fragments");
        }
        let protocol = datagrams(CallTemplate::bare(&call), results);
        return measure(plan, Style::Rpctest, &protocol, &message, io);
    }
    let call = CallTemplate::marked(&call, args.fragments);
    let method = if plan.drive.wait_all { ReadMethod::MarkThenBody } else { ReadMethod::MarkAhead };
    measure(plan, Style::Rpctest, &streams(call, method, results), &message, io)
}
