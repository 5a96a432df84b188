//! The report that a session writes: one of another session is continued, and revisions are never mixed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::case::Row;
use super::raw::{Group, Raw, Sample, Step};
use super::report;
use crate::machine::{Machine, Revision, date};

/// A directory with raw.json, which is whole after every step, and the reports made from it.
pub(super) struct Results {
    dir: PathBuf,
    raw: Raw,
}

impl Results {
    /// The report in `out`; else that in bench/results of this revision and machine; else a new one.
    pub(super) fn open(out: Option<&Path>, smoke: bool, revision: &Revision, machine: Machine) -> Result<Results> {
        match (out, smoke) {
            (Some(dir), true) => Results::new(Results::of_smoke(dir), machine),
            (Some(dir), false) => Results::at(dir, revision, machine),
            (None, true) => Results::new(crate::target_dir()?.join("bench-smoke"), machine),
            (None, false) => Results::below(&crate::root().join("bench/results"), revision, machine),
        }
    }

    /// A smoke run goes on with no other, and takes the place of none that measured.
    pub(super) fn of_smoke(out: &Path) -> PathBuf {
        out.join("smoke")
    }

    /// The report in a directory, which must be empty or be of this revision and machine.
    fn at(dir: &Path, revision: &Revision, machine: Machine) -> Result<Results> {
        if !dir.join("raw.json").exists() {
            return Results::new(dir.to_owned(), machine);
        }
        let raw = Raw::read(dir)?;
        raw.accepts(revision, &machine)
            .with_context(|| format!("the report in {} cannot be continued; name another with --out", dir.display()))?;
        Ok(Results::go_on(dir.to_owned(), raw))
    }

    /// The report among others that can be continued; else a new one with a name of its own.
    fn below(all: &Path, revision: &Revision, machine: Machine) -> Result<Results> {
        let mut dirs: Vec<PathBuf> =
            fs::read_dir(all).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        dirs.sort();
        for dir in dirs.into_iter().rev().filter(|dir| dir.join("raw.json").exists()) {
            let raw = Raw::read(&dir)?;
            if !raw.groups.is_empty() && raw.accepts(revision, &machine).is_ok() {
                return Ok(Results::go_on(dir, raw));
            }
        }
        let date = date();
        let day = date.split('T').next().unwrap_or_default();
        let dirty = if revision.dirty { "-dirty" } else { "" };
        let name = format!("{day}-{}-{}{dirty}", machine.slug(), revision.commit);
        Results::new(all.join(name), machine)
    }

    fn new(dir: PathBuf, machine: Machine) -> Result<Results> {
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Results { dir, raw: Raw::new(machine) })
    }

    fn go_on(dir: PathBuf, raw: Raw) -> Results {
        eprintln!("bench: going on with the report in {}", dir.display());
        Results { dir, raw }
    }

    pub(super) fn raw(&self) -> &Raw {
        &self.raw
    }

    /// A group that has begun.
    pub(super) fn group(&mut self, row: Row) -> &mut Group {
        self.raw.group(row).expect("it was planned, which begins it")
    }

    /// A group, which begins now unless it has begun.
    pub(super) fn group_or(&mut self, row: Row, new: impl FnOnce() -> Group) -> &mut Group {
        if self.raw.group(row).is_none() {
            self.raw.groups.push(new());
        }
        self.group(row)
    }

    /// Keeps what was measured in a step; unless a measurement failed, it is done.
    pub(super) fn keep(&mut self, row: Row, step: &Step, samples: Vec<Sample>) -> Result<()> {
        let is_whole = samples.iter().all(|sample| sample.error.is_none());
        self.raw.forget(step);
        self.raw.samples.extend(samples);
        let group = self.group(row);
        if is_whole {
            group.open.remove(step);
            group.done.insert(step.clone());
        }
        self.raw.write(&self.dir)
    }

    pub(super) fn write_report(&self) -> Result<()> {
        self.raw.write(&self.dir)?;
        report::write_markdown(&self.dir)?;
        eprintln!("bench: results are in {}", self.dir.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::{CASES, Placement};
    use super::super::contestant::Contestant;
    use super::*;

    fn revision(commit: &str) -> Revision {
        Revision { commit: commit.into(), dirty: false }
    }

    fn begin(results: &mut Results, row: Row, commit: &str) {
        let steps = CASES.iter().filter(|case| case.row == row).map(|case| case.step(Placement::Same));
        results.group_or(row, || Group::new(row, &revision(commit), 1, 1.0)).open = steps.collect();
    }

    fn sample(case: &str, error: Option<&str>) -> Sample {
        let case = CASES.iter().find(|known| known.name == case).unwrap();
        Sample { error: error.map(str::to_owned), ..Sample::new(case, Contestant::Uring, Placement::Same, 0) }
    }

    #[test]
    fn an_interrupted_report_goes_on_where_it_was() {
        let all = tempfile::tempdir().unwrap();
        let open = |commit: &str| Results::below(all.path(), &revision(commit), Machine::default()).unwrap();
        let mut first = open("a");
        begin(&mut first, Row::RoundTrip, "a");
        let step = |case: &str| Step { case: case.into(), placement: Placement::Same };
        first.keep(Row::RoundTrip, &step("null-tcp-1"), vec![sample("null-tcp-1", None)]).unwrap();
        first.keep(Row::RoundTrip, &step("echo-tcp-1"), vec![sample("echo-tcp-1", Some("lost"))]).unwrap();
        drop(first); // without a word more, as by SIGKILL

        let mut second = open("a");
        let group = second.group(Row::RoundTrip);
        assert!(group.done.contains(&step("null-tcp-1")) && group.open.contains(&step("echo-tcp-1")));
        second.keep(Row::RoundTrip, &step("echo-tcp-1"), vec![sample("echo-tcp-1", None)]).unwrap();
        assert!(second.group(Row::RoundTrip).open.iter().eq(&[step("null-tcp-1-polled")]));
        second.keep(Row::RoundTrip, &step("null-tcp-1-polled"), vec![]).unwrap();
        assert!(second.group(Row::RoundTrip).open.is_empty());
        assert_eq!(second.raw().samples.len(), 2, "the failed one is gone");
        begin(&mut second, Row::Udp, "a");
        second.write_report().unwrap();

        // Another commit has a report of its own, and cannot be told to take this one.
        let other = open("b");
        assert_ne!(other.dir, second.dir);
        assert!(other.raw().samples.is_empty());
        let refused = Results::at(&second.dir, &revision("b"), Machine::default()).err().unwrap();
        assert!(format!("{refused:#}").contains("its commit is a, not b"), "{refused:#}");
        assert_eq!(Results::at(&second.dir, &revision("a"), Machine::default()).unwrap().raw().groups.len(), 2);
    }
}
