//! The action PARK: stores dead letters in `parked_alarms`, counts and logs them.
//!
//! A delivery is acknowledged only after its row is committed: what is reported as parked is committed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use order_timeout_core::alarm::{DeadLetter, ParkReason, Receipt};
use order_timeout_core::order::OrderId;
use tracing::{debug, warn};

use crate::observe::logging::LogThrottle;
use crate::observe::recorder::KindRecorder;
use crate::postgres::{Database, ErrorClass, classify, one_line, parked_alarms};

/// A dead letter, and the receipt of its delivery.
pub(super) type Addressed = (DeadLetter, Receipt);

/// The result of parking dead letters.
#[derive(Default)]
pub(super) struct ParkResult {
    pub(super) parked: Vec<Receipt>,
    /// The database rejects their rows.
    pub(super) refused: Vec<Addressed>,
    /// The database is unavailable.
    pub(super) failed: Vec<Addressed>,
}

/// Parks all together, or one by one if the database rejects a row, so that the others are parked.
pub(super) async fn park_all(to: &Parking, dead_letters: Vec<Addressed>) -> ParkResult {
    let mut result = ParkResult::default();
    let mut alone = match park_together(to, dead_letters, &mut result).await {
        Ok(()) => return result,
        Err(dead_letters) => dead_letters.into_iter(),
    };
    while let Some(dead_letter) = alone.next() {
        if let Err(refused) = park_together(to, vec![dead_letter], &mut result).await {
            result.refused.extend(refused);
        } else if !result.failed.is_empty() {
            result.failed.extend(alone);
            break;
        }
    }
    result
}

/// Parks all by one statement.
///
/// # Errors
/// The dead letters, at least one of which is rejected.
async fn park_together(
    to: &Parking,
    dead_letters: Vec<Addressed>,
    result: &mut ParkResult,
) -> Result<(), Vec<Addressed>> {
    let contents: Vec<&DeadLetter> = dead_letters.iter().map(|(dead_letter, _)| dead_letter).collect();
    let Err(error) = parked_alarms::insert(&to.database, &contents).await else {
        to.note_parked(&contents);
        result.parked.extend(dead_letters.into_iter().map(|(_, receipt)| receipt));
        return Ok(());
    };
    let alarms = dead_letters.len();
    if classify(&error) != ErrorClass::Data || alarms == 1 {
        warn!(error = one_line(&error), alarms, "alarms could not be parked; they stay unacknowledged and are retried");
    }
    if classify(&error) == ErrorClass::Data {
        return Err(dead_letters);
    }
    result.failed.extend(dead_letters);
    Ok(())
}

/// Parks dead letters, counts and logs them.
pub(super) struct Parking {
    pub(super) database: Database,
    pub(super) recorder: KindRecorder,
    pub(super) said: Arc<Mutex<ParkedWarnings>>,
}

impl Parking {
    fn note_parked(&self, dead_letters: &[&DeadLetter]) {
        let mut said = self.said.lock().expect("no holder panics");
        for dead_letter in dead_letters {
            self.recorder.metrics.alarms_parked.with_label_values(&[dead_letter.reason.as_str()]).inc();
            let order_id = dead_letter.order_id.as_ref().map_or("", OrderId::as_str);
            debug!(order_id, reason = dead_letter.reason.as_str(), detail = %dead_letter.detail, "alarm parked");
            said.note(dead_letter);
        }
        said.log_due();
    }
}

/// What was parked since it was last logged, by reason: a flood of invalid messages must not become a flood of log lines.
#[derive(Debug, Default)]
pub(crate) struct ParkedWarnings {
    by_reason: HashMap<ParkReason, ParkedWarning>,
}

#[derive(Debug, Default)]
struct ParkedWarning {
    alarms: u64,
    /// An example: the order's id and the detail.
    example: (String, String),
    said: LogThrottle,
}

impl ParkedWarnings {
    fn note(&mut self, dead_letter: &DeadLetter) {
        let warning = self.by_reason.entry(dead_letter.reason).or_default();
        if warning.alarms == 0 {
            let order_id = dead_letter.order_id.as_ref().map_or("", OrderId::as_str);
            warning.example = (order_id.to_owned(), dead_letter.detail.clone());
        }
        warning.alarms += 1;
    }

    /// Logs at once, and then at most once a minute for each reason.
    pub fn log_due(&mut self) {
        for (reason, warning) in &mut self.by_reason {
            if warning.alarms > 0 && warning.said.is_due() {
                let (alarms, (order_id, detail)) = (std::mem::take(&mut warning.alarms), &warning.example);
                warn!(alarms, reason = reason.as_str(), order_id, detail, "alarms parked, this one among them");
            }
        }
    }
}
