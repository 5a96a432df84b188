//! Which engine a service runs on, and why it is not a better one.

use ksf::engine::EngineKind;

use crate::doctor::{self, Obstacle};
use crate::output::Failure;

/// What moves the bytes, as asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EngineWish {
    /// The best one that works here
    #[default]
    Auto,
    /// Programs in the kernel, the rest by io_uring or epoll
    Kernel,
    /// io_uring, one ring per shard
    Uring,
    /// Plain system calls, for containers without io_uring
    Epoll,
}

/// The engine to try, best first, and what was ruled out already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// Whether a kernel half goes in front.
    pub(crate) kernel: bool,
    /// What moves the bytes in user space.
    pub(crate) base: EngineKind,
    /// Why a better engine was not taken, with the remedy; empty if this is the best.
    pub(crate) notes: Vec<String>,
}

/// What the machine was found to lack.
#[derive(Debug, Clone, Default)]
pub(crate) struct Obstacles {
    pub(crate) kernel: Option<Obstacle>,
    pub(crate) uring: Option<Obstacle>,
}

impl Obstacles {
    /// Tries what the engines need that are wished for, by services of which some have a kernel half. The self-test of the kernel
    /// engine takes some hundred milliseconds.
    pub(crate) fn look(wishes: &[(EngineWish, bool)]) -> Self {
        let may_be_kernel = |wish| matches!(wish, EngineWish::Auto | EngineWish::Kernel);
        let kernel = wishes.iter().any(|(wish, has_kernel_half)| *has_kernel_half && may_be_kernel(*wish));
        let uring = wishes.iter().any(|(wish, _)| *wish != EngineWish::Epoll);
        Obstacles {
            kernel: kernel.then(doctor::kernel_obstacle).flatten(),
            uring: uring.then(doctor::uring_obstacle).flatten(),
        }
    }
}

/// Chooses by wish and by what the machine lacks. An engine that was asked for by name and
/// cannot run is an error: a fallback would be a surprise.
pub(crate) fn choose(wish: EngineWish, lacks: &Obstacles) -> Result<Choice, Failure> {
    let mut notes = Vec::new();
    let mut base = || match &lacks.uring {
        None => EngineKind::Uring,
        Some(obstacle) => {
            notes.push(not_taken("epoll", "uring", obstacle));
            EngineKind::Epoll
        }
    };
    let (kernel, base) = match wish {
        EngineWish::Epoll => (false, EngineKind::Epoll),
        EngineWish::Uring => match &lacks.uring {
            None => (false, EngineKind::Uring),
            Some(obstacle) => return Err(impossible("uring", obstacle)),
        },
        EngineWish::Kernel => match &lacks.kernel {
            None => (true, base()),
            Some(obstacle) => return Err(impossible("kernel", obstacle)),
        },
        EngineWish::Auto => {
            let base = base();
            if let Some(obstacle) = &lacks.kernel {
                notes.insert(0, not_taken(base.name(), "kernel", obstacle));
            }
            (lacks.kernel.is_none(), base)
        }
    };
    Ok(Choice { kernel, base, notes })
}

impl Choice {
    /// The engine's name in the line of a ready listener.
    pub(crate) fn name(&self) -> &'static str {
        if self.kernel { "kernel" } else { self.base.name() }
    }
}

/// The line that makes a fallback visible.
pub(crate) fn not_taken(taken: &str, better: &str, obstacle: &Obstacle) -> String {
    format!("engine {taken} instead of {better}: {}; to get it: {}", obstacle.cause, obstacle.remedy)
}

/// An engine that was asked for by name and cannot run.
pub(crate) fn impossible(engine: &str, obstacle: &Obstacle) -> Failure {
    let failure = obstacle.failure(format!("engine {engine} cannot run here: {}", obstacle.cause));
    failure.remedy(format!("{}, or use --engine=auto", obstacle.remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Status;

    fn obstacle(cause: &str, rights: bool) -> Option<Obstacle> {
        Some(Obstacle { cause: cause.into(), remedy: "do it".into(), rights })
    }

    fn names(wish: EngineWish, lacks: &Obstacles) -> Result<(&'static str, EngineKind), Status> {
        choose(wish, lacks).map(|choice| (choice.name(), choice.base)).map_err(|failure| failure.status)
    }

    #[test]
    fn auto_takes_the_best_that_works_and_says_why() {
        let all = Obstacles::default();
        assert_eq!(names(EngineWish::Auto, &all), Ok(("kernel", EngineKind::Uring)));
        assert!(choose(EngineWish::Auto, &all).unwrap().notes.is_empty());
        let user = Obstacles { kernel: obstacle("missing CAP_BPF", true), uring: None };
        let choice = choose(EngineWish::Auto, &user).unwrap();
        assert_eq!((choice.name(), choice.notes.len()), ("uring", 1));
        assert!(choice.notes[0].contains("missing CAP_BPF; to get it: do it"));
        let container = Obstacles { uring: obstacle("seccomp", false), ..user };
        let choice = choose(EngineWish::Auto, &container).unwrap();
        assert_eq!((choice.name(), choice.notes.len()), ("epoll", 2));
    }

    #[test]
    fn the_kernel_engine_runs_on_epoll_where_io_uring_is_off() {
        let lacks = Obstacles { kernel: None, uring: obstacle("sysctl", false) };
        assert_eq!(names(EngineWish::Auto, &lacks), Ok(("kernel", EngineKind::Epoll)));
        assert_eq!(names(EngineWish::Kernel, &lacks), Ok(("kernel", EngineKind::Epoll)));
    }

    #[test]
    fn a_named_engine_is_taken_or_refused() {
        let lacks = Obstacles { kernel: obstacle("missing CAP_BPF", true), uring: obstacle("sysctl", false) };
        assert_eq!(names(EngineWish::Kernel, &lacks), Err(Status::NoPermission));
        assert_eq!(names(EngineWish::Uring, &lacks), Err(Status::Unavailable));
        assert_eq!(names(EngineWish::Epoll, &lacks), Ok(("epoll", EngineKind::Epoll)));
        assert!(choose(EngineWish::Epoll, &lacks).unwrap().notes.is_empty());
    }
}
