//! The kinds whose engines run in this worker, and where each is told what is found for all of them.
//!
//! Forwards; decides nothing. A kind that could not start yet is not among them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use order_timeout_core::engine::{Input, Share};
use order_timeout_core::kind::Kind;
use tokio::sync::mpsc;

use super::broker_inspections::BrokerInput;
use crate::deliver::DeclaredAgain;

/// Cheap to clone: all clones know the same kinds.
#[derive(Debug, Clone, Default)]
pub(super) struct ActiveKinds(Arc<Mutex<BTreeMap<Kind, ToKind>>>);

/// The channels to one kind.
#[derive(Debug)]
pub(super) struct ToKind {
    pub inputs: mpsc::UnboundedSender<Input>,
    pub broker_inspections: mpsc::UnboundedSender<BrokerInput>,
}

impl ActiveKinds {
    pub fn add(&self, kind: Kind, channels: ToKind) {
        self.known().insert(kind, channels);
    }

    pub fn names(&self) -> BTreeSet<Kind> {
        self.known().keys().cloned().collect()
    }

    /// Tells a kind's engine the share of the orders that it reads ahead.
    pub fn tell_share(&self, kind: &Kind, share: Share) {
        if let Some(to) = self.known().get(kind) {
            // Without the event loop the input is not needed.
            let _ = to.inputs.send(Input::ShareChanged(share));
        }
    }

    /// Tells each kind's inspections what was declared again: the shared objects, and its own.
    pub fn tell_declared(&self, what: &str, declared: &DeclaredAgain) {
        for (kind, to) in self.known().iter() {
            let of_kind = match declared {
                Ok(of_kinds) => of_kinds.get(kind).cloned().unwrap_or(Ok(())),
                Err(shared) => Err(shared.clone()),
            };
            // The receiver may have ended with the worker's stop.
            let _ = to.broker_inspections.send(BrokerInput::DeclaredAgain(what.to_owned(), of_kind));
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<Kind, ToKind>> {
        self.0.lock().expect("no holder panics")
    }
}
