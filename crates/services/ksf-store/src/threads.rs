//! Work that is cut into numbered pieces, on several threads: what comes of it does not depend on how many there are.

use std::iter;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Hands out the numbers below `count`, each once and in their order, on so many threads, of which the caller is one. Each thread
/// makes a state when it begins; they are returned. After a `work` that returned false no further number is begun: all that
/// are smaller than that one have been, and are done when this returns.
pub(crate) fn on_threads<S: Send>(
    threads: NonZeroUsize,
    count: usize,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> bool + Sync,
) -> Vec<S> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut state = begin();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return state;
            }
            if !work(&mut state, number) {
                next.fetch_max(count, Ordering::Relaxed);
                return state;
            }
        }
    };
    let others = threads.get().min(count).saturating_sub(1);
    thread::scope(|scope| {
        let begin = || thread::Builder::new().name("ksf-recover".to_owned()).spawn_scoped(scope, run);
        // Where the system has no thread left, those that there are do its part.
        let begun: Vec<_> = (0..others).map_while(|_| begin().ok()).collect();
        let own = run();
        let joined = begun.into_iter().map(|thread| match thread.join() {
            Ok(state) => state,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        iter::once(own).chain(joined).collect()
    })
}

/// What `work` makes of each number below `count`, in order, up to the first error at least: nothing is begun after one. `begin`
/// makes what a thread has for all of its work.
pub(crate) fn try_map_on_threads<S: Send, T: Send, E: Send>(
    threads: NonZeroUsize,
    count: usize,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Vec<Result<T, E>> {
    let begin = || (begin(), Vec::new());
    let states = on_threads(threads, count, begin, |(state, done), number| {
        let result = work(state, number);
        let is_ok = result.is_ok();
        done.push((number, result));
        is_ok
    });
    let mut done: Vec<(usize, Result<T, E>)> = states.into_iter().flat_map(|(_, done)| done).collect();
    done.sort_unstable_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREADS: [NonZeroUsize; 2] = [NonZeroUsize::MIN, NonZeroUsize::MIN.saturating_add(3)];

    #[test]
    fn every_number_is_done_once_and_results_are_in_order() {
        for threads in THREADS {
            for count in [0, 1, 2, 1000] {
                let results = try_map_on_threads(threads, count, || (), |(), number| Ok::<_, ()>(number));
                assert!(results.into_iter().eq((0..count).map(Ok)), "{count} on {threads}");
                let states = on_threads(threads, count, Vec::new, |done, number| {
                    done.push(number);
                    true
                });
                assert!(states.len() <= threads.get());
                let mut done = states.concat();
                done.sort_unstable();
                assert!(done.into_iter().eq(0..count));
            }
        }
    }

    #[test]
    fn the_first_error_is_found_on_any_number_of_threads() {
        for threads in THREADS {
            for _ in 0..100 {
                let work = |(): &mut (), number: usize| if number % 7 == 5 { Err(number) } else { Ok(number) };
                let results = try_map_on_threads(threads, 1000, || (), work);
                assert_eq!(results[..6], [Ok(0), Ok(1), Ok(2), Ok(3), Ok(4), Err(5)]);
                assert!(results.len() < 1000, "nothing is begun after an error");
            }
        }
    }
}
