//! The kernel half of a service: a program on its TCP sockets, and one on the interface for UDP.

use std::sync::Arc;

use ksf::assist::Assist;

use super::plan::Plan;
use crate::doctor::Obstacle;

/// A loaded kernel half. Dropping it takes everything out of the kernel.
pub(crate) struct Half {
    pub(crate) assist: Option<Arc<dyn Assist>>,
}

/// Loads the programs for `plan`.
pub(crate) fn load(_plan: &Plan) -> Result<Half, Obstacle> {
    Err(Obstacle { cause: "stand-in".into(), remedy: "none".into(), rights: false })
}
