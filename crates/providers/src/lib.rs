//! Payment providers of [order-timeout](https://github.com/order-timeout/order-timeout): each is asked what became of one
//! attempt to pay, and told to close it, and gives one of the [`Answer`]s of the core.
//!
//! May use an HTTP client and signing libraries, and the core's types; not lapin, not sqlx. It decides nothing about an
//! order: what an answer means for it is the engine's decision. Every documented answer of a provider is a row of its
//! table ([`tables`]); any other answer is [`Answer::Unknown`]. [`webhook`] has the same client, and sends events.

mod adyen;
mod alipay;
mod breaker;
mod call_error;
mod client;
mod http;
mod limited;
mod local_clock;
mod money;
mod paypal;
mod protocol;
mod rate;
mod retry_after;
mod rsa;
mod secret_file;
pub mod settings;
mod strict_json;
mod stripe;
pub mod table;
pub mod webhook;
mod wechat;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use order_timeout_core::InvalidSetting;
pub use order_timeout_core::payment::{Answer, Attempt};

use crate::limited::LimitedProvider;
pub use crate::settings::{ProviderSettings, ProvidersSettings};
use crate::table::Table;

/// A call under way. It ends within `queue_timeout` and
/// [`LimitsSettings::longest_call`](settings::LimitsSettings::longest_call).
pub type Pending<'a> = Pin<Box<dyn Future<Output = Answer> + Send + 'a>>;

/// A question whose answer is known, under way: why its keys or its address are wrong.
pub type Trial<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// What the limits of a provider have done so far, and what they do now; for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// The circuit breaker has opened, and no call has succeeded since.
    pub breaker_is_open: bool,
    /// Calls that wait for their turn.
    pub waiting: usize,
    /// Calls that were not made because the circuit breaker was open.
    pub refused_by_breaker: u64,
    /// Calls that were not made because their turn did not come in time.
    pub refused_by_queue: u64,
}

/// A payment provider. Both calls may be repeated at any time, also after a crash between them, and never panic. Each
/// ends within the time that the settings give it; a call that is dropped before has no other effect than one whose
/// answer was lost. Neither tries again by itself: the caller knows when the order is worth another try.
pub trait Provider: Send + Sync {
    /// Asks what became of the attempt, and changes nothing.
    fn ask<'a>(&'a self, attempt: &'a Attempt) -> Pending<'a>;

    /// Asks the provider to take no payment for this attempt any more. The answer is the verdict: an attempt that was paid
    /// in the meantime is [`Answer::Paid`].
    fn cancel<'a>(&'a self, attempt: &'a Attempt) -> Pending<'a>;

    /// Asks about a payment that cannot exist, which any key of the right provider may.
    fn try_keys(&self) -> Trial<'_>;

    /// What its limits do.
    fn load(&self) -> Load;
}

/// The providers of the settings, by name.
#[derive(Clone, Default)]
pub struct Providers(BTreeMap<String, Arc<dyn Provider>>);

impl Providers {
    /// Reads the keys and prepares the clients. Opens no connection.
    ///
    /// # Errors
    /// [`InvalidSetting`] for the first setting that is invalid, or whose file cannot be used.
    pub fn new(settings: &ProvidersSettings) -> Result<Self, InvalidSetting> {
        settings.validate()?;
        let providers = settings.0.iter().map(|(name, settings)| Ok((name.clone(), provider(name, settings)?)));
        providers.collect::<Result<_, _>>().map(Self)
    }

    /// The provider of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Provider>> {
        self.0.get(name)
    }

    /// What the limits of each provider do, by name.
    pub fn loads(&self) -> impl Iterator<Item = (&str, Load)> {
        self.0.iter().map(|(name, provider)| (name.as_str(), provider.load()))
    }

    /// The names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

fn provider(name: &str, settings: &ProviderSettings) -> Result<Arc<dyn Provider>, InvalidSetting> {
    let section = settings::section(name);
    let limits = settings.limits();
    Ok(match settings {
        ProviderSettings::Http(own) => Arc::new(LimitedProvider::new(name, http::Http::new(&section, own)?, limits)),
        ProviderSettings::Stripe(own) => {
            Arc::new(LimitedProvider::new(name, stripe::Stripe::new(&section, own)?, limits))
        }
        ProviderSettings::Wechat(own) => {
            Arc::new(LimitedProvider::new(name, wechat::Wechat::new(&section, own)?, limits))
        }
        ProviderSettings::Alipay(own) => {
            Arc::new(LimitedProvider::new(name, alipay::Alipay::new(&section, own)?, limits))
        }
        ProviderSettings::Paypal(own) => {
            Arc::new(LimitedProvider::new(name, paypal::Paypal::new(&section, own)?, limits))
        }
        ProviderSettings::Adyen(own) => Arc::new(LimitedProvider::new(name, adyen::Adyen::new(&section, own)?, limits)),
    })
}

/// The table of each kind of provider, which the code decides by. `docs/PROVIDERS.md` shows them.
#[must_use]
pub fn tables() -> [&'static Table; 6] {
    [&http::TABLE, &stripe::TABLE, &wechat::TABLE, &alipay::TABLE, &paypal::TABLE, &adyen::TABLE]
}
