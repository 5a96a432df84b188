//! The raw results: what raw.json holds, and medians of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::case::{Case, Metric, Placement};
use super::contestant::Contestant;
use crate::machine::Origin;

/// Everything that a run of the bench found. Field names are the schema of raw.json.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Raw {
    /// Version of this schema.
    pub(crate) schema: u32,
    pub(crate) origin: Origin,
    /// Measurements of each contestant, case and placement.
    pub(crate) runs: u32,
    /// Wanted length of one measurement.
    pub(crate) seconds: f64,
    pub(crate) samples: Vec<Sample>,
    /// What was left out, and why.
    pub(crate) skipped: Vec<String>,
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

/// Median and spread of one figure over the rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Sample {
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
    /// The rounds of one figure, summed up. None if it was not measured.
    pub(crate) fn summary(
        &self,
        case: &str,
        contestant: Contestant,
        placement: Placement,
        metric: Metric,
    ) -> Option<Summary> {
        let values = self
            .samples
            .iter()
            .filter(|sample| sample.case == case && sample.contestant == contestant && sample.placement == placement)
            .filter_map(|sample| sample.metrics.get(&metric).copied());
        Summary::of(values.collect())
    }
}

impl Summary {
    fn of(mut values: Vec<f64>) -> Option<Summary> {
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Some(Summary { median, min, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let odd = Summary::of(vec![5.0, 1.0, 3.0]).unwrap();
        assert_eq!(odd, Summary { median: 3.0, min: 1.0, max: 5.0 });
        let even = Summary::of(vec![4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!(even, Summary { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Summary::of(vec![]), None);
    }

    #[test]
    fn raw_json_is_read_back() {
        let raw = Raw {
            schema: 1,
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
