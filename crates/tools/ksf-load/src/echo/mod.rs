//! `echotest`: sends messages to an echo server and compares every byte that comes back.

pub(crate) mod client;
pub(crate) mod pattern;

use crate::calls::CallArgs;
use crate::calls::args::ToolDefaults;
use crate::calls::columns::Style;
use crate::calls::report::CallReport;
use crate::calls::session::measure;
use crate::error::LoadError;
use crate::options::numbers::{NumberError, parse_in};
use crate::options::usage;
use crate::report::{Io, with_process_io};

use self::client::{DATAGRAM_BYTES_MAX, datagrams, streams};
use self::pattern::Pattern;

/// The longest message. The original overran its buffer from about 1 MiB on.
const MESSAGE_BYTES_MAX: u64 = 64 << 20;

const TOOL: ToolDefaults = ToolDefaults { name: "echotest", port: 60007, iterations: u64::MAX, nice: -15 };

/// Options of echotest.
#[derive(Debug, Clone, clap::Args)]
#[command(
    version,
    about = "Measure an echo server, and compare every byte that comes back",
    allow_negative_numbers = true,
    after_help = AFTER_HELP
)]
pub struct EchotestArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: CallArgs,

    /// Message length in bytes
    #[arg(short = 'l', long = "length", value_name = "BYTES", default_value = "1", value_parser = length)]
    pub length: u64,
}

pub(crate) const AFTER_HELP: &str = "\
Numbers take a suffix: k m g t p e z y are powers of 1024, K M G T P E Z Y powers of 1000, b is 512, w is 4.
Times take us, ms, s, m or h; without a unit they are seconds.

Exit status: 0 every reply was right, 1 replies were wrong, missing or surplus, 64 wrong use, 65 bad number, \
68 unknown host, 69 no connection, 70 bug of this program, 71 system error, \
73 a file cannot be written, 74 the results cannot be written.";

fn length(text: &str) -> Result<u64, NumberError> {
    parse_in(text, 0, MESSAGE_BYTES_MAX).map(|bytes| bytes.max(1))
}

/// Runs echotest on stdout and stderr until it is done or interrupted.
pub fn run(args: EchotestArgs) -> Result<CallReport, LoadError> {
    with_process_io(|io| run_with(&args, io))
}

/// Runs echotest with the given output.
pub fn run_with(args: &EchotestArgs, io: &mut Io<'_>) -> Result<CallReport, LoadError> {
    let plan = args.common.plan(&TOOL)?;
    let bytes = args.length as usize;
    let pattern = Pattern::new(bytes);
    let message = [("length", bytes.to_string())];
    match plan.socket.transport.is_datagram() {
        true if bytes > DATAGRAM_BYTES_MAX => {
            usage(format!("-l {bytes} does not fit a datagram; the most is {DATAGRAM_BYTES_MAX}"))
        }
        true => measure(plan, Style::Echotest, &datagrams(pattern), &message, io),
        false => measure(plan, Style::Echotest, &streams(pattern), &message, io),
    }
}
