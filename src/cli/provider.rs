//! `order-timeout provider ask`: what a payment provider says of one payment, and what the worker makes of it.
//!
//! Read only: asks, and never cancels.

use anyhow::Context;
use clap::{Args, Subcommand};
use order_timeout_core::payment::{Answer, Attempt, MAX_REFERENCE_BYTES, Money};
use order_timeout_providers::{Providers, ProvidersSettings};
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;

/// What is done with a provider.
#[derive(Debug, Subcommand)]
pub enum ProviderCommand {
    /// Ask what became of a payment; exit code 1 if the provider gives no answer
    Ask(AskArgs),
}

/// Arguments of `provider ask`.
#[derive(Debug, Args)]
pub struct AskArgs {
    /// The provider, as [providers.NAME] and payment_attempts.provider have it
    #[arg(value_name = "NAME")]
    name: String,
    /// What the provider calls the payment, as payment_attempts.reference has it
    #[arg(value_name = "REFERENCE")]
    reference: String,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What mistakes in the settings look like.
const MISTAKES: &str = "a wrong key is refused with HTTP 401 or 403; a key of another mode or account does not know the payment; a wrong address gives no connection, or an answer that is not the provider's";

const WRONG_USAGE: u8 = 2;

/// # Errors
/// If the provider's keys cannot be read. Exit code 2 for a name that is in no settings.
pub async fn run(ProviderCommand::Ask(args): ProviderCommand, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let wrong = |why: String| {
        let mut output = CommandOutcome { code: WRONG_USAGE, ..CommandOutcome::default() };
        output.remark(why);
        Ok(output)
    };
    let Some(own) = settings.providers.0.get(&args.name) else {
        let names: Vec<_> = settings.providers.0.keys().map(String::as_str).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return wrong(format!("there is no provider {:?} in the settings, which have {names}", args.name));
    };
    if !(1..=MAX_REFERENCE_BYTES).contains(&args.reference.len()) {
        return wrong(format!("a reference has 1 to {MAX_REFERENCE_BYTES} bytes; write it as payment_attempts has it"));
    }
    let url = own.url();
    let providers = Providers::new(&ProvidersSettings([(args.name.clone(), own.clone())].into()))?;
    let provider = providers.get(&args.name).context("it is in the settings")?;
    let attempt = Attempt { provider: args.name, reference: args.reference, money: Money::NOTHING };
    let answer = provider.ask(&attempt).await;
    let mut output =
        CommandOutcome { code: u8::from(matches!(answer, Answer::Unknown(_))), ..CommandOutcome::default() };
    let (money, why) = match &answer {
        Answer::Paid { money } => (*money, None),
        Answer::Unknown(unknown) => (None, Some(unknown.why.as_str())),
        _ => (None, None),
    };
    if args.json {
        output.line(json!({
            "provider": attempt.provider, "reference": attempt.reference, "url": url, "answer": answer.as_str(),
            "amount_minor": money.map(|money| money.amount_minor), "currency": money.map(|money| money.currency.to_string()),
            "why": why, "means": means(&answer),
        }));
        return Ok(output);
    }
    let paid = money.map_or_else(String::new, |money| format!(" {money}"));
    output.line(format!(
        "{} at {url}, asked about {}: {}{paid}",
        attempt.provider,
        attempt.reference,
        answer.as_str().replace('_', " ")
    ));
    output.indented(why.unwrap_or(means(&answer)));
    if why.is_some() {
        output.indented(means(&answer));
        output.indented(MISTAKES);
    }
    Ok(output)
}

fn means(answer: &Answer) -> &'static str {
    match answer {
        Answer::Paid { .. } => {
            "the money was taken, or is held for the shop: a due order is settled as paid, if the amount is its attempt's"
        }
        Answer::Open => {
            "the customer can still pay: at the deadline it is cancelled, and the order closed if the provider confirms that"
        }
        Answer::InProgress => {
            "the customer is paying: a due order waits once (closing.in_progress_wait), and then it is cancelled"
        }
        Answer::Pending => "a bank decides, which may take days: a due order waits for it, with its stock",
        Answer::Closed => "it was not paid and cannot be paid any more: a due order is closed",
        Answer::Refunded => {
            "it was paid and given back: a due order is unresolved, and a person must find the missing step"
        }
        Answer::Absent => {
            "the provider knows no such payment: a due order is closed one minute after its attempt's payable_until"
        }
        Answer::Forgotten { .. } => {
            "the provider knows no such payment: either it has forgotten one that was not paid, and a due order is closed, or the attempt is younger than what it forgets, and the key is one of another account"
        }
        Answer::Unknown(_) => {
            "nothing follows: a due order is asked about again, and is unresolved after closing.max_rounds"
        }
    }
}
