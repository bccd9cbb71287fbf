//! The orders that wait for one of the three statements, and when each is tried.
//!
//! Pure bookkeeping. One statement of each kind runs at a time: what arrives meanwhile is the next batch.

use std::collections::{BTreeMap, BTreeSet};

use super::EndingKind;
use crate::order::{OrderId, Timestamp};

#[derive(Debug, Default)]
pub(super) struct EndQueue {
    waiting: [Waiting; 3],
    /// Where each order waits.
    places: BTreeMap<OrderId, (EndingKind, Timestamp)>,
}

/// The orders of one statement.
#[derive(Debug, Default)]
struct Waiting {
    orders: BTreeSet<(Timestamp, OrderId)>,
    is_running: bool,
}

impl EndQueue {
    pub const KINDS: [EndingKind; 3] = [EndingKind::SettlePaid, EndingKind::Close, EndingKind::Postpone];

    fn of(&mut self, kind: EndingKind) -> &mut Waiting {
        &mut self.waiting[kind as usize]
    }

    /// The order waits for this statement, in the place of the one that it waited for.
    pub fn put(&mut self, kind: EndingKind, id: OrderId, at: Timestamp) {
        self.remove(&id);
        self.of(kind).orders.insert((at, id.clone()));
        self.places.insert(id, (kind, at));
    }

    pub fn remove(&mut self, id: &OrderId) {
        if let Some((kind, at)) = self.places.remove(id) {
            self.of(kind).orders.remove(&(at, id.clone()));
        }
    }

    /// The orders of the next statement; none while one of this kind is running.
    pub fn take(&mut self, kind: EndingKind, most: usize, now: Timestamp) -> Vec<OrderId> {
        let waiting = self.of(kind);
        let mut ids = Vec::new();
        while !waiting.is_running && ids.len() < most && waiting.orders.first().is_some_and(|(at, _)| *at <= now) {
            ids.extend(waiting.orders.pop_first().map(|(_, id)| id));
        }
        waiting.is_running |= !ids.is_empty();
        for id in &ids {
            self.places.remove(id);
        }
        ids
    }

    /// The statement of this kind has ended.
    pub fn finished(&mut self, kind: EndingKind) {
        self.of(kind).is_running = false;
    }

    /// When the next statement of this kind can run; `None` while one is running.
    pub fn ready_at(&self, kind: EndingKind) -> Option<Timestamp> {
        let waiting = Some(&self.waiting[kind as usize]).filter(|waiting| !waiting.is_running);
        waiting.and_then(|waiting| waiting.orders.first()).map(|(at, _)| *at)
    }

    /// Every pause ends now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        let places: Vec<_> = self.places.iter().map(|(id, (kind, _))| (*kind, id.clone())).collect();
        places.into_iter().for_each(|(kind, id)| self.put(kind, id, now));
    }
}
