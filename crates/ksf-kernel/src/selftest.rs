//! Does this kernel do what the programs rely on? Sockmap had bugs on some kernels, so the engine asks before use.

use crate::KernelError;

/// placeholder
pub fn self_test() -> Result<(), KernelError> {
    Ok(())
}
