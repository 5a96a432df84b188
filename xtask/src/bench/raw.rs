//! The raw results: what raw.json holds, and medians of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::case::{CASES, Case, Metric, Placement, Row};
use super::contestant::Contestant;
use super::host::HostCosts;
use super::stats::Interval;
use crate::machine::{Machine, Revision, date};

const SCHEMA: u32 = 2;

/// What the bench found at one revision on one machine, group by group. Field names are the schema of raw.json.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Raw {
    /// Version of this schema.
    pub(crate) schema: u32,
    pub(crate) machine: Machine,
    pub(crate) groups: Vec<Group>,
    #[serde(deserialize_with = "of_cases")]
    pub(crate) samples: Vec<Sample>,
}

/// The rows of one name of `--only`, which are measured together.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Group {
    pub(crate) row: Row,
    /// When its first step began: UTC, ISO 8601.
    pub(crate) date: String,
    #[serde(flatten)]
    pub(crate) revision: Revision,
    /// Measurements of each contestant, case and placement; more where a goal was undecided.
    pub(crate) runs: u32,
    /// Wanted length of one measurement.
    pub(crate) seconds: f64,
    /// What the host took for the least of things, in each session that measured the group.
    #[serde(default)]
    pub(crate) host: Vec<HostCosts>,
    /// What has been measured whole.
    #[serde(deserialize_with = "of_cases")]
    pub(crate) done: BTreeSet<Step>,
    /// What is yet to be measured, or failed.
    #[serde(deserialize_with = "of_cases")]
    pub(crate) open: BTreeSet<Step>,
    /// What was left out, and why.
    pub(crate) skipped: Vec<String>,
    /// The disk that servers wrote to, where they write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) medium: Option<String>,
}

/// The least that is measured at once, and anew after an interruption: the contestants of a case in turn.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub(crate) struct Step {
    pub(crate) case: String,
    pub(crate) placement: Placement,
}

/// One measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Sample {
    pub(crate) case: String,
    pub(crate) contestant: Contestant,
    pub(crate) placement: Placement,
    /// Counts from 0; a round measures every contestant once.
    pub(crate) round: u32,
    pub(crate) server_command: String,
    pub(crate) client_command: String,
    pub(crate) metrics: BTreeMap<Metric, f64>,
    /// Requests that were disturbed and failed, by the generator's names of the kinds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) failures: BTreeMap<String, u64>,
    /// Reasons of the generator to doubt its figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) warnings: Vec<String>,
    /// Why there are no metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

impl Group {
    /// A group that begins now.
    pub(crate) fn new(row: Row, revision: &Revision, runs: u32, seconds: f64) -> Group {
        Group {
            row,
            date: date(),
            revision: revision.clone(),
            runs,
            seconds,
            host: Vec::new(),
            done: BTreeSet::new(),
            open: BTreeSet::new(),
            skipped: Vec::new(),
            medium: None,
        }
    }
}

impl Sample {
    /// The case, the contestant, the placement and the reason of a measurement that failed.
    pub(crate) fn error_line(&self) -> Option<String> {
        let error = self.error.as_ref()?;
        Some(format!("{}, {}, {}: {error}", self.case, self.contestant, self.placement))
    }

    /// A measurement that is yet to be made.
    pub(crate) fn new(case: &Case, contestant: Contestant, placement: Placement, round: u32) -> Sample {
        Sample {
            case: case.name.to_owned(),
            contestant,
            placement,
            round,
            server_command: String::new(),
            client_command: String::new(),
            metrics: BTreeMap::new(),
            failures: BTreeMap::new(),
            warnings: Vec::new(),
            error: None,
        }
    }
}

impl Raw {
    pub(crate) fn new(machine: Machine) -> Raw {
        Raw { schema: SCHEMA, machine, groups: Vec::new(), samples: Vec::new() }
    }

    /// Reads raw.json in a directory. One whose groups are of several revisions is refused: nothing in it could be
    /// compared.
    pub(crate) fn read(dir: &Path) -> Result<Raw> {
        let path = dir.join("raw.json");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let raw: Raw =
            serde_json::from_str(&text).with_context(|| format!("{} is no result of this bench", path.display()))?;
        ensure!(raw.schema == SCHEMA, "{} has schema {}, not {SCHEMA}", path.display(), raw.schema);
        for groups in raw.groups.windows(2) {
            let [one, other] = [&groups[0], &groups[1]].map(|group| (group.row.name(), &group.revision));
            ensure!(one.1 == other.1, "{} mixes revisions: {one:?}, {other:?}", path.display());
        }
        Ok(raw)
    }

