//! Lateness as a chart: one panel per candidate, all with the same logarithmic axis, so that they can be compared.

use std::path::Path;

use hdrhistogram::Histogram;
use plotters::prelude::*;

/// A name, and its lateness in microseconds.
pub type Series<'a> = (&'a str, &'a Histogram<u64>);

/// Bars per tenfold of lateness.
const BARS_PER_DECADE: f64 = 12.0;
const PANEL: (u32, u32) = (900, 190);
const BAR_COLOUR: RGBColor = RGBColor(47, 111, 179);

pub fn draw(path: &Path, title: &str, series: &[Series<'_>]) -> anyhow::Result<()> {
    let panels = u32::try_from(series.len())?;
    let root = SVGBackend::new(path, (PANEL.0, 40 + PANEL.1 * panels)).into_drawing_area();
    root.fill(&WHITE)?;
    let area = root.titled(&format!("{title}: commit after the deadline, ms"), ("sans-serif", 20))?;
    let longest_us = series.iter().map(|(_, late)| late.max()).max().unwrap_or(1);
    let axis_ms = 0.1..(longest_us as f64 / 1_000.0).max(1.0) * 1.3;
    for (panel, series) in area.split_evenly((series.len(), 1)).iter().zip(series) {
        draw_panel(panel, series, axis_ms.clone())?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(
    panel: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    (name, late): &Series<'_>,
    axis_ms: std::ops::Range<f64>,
) -> anyhow::Result<()> {
    let bars = bars(late, axis_ms.start);
    let highest = bars.iter().map(|bar| bar.2).max().unwrap_or(1);
    let ms = |quantile| late.value_at_quantile(quantile) as f64 / 1_000.0;
    let caption = format!("{name}: p50 {:.1}, p99 {:.1}, max {:.1}", ms(0.5), ms(0.99), late.max() as f64 / 1_000.0);
    let mut chart = ChartBuilder::on(panel)
        .caption(caption, ("sans-serif", 14))
        .margin(6)
        .x_label_area_size(22)
        .y_label_area_size(56)
        .build_cartesian_2d(axis_ms.log_scale(), 0..highest + highest / 10 + 1)?;
    chart.configure_mesh().disable_x_mesh().y_labels(4).draw()?;
    let boxes = bars.iter().map(|(from, to, count)| Rectangle::new([(*from, 0), (*to, *count)], BAR_COLOUR.filled()));
    chart.draw_series(boxes)?;
    Ok(())
}

/// From, to (in milliseconds) and count; values below the axis are in the first bar.
fn bars(late: &Histogram<u64>, shortest_ms: f64) -> Vec<(f64, f64, u64)> {
    let edge_ms = |index: f64| shortest_ms * 10_f64.powf(index / BARS_PER_DECADE);
    let mut counts: Vec<u64> = Vec::new();
    for step in late.iter_recorded() {
        let ms = step.value_iterated_to() as f64 / 1_000.0;
        let index = ((ms / shortest_ms).log10() * BARS_PER_DECADE).floor().max(0.0) as usize;
        counts.resize(counts.len().max(index + 1), 0);
        counts[index] += step.count_at_value();
    }
    let bar = |(index, count): (usize, u64)| (edge_ms(index as f64), edge_ms(index as f64 + 1.0), count);
    counts.into_iter().enumerate().map(bar).collect()
}
