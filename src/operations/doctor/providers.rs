//! The payment providers: each is reached with its keys, and knows the payments that customers are making now.
//!
//! Changes nothing: asks about a payment that cannot exist, and about the newest attempt of an unpaid order.

use futures_util::future::join_all;
use order_timeout_core::payment::{Answer, Attempt};
use order_timeout_core::problem::{Cause, Problem};
use order_timeout_providers::{Provider, Providers};

use super::check::Checks;
use super::server;
use crate::config::Settings;
use crate::postgres::Database;

pub(super) async fn examine(settings: &Settings, database: Option<&Database>, checks: &mut Checks) {
    let providers = match Providers::new(&settings.providers) {
        Ok(providers) => providers,
        Err(fault) => return checks.error(unusable("a provider", &fault.to_string())),
    };
    let newest = match database {
        Some(database) => server::newest_attempts(database).await,
        None => Vec::new(),
    };
    let tried = providers.names().filter_map(|name| Some((name, providers.get(name)?)));
    let faults = join_all(tried.map(|(name, provider)| {
        let newest = newest.iter().find(|attempt| attempt.provider == name);
        async move { try_keys(&**provider, newest).await.map_err(|why| unusable(name, &why)) }
    }));
    faults.await.into_iter().filter_map(Result::err).for_each(|problem| checks.error(problem));
}

async fn try_keys(provider: &dyn Provider, newest: Option<&Attempt>) -> Result<(), String> {
    provider.try_keys().await?;
    let Some(attempt) = newest else { return Ok(()) };
    match provider.ask(attempt).await {
        Answer::Unknown(unknown) => Err(format!("asked about {}: {}", attempt.reference, unknown.why)),
        Answer::Forgotten { .. } => {
            Err(format!("it does not know {}, so its key is one of another account", attempt.reference))
        }
        _ => Ok(()),
    }
}

fn unusable(name: &str, why: &str) -> Problem {
    Problem::new(
        Cause::ProviderAway,
        format!("{name} cannot be asked about payments: {why}"),
        format!("correct providers.{name}, and try it with `order-timeout provider ask {name} REFERENCE`"),
    )
    .because("its orders are not closed: they end as unresolved, with their stock reserved")
}
