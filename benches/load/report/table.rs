//! Figures as a readable table.

use serde_json::Value;

use crate::bench_env::ledger::millis;
use crate::measurement::Figures;

pub fn print_contestants(candidates: &[Figures]) {
    let width = candidates.iter().map(|figures| figures.name.len()).max().unwrap_or(0);
    println!(
        "{:width$} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>9} {:>9}",
        "", "closed", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "closed/s", "CPU s", "PG CPU s", "peak MiB"
    );
    for figures in candidates {
        let late = &figures.ledger.lateness_us;
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|quantile| millis(late.value_at_quantile(quantile)));
        println!(
            "{:width$} {:>8} {p50:>9.2} {p99:>9.2} {p999:>9.2} {:>9.2} {:>9.0} {:>7.2} {:>9.2} {:>9.1}",
            figures.name,
            figures.ledger.closed,
            millis(late.max()),
            figures.ledger.closed_per_s(),
            figures.cpu_s,
            figures.postgres_cpu_s,
            figures.peak_rss_mib
        );
    }
}

/// A name and a value per line.
pub fn print_rows<'a>(rows: impl Iterator<Item = (&'a String, &'a Value)>) {
    for (key, value) in rows {
        println!("{key:<34} {value}");
    }
}
