//! The page's plots as SVG: what falls due in each minute, and how late closes were.
//!
//! Pure. Shapes only; each plot has its text in HTML beside it, so that it stays readable on a phone, and a table of the
//! same figures.

use maud::{Markup, html};

use super::words::{clock, lateness, number};
use crate::observe::last_hour::ClosedMinute;
use crate::operations::forecast::Forecast;

/// Minutes of the plot of what falls due.
const DUE_MINUTES: u32 = 360;
/// Minutes of the plot of lateness.
const LATE_MINUTES: u32 = 60;
/// The height of a plot in its own units.
const HEIGHT: f64 = 100.0;

/// What falls due in each minute, with a line for what can be closed in one.
pub(super) fn due(forecast: &Forecast) -> Markup {
    let most = forecast.minutes.iter().map(|minute| minute.due.orders).max().unwrap_or_default();
    let capacity = forecast.can_close.as_ref().map(|rate| rate.per_minute);
    // A line far above the bars would flatten them.
    let is_near = capacity.is_some_and(|capacity| capacity <= most.saturating_mul(2));
    let top = capacity.filter(|_| is_near).map_or(most, |capacity| capacity.max(most)).max(1);
    let y = |orders: u64| HEIGHT * (1.0 - orders as f64 / top as f64);
    html! {
        div.plot {
            p.scale { "orders a minute, at most " strong { (number(most)) } }
            (framed(&[number(top), String::new(), "0".to_owned()], &html! { svg viewBox=(format!("0 0 {DUE_MINUTES} {HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("Orders due per minute for the next six hours, at most {most}")) {
                @for minute in forecast.minutes.iter().filter(|minute| minute.number < DUE_MINUTES) {
                    // An order is visible, however many others there are.
                    @let height = (HEIGHT - y(minute.due.orders)).max(1.5);
                    rect.due x=(minute.number) y=(format!("{:.2}", HEIGHT - height)) width="1"
                        height=(format!("{height:.2}")) {}
                }
                @if let Some(capacity) = capacity.filter(|_| is_near) {
                    @let y = format!("{:.2}", y(capacity));
                    line.capacity x1="0" x2=(DUE_MINUTES) y1=(y) y2=(y) {}
                }
            } }))
            (axis(&hours(&forecast.at)))
        }
    }
}

/// The clock's time at the beginning and after each of the next hours.
fn hours(at: &str) -> Vec<String> {
    let (hour, minute) = clock(at).split_once(':').unwrap_or(("0", "00"));
    let hour: u32 = hour.parse().unwrap_or_default();
    (0..=DUE_MINUTES / 60).map(|ahead| format!("{:02}:{minute}", (hour + ahead) % 24)).collect()
}

fn axis(labels: &[String]) -> Markup {
    html! { div.axis aria-hidden="true" { @for label in labels { span { (label) } } } }
}

/// A plot with the values of its vertical axis at its left, evenly spaced from the top to the bottom.
fn framed(values: &[String], plot: &Markup) -> Markup {
    html! {
        div.frame {
            div.values aria-hidden="true" { @for value in values { span { (value) } } }
            (plot)
        }
    }
}

/// A tenth of a millisecond at the bottom, and ten times as much at each line above.
fn decade_names(decades: f64) -> Vec<String> {
    let name = |decade: i32| match 10_f64.powi(decade - 1) {
        ms if ms < 1.0 => format!("{ms} ms"),
        ms => lateness(ms).replace(".0 ", " "),
    };
    (0..=decades as i32).rev().map(name).collect()
}

/// How late closes were in each minute of the last hour, on a logarithmic scale, and how many there were by path.
pub(super) fn late(minutes: &[ClosedMinute]) -> Markup {
    let highest = minutes.iter().filter_map(|minute| minute.max_ms).fold(1.0, f64::max);
    let decades = (highest.log10().ceil() + 1.0).max(2.0);
    // From a tenth of a millisecond on.
    let y = |ms: f64| HEIGHT * (1.0 - ((ms.max(0.1).log10() + 1.0) / decades).clamp(0.0, 1.0));
    let lines = [
        ("max", line(minutes, |minute| minute.max_ms, y)),
        ("p99", line(minutes, |minute| minute.p99_ms, y)),
        ("p50", line(minutes, |minute| minute.p50_ms, y)),
    ];
    html! {
        div.plot {
            p.scale { "how late, at most " strong { (lateness(highest)) } "; each line is ten times the one below" }
            (framed(&decade_names(decades), &html! { svg viewBox=(format!("0 0 {LATE_MINUTES} {HEIGHT}")) preserveAspectRatio="none" role="img"
                aria-label=(format!("Lateness of the last hour, at most {}", lateness(highest))) {
                @for decade in 1..decades as u32 {
                    @let y = format!("{:.2}", HEIGHT * (1.0 - f64::from(decade) / decades));
                    line.grid x1="0" x2=(LATE_MINUTES) y1=(y) y2=(y) {}
                }
                @for (name, runs) in &lines {
                    @for run in runs { polyline class=(name) points=(run) {} }
                }
            } }))
            p.scale { "orders closed a minute" }
            @let most = minutes.iter().map(ClosedMinute::closed).max().unwrap_or_default().max(1);
            (framed(&[number(most), "0".to_owned()], &closes(minutes, most)))
            (axis(&["60 min ago", "45", "30", "15", "now"].map(str::to_owned)))
            ul.legend {
                li { span.swatch.p50 {} "half of them (p50)" }
                li { span.swatch.p99 {} "99 of 100 (p99)" }
                li { span.swatch.max {} "the latest" }
                li { span.swatch.alarm {} "closed by alarms" }
                li { span.swatch.look_ahead {} "by reading ahead" }
                li { span.swatch.sweep {} "by the sweep" }
                @if minutes.iter().any(|minute| minute.asked > 0) {
                    li { span.swatch.asked {} "after asking their payment providers (how late is not counted)" }
                }
            }
        }
    }
}

/// A point for each minute, joined where minutes follow one another. A single minute is a short line.
fn line(minutes: &[ClosedMinute], value: impl Fn(&ClosedMinute) -> Option<f64>, y: impl Fn(f64) -> f64) -> Vec<String> {
    let points: Vec<(f64, f64)> = minutes.iter().filter_map(|minute| Some((x(minute), y(value(minute)?)))).collect();
    let runs = points.chunk_by(|one, next| next.0 - one.0 < 1.5);
    let written = |run: &[(f64, f64)]| {
        let ends = run.iter().flat_map(|(x, y)| [(x - 0.3, *y), (x + 0.3, *y)]);
        ends.map(|(x, y)| format!("{x:.2},{y:.2}")).collect::<Vec<_>>().join(" ")
    };
    runs.map(written).collect()
}

/// The middle of the minute.
fn x(minute: &ClosedMinute) -> f64 {
    f64::from(LATE_MINUTES) - minute.minutes_ago as f64 - 0.5
}

/// The closes of a minute by path, each with how many are below it.
fn stacked(minute: &ClosedMinute) -> [(&'static str, u64, u64); 4] {
    let ClosedMinute { alarm, look_ahead, sweep, asked, .. } = *minute;
    [
        ("alarm", 0, alarm),
        ("look_ahead", alarm, look_ahead),
        ("sweep", alarm + look_ahead, sweep),
        ("asked", alarm + look_ahead + sweep, asked),
    ]
}

fn closes(minutes: &[ClosedMinute], most: u64) -> Markup {
    let scaled = |orders: u64| 40.0 * orders as f64 / most as f64;
    html! {
        svg.closes viewBox=(format!("0 0 {LATE_MINUTES} 40")) preserveAspectRatio="none" role="img"
            aria-label=(format!("Closes per minute by path, at most {most}")) {
            @for minute in minutes {
                @let x = format!("{:.2}", x(minute) - 0.4);
                @for (class, below, orders) in stacked(minute) {
                    @let (below, height) = (scaled(below), scaled(orders));
                    rect class=(class) x=(x) width="0.8" y=(format!("{:.2}", (40.0 - below - height).max(0.0)))
                        height=(format!("{height:.2}")) {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minute(minutes_ago: u64, ms: f64) -> ClosedMinute {
        let late = Some(ms);
        ClosedMinute {
            minutes_ago,
            alarm: 5,
            look_ahead: 0,
            sweep: 1,
            asked: 2,
            p50_ms: late,
            p99_ms: late,
            max_ms: late,
        }
    }

    #[test]
    fn lines_are_interrupted_by_empty_minutes() {
        let minutes = [minute(30, 1.0), minute(3, 1.0), minute(2, 10.0)];
        let runs = line(&minutes, |minute| minute.p50_ms, |ms| ms);
        assert_eq!(runs, ["29.20,1.00 29.80,1.00", "56.20,1.00 56.80,1.00 57.20,10.00 57.80,10.00"]);
    }

    #[test]
    fn plots_stay_within_their_frame() {
        for ms in [0.01, 1.0, 999.0, 86_400e3] {
            let text = late(&[minute(59, 0.1), minute(0, ms)]).into_string();
            assert!(!text.contains("NaN") && !text.contains("\"-") && !text.contains(",-"), "{text}");
        }
        assert!(late(&[]).into_string().contains("at most"));
    }

    #[test]
    fn lateness_has_units() {
        assert_eq!(decade_names(6.0), ["1m 40s", "10 s", "1 s", "100 ms", "10 ms", "1 ms", "0.1 ms"]);
    }

    #[test]
    fn axis_goes_over_midnight() {
        assert_eq!(hours("2026-11-20T20:07:00Z"), ["20:07", "21:07", "22:07", "23:07", "00:07", "01:07", "02:07"]);
    }
}
