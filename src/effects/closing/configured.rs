//! The payment providers of the settings, behind the crate `order-timeout-providers`; and which of them is not asked at
//! the moment.
//!
//! Sends nothing itself, and retries nothing.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Answer, Attempt, Unknown};
use order_timeout_providers::{Load, Provider, ProvidersSettings};

use super::{AnswerFuture, Providers};

/// So long after the last call that was not made, a provider counts as healthy: no order waits for it any more.
const SICK_FOR: Duration = Duration::from_secs(900);

/// The providers of one kind.
pub struct ConfiguredProviders {
    providers: order_timeout_providers::Providers,
    /// Providers whose last call was not made, since when, and why.
    sick: Mutex<BTreeMap<String, (Instant, String)>>,
}

impl ConfiguredProviders {
    /// Reads the keys and prepares the clients. Opens no connection.
    ///
    /// # Errors
    /// [`InvalidSetting`] names the setting or the file that cannot be used.
    pub fn new(settings: &ProvidersSettings) -> Result<Self, InvalidSetting> {
        Ok(Self { providers: order_timeout_providers::Providers::new(settings)?, sick: Mutex::default() })
    }

    fn note(&self, provider: &str, answer: &Answer) {
        let mut sick = self.sick.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Answer::Unknown(Unknown { was_asked: false, why, .. }) => {
                sick.insert(provider.to_owned(), (Instant::now(), why.clone()));
            }
            // It was asked, and that may be the one call that tests it.
            Answer::Unknown(_) => {}
            _ => drop(sick.remove(provider)),
        }
    }

    async fn answer<'a>(
        &'a self,
        attempt: &'a Attempt,
        call: impl FnOnce(&'a dyn Provider) -> order_timeout_providers::Pending<'a>,
    ) -> Answer {
        let name = &attempt.provider;
        let Some(provider) = self.providers.get(name) else {
            let why = format!("this worker's settings name no provider {name}; add it to kinds.order.providers");
            return Answer::Unknown(Unknown { why, retry_after: None, was_asked: false });
        };
        let answer = call(&**provider).await;
        self.note(name, &answer);
        answer
    }
}

impl Providers for ConfiguredProviders {
    fn ask<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a> {
        Box::pin(self.answer(attempt, |provider| provider.ask(attempt)))
    }

    fn cancel<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a> {
        Box::pin(self.answer(attempt, |provider| provider.cancel(attempt)))
    }

    fn sick(&self) -> Option<String> {
        let mut sick = self.sick.lock().unwrap_or_else(PoisonError::into_inner);
        sick.retain(|_, (since, _)| since.elapsed() < SICK_FOR);
        sick.values().next().map(|(_, why)| format!("orders wait, with their stock reserved, for {why}"))
    }

    fn loads(&self) -> Vec<(String, Load)> {
        self.providers.loads().map(|(name, load)| (name.to_owned(), load)).collect()
    }
}
