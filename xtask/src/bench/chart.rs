//! A bar chart of one case as SVG: a group of bars for each placement, a bar for each contestant,
//! its median as length and number, and a line over the interval of the median.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::case::{Case, Metric, Placement};
use super::contestant::Contestant;
use super::raw::Raw;
use super::stats::Interval;
use super::vm;

const WIDTH: i32 = 760;
const BAR_HEIGHT: i32 = 18;
const GROUP_GAP: i32 = 30;
const LABEL_WIDTH: i32 = 110;
const NUMBER_WIDTH: i32 = 90;
const FONT: (&str, i32) = ("sans-serif", 13);

const KSF_COLOR: RGBColor = RGBColor(31, 111, 178);
const PEER_COLOR: RGBColor = RGBColor(150, 150, 150);
const SPREAD_COLOR: RGBColor = RGBColor(40, 40, 40);

type Bars = Vec<(Contestant, Interval)>;

/// The chart of the case's own metric, or None if nothing of it was measured.
pub(crate) fn draw(raw: &Raw, case: &Case) -> Result<Option<String>> {
    let groups = groups(raw, case);
    let longest = groups.iter().flat_map(|(_, bars)| bars).map(|(_, bar)| bar.high);
    let Some(longest) = longest.reduce(f64::max).filter(|&longest| longest > 0.0) else {
        return Ok(None);
    };
    let mut svg = String::new();
    draw_groups(&mut svg, &groups, case.metric, longest)
        .map_err(|error| anyhow!("cannot draw {}: {error}", case.name))?;
    Ok(Some(svg))
}

fn groups(raw: &Raw, case: &Case) -> Vec<(Placement, Bars)> {
    let bars = |placement| -> Bars {
        vm::contestants_in(case, placement)
            .into_iter()
            .filter_map(|contestant| Some((contestant, raw.summary(case.name, contestant, placement, case.metric)?)))
            .collect()
    };
    let groups = Placement::ALL.map(|placement| (placement, bars(placement)));
    groups.into_iter().filter(|(_, bars)| !bars.is_empty()).collect()
}

fn draw_groups(
    svg: &mut String,
    groups: &[(Placement, Bars)],
    metric: Metric,
    longest: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let bars: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    let height = bars as i32 * BAR_HEIGHT + groups.len() as i32 * GROUP_GAP + 8;
    let area = SVGBackend::with_string(svg, (WIDTH as u32, height as u32)).into_drawing_area();
    let length = |value: f64| {
        let room = f64::from(WIDTH - LABEL_WIDTH - NUMBER_WIDTH);
        LABEL_WIDTH + (value / longest * room) as i32
    };
    let text = |text: String, (x, y): (i32, i32), side: HPos| {
        let style = FONT.into_font().color(&BLACK).pos(Pos::new(side, VPos::Center));
        area.draw(&Text::new(text, (x, y), style))
    };

    let mut top = 0;
    for (placement, bars) in groups {
        text(placement.to_string(), (LABEL_WIDTH, top + GROUP_GAP - 12), HPos::Left)?;
        top += GROUP_GAP;
        for (contestant, bar) in bars {
            let middle = top + BAR_HEIGHT / 2;
            let color = if contestant.is_ksf() { KSF_COLOR } else { PEER_COLOR };
            let corners = [(LABEL_WIDTH, top + 2), (length(bar.median), top + BAR_HEIGHT - 2)];
            area.draw(&Rectangle::new(corners, color.filled()))?;
            let spread = vec![(length(bar.low), middle), (length(bar.high), middle)];
            area.draw(&PathElement::new(spread, SPREAD_COLOR.stroke_width(2)))?;
            text(contestant.to_string(), (LABEL_WIDTH - 6, middle), HPos::Right)?;
            let number = metric.format(bar.median);
            text(number, (length(bar.high) + 6, middle), HPos::Left)?;
            top += BAR_HEIGHT;
        }
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::case::CASES;
    use super::super::raw::Sample;
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn bars_numbers_and_names_are_in_the_picture() {
        let case = &CASES[0];
        let sample = |contestant, value| Sample {
            case: case.name.into(),
            contestant,
            placement: Placement::Other,
            round: 0,
            server_command: String::new(),
            client_command: String::new(),
            metrics: BTreeMap::from([(case.metric, value)]),
            failures: BTreeMap::new(),
            warnings: Vec::new(),
            error: None,
        };
        let raw =
            Raw { samples: vec![sample(Contestant::Threads, 7.25), sample(Contestant::Kernel, 3.5)], ..Raw::default() };
        let svg = draw(&raw, case).unwrap().unwrap();
        for word in ["<svg", "other CPU", "threads", "kernel", "7.25", "3.50", "#1F6FB2"] {
            assert!(svg.contains(word), "no '{word}' in {svg}");
        }
        assert!(!svg.contains("uring"));
        assert!(draw(&Raw::default(), case).unwrap().is_none());
    }
}
