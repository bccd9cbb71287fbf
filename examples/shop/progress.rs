//! Three progress bars: created, paid, closed. They have no effect on the run.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::plan::Plan;

/// Cheap to clone; all clones draw the same bars.
#[derive(Debug, Clone)]
pub struct Progress {
    created: ProgressBar,
    paid: ProgressBar,
    closed: ProgressBar,
}

impl Progress {
    pub fn new(plan: &Plan, shown: bool) -> Self {
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bars = MultiProgress::with_draw_target(target);
        let bar = |name: &'static str, length: usize| {
            let bar = bars.add(ProgressBar::new(length as u64).with_prefix(name));
            // The template is a constant; if it were wrong, the default would do.
            if let Ok(style) = ProgressStyle::with_template("  {prefix:<8} {bar:40} {pos:>6} of {len}") {
                bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
            }
            bar
        };
        let (orders, payers) = (plan.customers.len(), plan.payers());
        Self { created: bar("created", orders), paid: bar("paid", payers), closed: bar("closed", orders - payers) }
    }

    pub fn created(&self) {
        self.created.inc(1);
    }

    pub fn paid(&self) {
        self.paid.inc(1);
    }

    /// A payment lost the race: one order fewer will be paid, one more closed.
    pub fn too_late(&self) {
        self.paid.set_length(self.paid.length().unwrap_or(1).saturating_sub(1));
        self.closed.inc_length(1);
    }

    pub fn closed(&self) {
        self.closed.inc(1);
    }

    /// Leaves the bars where they are.
    pub fn finish(&self) {
        for bar in [&self.created, &self.paid, &self.closed] {
            bar.abandon();
        }
    }
}
