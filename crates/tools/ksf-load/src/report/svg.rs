//! A plot of latency by percentile: the x axis stretches towards 100 %, so that the tail can be read.

use std::io::Write;
use std::path::Path;

use plotters::prelude::*;

use crate::error::LoadError;
use crate::record::Latencies;
use crate::report::raw::create;

const SIZE: (u32, u32) = (1000, 600);

/// Draws one curve into a file.
pub(crate) fn write_file(path: &Path, title: &str, latencies: &Latencies) -> Result<(), LoadError> {
    let text = draw(title, latencies);
    create(path, |out| out.write_all(text.as_bytes()))
}

/// The plot as SVG text.
pub(crate) fn draw(title: &str, latencies: &Latencies) -> String {
    let mut text = String::new();
    if let Err(error) = draw_into(&mut text, title, latencies) {
        // The backend writes to memory, so this is about the plot itself; an empty picture with the reason
        // is better than no results.
        text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"40\"><text x=\"8\" y=\"24\">{}</text></svg>\n",
            SIZE.0,
            escape(&error)
        );
    }
    text
}

fn draw_into(text: &mut String, title: &str, latencies: &Latencies) -> Result<(), String> {
    let points = curve(latencies);
    let x_max = points.last().map_or(10.0, |(x, _)| x.max(10.0));
    let y_max = points.iter().map(|(_, y)| *y).fold(f64::MIN_POSITIVE, f64::max);
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    let explain = |error: &dyn std::fmt::Display| format!("cannot plot: {error}");
    area.fill(&WHITE).map_err(|e| explain(&e))?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(80)
        .build_cartesian_2d((1.0..x_max).log_scale(), 0.0..y_max * 1.05)
        .map_err(|e| explain(&e))?;
    chart
        .configure_mesh()
        .x_desc("percentile")
        .y_desc("latency (us)")
        .x_label_formatter(&|x| percent_label(*x))
        .draw()
        .map_err(|e| explain(&e))?;
    chart.draw_series(LineSeries::new(points, BLUE.stroke_width(2))).map_err(|e| explain(&e))?;
    area.present().map_err(|e| explain(&e))
}

/// Points (1 / (1 - quantile), latency in us). The last one is the maximum, at the distance its rank has from 100 %.
fn curve(latencies: &Latencies) -> Vec<(f64, f64)> {
    let count = latencies.count().max(1) as f64;
    latencies
        .histogram
        .iter_quantiles(20)
        .map(|step| {
            let x = match step.quantile_iterated_to() {
                quantile if quantile < 1.0 => (1.0 / (1.0 - quantile)).min(count),
                _ => count,
            };
            let us = step.value_iterated_to().min(latencies.max_ns) as f64 / 1e3;
            (x, us)
        })
        .collect()
}

/// 1 is 0 %, 10 is 90 %, 1000 is 99.9 %.
fn percent_label(x: f64) -> String {
    let percent = 100.0 * (1.0 - 1.0 / x.max(1.0));
    let decimals = (x.log10().round() as usize).saturating_sub(2);
    format!("{percent:.decimals$} %")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_name_the_percentiles() {
        let labels: Vec<_> = [1.0, 10.0, 100.0, 1000.0, 10_000.0].map(percent_label).into();
        assert_eq!(labels, ["0 %", "90 %", "99 %", "99.9 %", "99.99 %"]);
    }

    #[test]
    fn the_curve_rises_to_the_maximum() {
        let mut latencies = Latencies::new();
        for us in 1..=5000u64 {
            latencies.record(us * 1000);
        }
        let points = curve(&latencies);
        assert!(points.windows(2).all(|p| p[0].0 <= p[1].0 && p[0].1 <= p[1].1));
        assert_eq!(points.last(), Some(&(5000.0, 5000.0)));
    }

    #[test]
    fn the_plot_is_svg_with_title_and_line_even_when_empty() {
        let mut latencies = Latencies::new();
        let empty = draw("nothing", &latencies);
        assert!(empty.starts_with("<svg") && empty.contains("nothing"), "{empty}");
        for us in 1..=100u64 {
            latencies.record(us * 1000);
        }
        let plot = draw("a & b", &latencies);
        assert!(plot.starts_with("<svg") && plot.trim_end().ends_with("</svg>"));
        assert!(plot.contains("<polyline") && plot.contains("90 %") && plot.contains("latency (us)"));
        assert!(!plot.contains("a & b"), "the title is escaped");
    }
}
