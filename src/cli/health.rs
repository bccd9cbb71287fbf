//! `order-timeout health`: checks the worker on this machine; exit code 0 if it is healthy. Images need no other
//! client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use clap::Args;

use crate::cli::{CommandOutcome, UsageError};
use crate::config::Settings;
use crate::http::{self, CLOSINGZ, LIVEZ, READYZ};

/// Shorter than the usual timeouts of orchestrators; a healthy worker answers at once.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Arguments of `health`.
#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Check whether its loops make progress, instead of whether it is ready
    #[arg(long)]
    live: bool,
    /// Check whether orders are closed: closing is not paused, and the database is usable
    #[arg(long, conflicts_with = "live")]
    closing: bool,
}

/// # Errors
/// If no worker answers, or `http.listen` names no address to ask.
pub async fn run(args: &HealthArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let listen = settings
        .http
        .listen
        .0
        .ok_or_else(|| UsageError::of("http.listen is empty, so no worker can be asked; set it to its address"))?;
    if listen.port() == 0 {
        return Err(UsageError::of("http.listen leaves the port open, so no worker can be asked; set it to its port"));
    }
    let path = match args {
        HealthArgs { live: true, .. } => LIVEZ,
        HealthArgs { closing: true, .. } => CLOSINGZ,
        _ => READYZ,
    };
    let (status, text) = http::get(from_here(listen), path, TIMEOUT).await?;
    let mut outcome = CommandOutcome { code: u8::from(status != 200), ..CommandOutcome::default() };
    // Another program may be listening there, so the text is not trusted.
    outcome.lines(text);
    Ok(outcome)
}

/// A worker that listens at every address of this machine is asked through loopback.
fn from_here(mut listen: SocketAddr) -> SocketAddr {
    if listen.ip().is_unspecified() {
        let own = if listen.is_ipv4() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { Ipv6Addr::LOCALHOST.into() };
        listen.set_ip(own);
    }
    listen
}
