//! Alarms that wait to be published again: those that wait for their deadlines before retries, of which a flood may have many.
//!
//! Pure bookkeeping. No operation but dropping a session looks at all of them: behind a flood they are tens of thousands.

use std::collections::VecDeque;

use crate::alarm::{Rearm, Wanted};

#[derive(Debug, Default)]
pub(super) struct RearmQueue {
    alarms: VecDeque<Rearm>,
    retries: VecDeque<Rearm>,
}

impl RearmQueue {
    pub fn push(&mut self, rearm: Rearm) {
        match rearm.wanted {
            Wanted::NotBefore(_) => self.retries.push_back(rearm),
            Wanted::AtOnce | Wanted::BeforeDeadline => self.alarms.push_back(rearm),
        }
    }

    /// Keeps those that came in this session or a later one.
    pub fn keep_from(&mut self, session: u64) {
        [&mut self.alarms, &mut self.retries]
            .into_iter()
            .for_each(|queue| queue.retain(|rearm| rearm.receipt.session >= session));
    }

    pub fn take(&mut self, most: usize) -> Vec<Rearm> {
        let alarms = self.alarms.len().min(most);
        let retries = self.retries.len().min(most - alarms);
        self.alarms.drain(..alarms).chain(self.retries.drain(..retries)).collect()
    }
}
