//! Signals that the broker's objects are incomplete, so that they can be declared again.
//!
//! Declares nothing itself.

use std::sync::Mutex;

use tokio::sync::Notify;

/// Signals that a message was unroutable: its exchange does not exist, or no queue is bound for it.
#[derive(Debug, Default)]
pub struct MissingRoute {
    noted: Notify,
    route: Mutex<Option<String>>,
}

impl MissingRoute {
    /// Wakes the waiting task, or the next one to wait; `route` describes the missing route and replaces a description
    /// that was not read yet.
    pub fn note(&self, route: String) {
        *self.route.lock().expect("no holder panics") = Some(route);
        self.noted.notify_one();
    }

    /// Resolves with the description of a missing route when there is one. Of several waiting tasks, one is told.
    pub async fn noted(&self) -> String {
        self.noted.notified().await;
        self.route.lock().expect("no holder panics").take().unwrap_or_default()
    }
}
