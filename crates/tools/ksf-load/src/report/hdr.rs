//! HdrHistogram files: `.hgrm` percentiles as text, or an interval log (V2, compressed) with one line per run.
//!
//! The interval log is in nanoseconds, the text in microseconds.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::{IntervalLogWriterBuilder, IntervalLogWriterError, Tag};

use crate::record::Latencies;

/// Reporting levels per halving of the distance to 100 %, as HdrHistogram's own tools use.
const TICKS_PER_HALF: u32 = 5;

/// Whether the name asks for text.
pub(crate) fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "hgrm")
}

/// The percentile distribution of all runs together, as HistogramLogProcessor prints it.
pub(crate) fn write_text(out: &mut impl Write, latencies: &Latencies) -> io::Result<()> {
    let histogram = &latencies.histogram;
    writeln!(out, "{:>12} {:>14} {:>10} {:>14}", "Value", "Percentile", "TotalCount", "1/(1-Percentile)")?;
    writeln!(out)?;
    for step in histogram.iter_quantiles(TICKS_PER_HALF) {
        let value = step.value_iterated_to() as f64 / 1e3;
        let quantile = step.quantile_iterated_to();
        let count = histogram.count_between(0, step.value_iterated_to());
        match quantile < 1.0 {
            true => writeln!(out, "{value:12.3} {quantile:14.12} {count:10} {:14.2}", 1.0 / (1.0 - quantile))?,
            false => writeln!(out, "{value:12.3} {quantile:14.12} {count:10}")?,
        }
    }
    let (mean, stdev) = match latencies.is_empty() {
        true => (0.0, 0.0),
        false => (histogram.mean() / 1e3, histogram.stdev() / 1e3),
    };
    writeln!(out, "#[Mean    = {mean:12.3}, StdDeviation   = {stdev:12.3}]")?;
    writeln!(out, "#[Max     = {:12.3}, Total count    = {:12}]", latencies.max_ns as f64 / 1e3, latencies.count())?;
    writeln!(
        out,
        "#[Buckets = {:12}, SubBuckets     = {:12}]",
        histogram.buckets(),
        // Three significant digits need 2048 sub-buckets (2 * 10^3, rounded up to a power of two).
        2048
    )
}

/// An interval log that grows by one line per run, so that an endless measurement neither keeps its runs in memory
/// nor loses them when it is killed.
pub(crate) struct IntervalLog<W> {
    out: W,
    serializer: V2DeflateSerializer,
}

impl<W: Write> IntervalLog<W> {
    /// Writes the head of the log.
    pub(crate) fn new(mut out: W, title: &str, started_unix_s: f64) -> io::Result<IntervalLog<W>> {
        let mut serializer = V2DeflateSerializer::new();
        IntervalLogWriterBuilder::new()
            .add_comment(title)
            .add_comment("values and Interval_Max are nanoseconds")
            .with_start_time(UNIX_EPOCH + seconds(started_unix_s))
            .begin_log_with(&mut out, &mut serializer)?;
        out.flush()?;
        Ok(IntervalLog { out, serializer })
    }

    /// Adds a run.
    pub(crate) fn add(&mut self, started_unix_s: f64, wall_s: f64, latencies: &Latencies) -> io::Result<()> {
        IntervalLogWriterBuilder::new()
            .begin_log_with(&mut self.out, &mut self.serializer)?
            .write_histogram(&latencies.histogram, seconds(started_unix_s), seconds(wall_s), None::<Tag<'_>>)
            .map_err(|error| match error {
                IntervalLogWriterError::IoError(error) => error,
                other => io::Error::other(other.to_string()),
            })?;
        self.out.flush()
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    fn latencies() -> Latencies {
        let mut latencies = Latencies::new();
        for us in 1..=1000 {
            latencies.record(us * 1000);
        }
        latencies
    }

    #[test]
    fn the_text_has_the_percentiles_and_the_totals() {
        let mut out = Vec::new();
        write_text(&mut out, &latencies()).unwrap();
        let text = String::from_utf8(out).unwrap();
        let rows: Vec<Vec<f64>> = text
            .lines()
            .skip(2)
            .take_while(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(|cell| cell.parse().unwrap()).collect())
            .collect();
        let median = rows.iter().find(|row| row[1] >= 0.5).unwrap();
        assert!((median[0] - 500.0).abs() < 1.0, "{text}");
        assert_eq!(median[2], 500.0);
        assert_eq!(median[3], 2.0);
        let last = rows.last().unwrap();
        assert_eq!((last[1], last[2], last.len()), (1.0, 1000.0, 3));
        assert!(text.contains("#[Max     =     1000.000, Total count    =         1000]"), "{text}");
    }

    #[test]
    fn the_log_reads_back() {
        let mut out = Vec::new();
        let mut log = IntervalLog::new(&mut out, "rpctest localhost", 1000.0).unwrap();
        log.add(1000.0, 2.5, &latencies()).unwrap();
        log.add(1003.0, 2.5, &latencies()).unwrap();
        assert!(String::from_utf8(out.clone()).unwrap().starts_with("#rpctest localhost\n"));
        let mut intervals = Vec::new();
        for entry in IntervalLogIterator::new(&out) {
            if let LogEntry::Interval(interval) = entry.unwrap() {
                intervals.push(interval);
            }
        }
        assert_eq!(intervals.len(), 2);
        assert_eq!(intervals[1].start_timestamp().as_secs(), 1003);
        assert_eq!(intervals[1].duration().as_millis(), 2500);
        assert!((intervals[0].max() / 1e6 - 1.0).abs() < 1e-3);
        // Decode the histogram of the second line and compare it with what went in.
        let bytes = decode_base64(intervals[1].encoded_histogram());
        let back: hdrhistogram::Histogram<u64> = Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
        assert_eq!(back, latencies().histogram);
    }

    /// RFC 4648, section 4. Only for the test: the crate that hdrhistogram uses is not ours to depend on.
    fn decode_base64(text: &str) -> Vec<u8> {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let (mut bytes, mut buffer, mut bits) = (Vec::new(), 0u32, 0);
        for letter in text.bytes().filter(|letter| *letter != b'=') {
            let value = ALPHABET.iter().position(|a| *a == letter).unwrap() as u32;
            buffer = buffer << 6 | value;
            bits += 6;
            if bits >= 8 {
                bits -= 8;
                bytes.push((buffer >> bits) as u8);
            }
        }
        bytes
    }
}
