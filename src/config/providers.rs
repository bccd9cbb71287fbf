//! Which payment providers the orders of a kind are asked about at, and the limits of the closing protocol.
//!
//! Reads and checks settings alone; keys are read from their files when the worker starts.

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout_core::InvalidSetting;
use order_timeout_core::engine::ClosingPolicy;
use order_timeout_core::kind::Kind;
use order_timeout_providers::ProvidersSettings;
use order_timeout_providers::settings::LimitsSettings;

use super::kinds::{Fault, KindSettings, OrdersOf};
use super::{Settings, SettingsError};

/// More orders than this of one provider are never in a worker at a time, however much the provider allows: they wait in
/// the database as well as in memory.
const MOST_ORDERS_OF_PROVIDER: u64 = 10_000;
/// Calls about an order at a provider: ask and cancel, of up to two requests each.
const REQUESTS_OF_ORDER: u64 = 4;
/// How often a worker looks for orders that another one has left.
const RESUME_EVERY: Duration = Duration::from_secs(1);
/// A lease is renewed when a third is over, so it need not outlast the calls. What a worker leaves that was killed waits for so
/// long, and for a look.
const LEASE: Duration = Duration::from_secs(20);

/// So many that a call of the last of them gets its turn within `queue_timeout`.
fn orders_of_provider(limits: &LimitsSettings) -> usize {
    let orders = u64::from(limits.requests_per_s) * limits.queue_timeout.as_millis() as u64 / 1_000 / REQUESTS_OF_ORDER;
    usize::try_from(orders.clamp(1, MOST_ORDERS_OF_PROVIDER)).unwrap_or(usize::MAX)
}

impl Settings {
    /// The names of the providers that are asked before an order of this kind is closed; none if it is closed at once.
    #[must_use]
    pub fn providers_of(&self, kind: &Kind) -> &[String] {
        self.kinds.get(kind).map_or(&[], |settings| &settings.providers)
    }

    /// Whether a worker with these settings asks a provider about some of its orders.
    #[must_use]
    pub fn asks_providers(&self) -> bool {
        self.served_kinds().iter().any(|kind| !self.providers_of(kind).is_empty())
    }

    /// The providers of this kind, by name.
    #[must_use]
    pub fn provider_settings_of(&self, kind: &Kind) -> ProvidersSettings {
        let named = self.providers_of(kind).iter();
        let found = named.filter_map(|name| Some((name.clone(), self.providers.0.get(name)?.clone())));
        ProvidersSettings(found.collect())
    }

    /// The limits of the closing protocol; `None` if no provider is asked about orders of this kind.
    #[must_use]
    pub fn closing_policy(&self, kind: &Kind) -> Option<ClosingPolicy> {
        let providers = self.provider_settings_of(kind);
        if providers.0.is_empty() {
            return None;
        }
        let mut queues: BTreeMap<String, usize> =
            providers.0.iter().map(|(name, settings)| (name.clone(), orders_of_provider(settings.limits()))).collect();
        queues.insert(String::new(), self.worker.batch_size);
        Some(ClosingPolicy {
            queues,
            lease: LEASE,
            resume_every: RESUME_EVERY,
            in_progress_wait: self.closing.in_progress_wait,
            retry_first: self.closing.retry_first,
            retry_longest: self.closing.retry_longest,
            max_rounds: self.closing.max_rounds,
            batch_size: self.worker.batch_size,
        })
    }

    /// Checks the providers, and the limits of the closing protocol.
    pub(super) fn validate_closing(&self) -> Result<(), SettingsError> {
        self.providers.validate()?;
        let closing = &self.closing;
        let (least, most) = (Duration::from_millis(10), Duration::from_secs(86_400));
        InvalidSetting::within("closing.in_progress_wait", closing.in_progress_wait, least, most)?;
        InvalidSetting::within("closing.retry_first", closing.retry_first, least, closing.retry_longest)?;
        InvalidSetting::within("closing.retry_longest", closing.retry_longest, least, most)?;
        Ok(InvalidSetting::between("closing.max_rounds", closing.max_rounds, 1, 1_000)?)
    }

    pub(super) fn validate_providers_of(&self, kind: &Kind, settings: &KindSettings) -> Result<(), Fault> {
        if settings.providers.is_empty() {
            return Ok(());
        }
        for (index, name) in settings.providers.iter().enumerate() {
            let why = if settings.providers[..index].contains(name) {
                format!("{name:?} is named twice; name it once")
            } else if !self.providers.0.contains_key(name) {
                format!("there is no provider {name:?}; add [providers.{name}], or correct the name")
            } else {
                continue;
            };
            return Err(("providers".into(), why));
        }
        let why = match self.orders_of(kind) {
            Some(OrdersOf::Table(table)) if table.pay.is_some() => return Ok(()),
            Some(OrdersOf::Table(_)) => {
                "is given, but the table's pay is not; write what a paid order's columns are set to, because a provider may say that an order is paid"
            }
            _ => {
                "is only for orders in the default tables or in a mapped table; ask the provider in a service of yours and leave it out"
            }
        };
        Err(("providers".into(), why.into()))
    }
}

#[cfg(test)]
mod tests {
    use order_timeout_providers::settings::{HttpSettings, ProviderSettings};

    use super::*;

    fn policy(limits: &[(&str, LimitsSettings)]) -> ClosingPolicy {
        let mut settings = Settings::defaults();
        for (name, limits) in limits {
            let http = HttpSettings {
                url: "http://127.0.0.1:1".into(),
                bearer_token_file: None,
                hmac_key_file: None,
                ca_file: None,
                limits: limits.clone(),
            };
            settings.providers.0.insert((*name).to_owned(), ProviderSettings::Http(http));
            settings.kinds.entry(Kind::ORDER).or_default().providers.push((*name).to_owned());
        }
        settings.closing_policy(&Kind::ORDER).unwrap()
    }

    #[test]
    fn limits_of_one_provider_leave_others() {
        let slow = LimitsSettings {
            requests_per_s: 1,
            queue_timeout: Duration::from_secs(3_600),
            ..LimitsSettings::default()
        };
        let card = || ("card", LimitsSettings::default());
        let (alone, both) = (policy(&[card()]), policy(&[card(), ("bank", slow)]));
        assert_eq!((alone.queues["card"], both.queues["card"]), (150, 150));
        assert_eq!((alone.lease, both.lease), (LEASE, LEASE));
        assert!(LEASE <= Duration::from_secs(25), "another worker goes on within 30 s");
    }
}
