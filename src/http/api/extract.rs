//! What the API's handlers take out of a request: parameters, a body, and the right to change something. What is wrong
//! with one is a [`Problem`].
//!
//! Reads requests; calls no operation.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Query};
use axum::http::request::Parts;

use super::super::Peer;
use super::super::site::{Shared, authorize};
use super::Problem;

/// A query string.
#[derive(Debug, FromRequestParts)]
#[from_request(via(Query), rejection(Problem))]
pub(super) struct Parameters<T>(pub T);

/// An id in the path.
#[derive(Debug, FromRequestParts)]
#[from_request(via(Path), rejection(Problem))]
pub(super) struct InPath<T>(pub T);

/// A JSON body.
#[derive(Debug, FromRequest)]
#[from_request(via(Json), rejection(Problem))]
pub(super) struct Body<T>(pub T);

/// The request has the token. It is compared before the body is read, so that nothing is kept for other clients, and
/// nothing is told to them about the body's form.
#[derive(Debug)]
pub(super) struct WithToken(pub Arc<Shared>);

impl FromRequestParts<Arc<Shared>> for WithToken {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, shared: &Arc<Shared>) -> Result<Self, Problem> {
        // The listener gives each request its peer; without one, all would count as one address.
        let unknown = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let from = parts.extensions.get().map_or(unknown, |Peer(peer)| peer.ip());
        authorize(shared, &parts.headers, from)?;
        Ok(Self(shared.clone()))
    }
}
