//! stand-in
use crate::args::*;
use crate::exit::Failure;
use std::process::ExitCode;
pub(crate) fn kecho(_: EchoArgs) -> Result<ExitCode, Failure> {
    todo!()
}
pub(crate) fn krpc2(_: RpcArgs) -> Result<ExitCode, Failure> {
    todo!()
}
pub(crate) fn config(_: ServeArgs) -> Result<ExitCode, Failure> {
    todo!()
}
pub(crate) fn object(_: RunArgs) -> Result<ExitCode, Failure> {
    todo!()
}