    /// The measurements that failed, a line each.
    pub(crate) fn errors(&self) -> impl Iterator<Item = String> + '_ {
        self.samples.iter().filter_map(Sample::error_line)
    }

    /// Writes raw.json, so that at every moment there is a whole one.
    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self)?;
        let (path, new) = (dir.join("raw.json"), dir.join("raw.json.new"));
        fs::write(&new, json + "\n").with_context(|| format!("cannot write {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Whether measurements of this revision on this machine may be added.
    pub(crate) fn accepts(&self, revision: &Revision, machine: &Machine) -> Result<()> {
        for group in &self.groups {
            let found = &group.revision;
            ensure!(found.commit == revision.commit, "its commit is {}, not {}", found.commit, revision.commit);
            ensure!(
                !found.dirty && !revision.dirty,
                "what was measured with changes that are in no commit stands alone"
            );
        }
        ensure!(self.machine.is_same(machine), "it is of another machine, or one of its packages has changed since");
        Ok(())
    }

    pub(crate) fn group(&mut self, row: Row) -> Option<&mut Group> {
        self.groups.iter_mut().find(|group| group.row == row)
    }

    /// Takes the samples of a step out, to measure it anew.
    pub(crate) fn forget(&mut self, step: &Step) {
        self.samples.retain(|sample| sample.case != step.case || sample.placement != step.placement);
    }

    /// The rounds of one figure, summed up. None if it was not measured.
    pub(crate) fn summary(
        &self,
        case: &str,
        contestant: Contestant,
        placement: Placement,
        metric: Metric,
    ) -> Option<Interval> {
        Interval::of(values(&self.samples, case, contestant, placement, metric).into_values().collect())
    }
}

/// What belongs to a case that the bench has. A report that is older than the removal of a case stays readable without it,
/// and without the contestants that took part in nothing else.
fn of_cases<'de, D, C, T>(deserializer: D) -> Result<C, D::Error>
where
    D: Deserializer<'de>,
    C: FromIterator<T>,
    T: DeserializeOwned,
{
    let all = Vec::<Value>::deserialize(deserializer)?;
    let has_case = |value: &Value| CASES.iter().any(|case| value["case"] == case.name);
    all.into_iter().filter(has_case).map(|value| T::deserialize(value).map_err(D::Error::custom)).collect()
}

/// A figure by its rounds.
pub(crate) fn values(
    samples: &[Sample],
    case: &str,
    contestant: Contestant,
    placement: Placement,
    metric: Metric,
) -> BTreeMap<u32, f64> {
    samples
        .iter()
        .filter(|sample| sample.case == case && sample.contestant == contestant && sample.placement == placement)
        .filter_map(|sample| Some((sample.round, *sample.metrics.get(&metric)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(row: Row, commit: &str, dirty: bool) -> Group {
        Group::new(row, &Revision { commit: commit.into(), dirty }, 1, 1.0)
    }

    #[test]
    fn revisions_are_not_mixed() {
        let dir = tempfile::tempdir().unwrap();
        let mut raw = Raw::new(Machine::default());
        raw.groups.push(group(Row::Udp, "a", false));
        let is_accepted = |raw: &Raw, commit: &str, dirty| {
            raw.accepts(&Revision { commit: commit.into(), dirty }, &Machine::default()).is_ok()
        };
        assert!(is_accepted(&raw, "a", false));
        assert!(!is_accepted(&raw, "b", false) && !is_accepted(&raw, "a", true));
        assert!(raw.accepts(&raw.groups[0].revision, &Machine { cpus: 9, ..Machine::default() }).is_err());
        raw.write(dir.path()).unwrap();
        assert_eq!(Raw::read(dir.path()).unwrap().groups[0].revision, raw.groups[0].revision);

        raw.groups[0].revision.dirty = true;
        assert!(!is_accepted(&raw, "a", true), "nobody knows whether the changes are the same");
        raw.groups.push(group(Row::Idle, "b", true));
        raw.write(dir.path()).unwrap();
        let text = format!("{:#}", Raw::read(dir.path()).unwrap_err());
        assert!(text.contains("mixes revisions") && text.contains("idle"), "{text}");
    }

    #[test]
    fn measurements_of_a_case_that_was_removed_are_left_out() {
        let step = |case: &str| serde_json::json!({ "case": case, "placement": "other" });
        let sample = |case: &str, contestant: &str| {
            let [server, client, metrics] = [Value::from(""), Value::from(""), serde_json::json!({})];
            serde_json::json!({
                "case": case, "placement": "other", "contestant": contestant, "round": 0,
                "server_command": server, "client_command": client, "metrics": metrics,
            })
        };
        let mut json =
            serde_json::to_value(Raw { groups: vec![group(Row::Udp, "a", false)], ..Raw::default() }).unwrap();
        json["groups"][0]["done"] = [step("gone"), step("null-tcp-1")].into();
        json["samples"] = [sample("gone", "nobody"), sample("null-tcp-1", "kernel")].into();
        let raw: Raw = serde_json::from_value(json.clone()).unwrap();
        let cases = |samples: &[Sample]| samples.iter().map(|sample| sample.case.clone()).collect::<Vec<_>>();
        assert_eq!((cases(&raw.samples), raw.groups[0].done.len()), (vec!["null-tcp-1".to_owned()], 1));
        // What a case that is there does not have is a mistake.
        json["samples"] = [sample("null-tcp-1", "nobody")].into();
        assert!(serde_json::from_value::<Raw>(json).is_err());
    }

    #[test]
    fn raw_json_is_read_back() {
        let raw = Raw {
            samples: vec![Sample {
                case: "null-tcp-1".into(),
                contestant: Contestant::Kernel,
                placement: Placement::Other,
                round: 0,
                server_command: "ksf krpc2".into(),
                client_command: "ksf rpctest".into(),
                metrics: BTreeMap::from([(Metric::RttP50Us, 3.5)]),
                failures: BTreeMap::new(),
                warnings: Vec::new(),
                error: None,
            }],
            ..Raw::default()
        };
        let text = serde_json::to_string(&raw).unwrap();
        assert!(text.contains(r#""rtt_p50_us":3.5"#), "{text}");
        let back: Raw = serde_json::from_str(&text).unwrap();
        let summary = back.summary("null-tcp-1", Contestant::Kernel, Placement::Other, Metric::RttP50Us);
        assert_eq!(summary.unwrap().median, 3.5);
        assert!(back.summary("null-tcp-1", Contestant::Kernel, Placement::Same, Metric::RttP50Us).is_none());
    }
}
