//! Server-sent events: the first page's sections and tabs, whenever they were read anew.
//!
//! Bounded in number and in time; a browser that was cut off comes back by itself.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::super::Attended;
use super::super::api::Problem;
use super::super::site::{Shared, View};
use super::layout::tabs;
use super::status::rendered;
use crate::operations::status::Status;

/// Then the browser connects again; a dead one does not.
const LONGEST_STREAM: Duration = Duration::from_secs(600);
/// How often the page is known to be still open.
const TURN: Duration = Duration::from_secs(10);

/// One open stream.
struct Following {
    shared: Arc<Shared>,
    views: watch::Receiver<Option<Arc<View>>>,
    _one_of_few: OwnedSemaphorePermit,
}

pub(super) async fn stream(
    State(shared): State<Arc<Shared>>,
    Extension(attended): Extension<Arc<Attended>>,
) -> Response {
    let Ok(permit) = shared.streams.clone().try_acquire_owned() else {
        return Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too many pages are open; close one").into_response();
    };
    attended.extend(LONGEST_STREAM);
    let mut views = shared.feed.follow();
    views.mark_changed();
    let following = Following { shared, views, _one_of_few: permit };
    Sse::new(stream::unfold(following, next)).into_response()
}

/// The next event. One without news is a comment, so that a connection that is gone is noticed.
async fn next(mut following: Following) -> Option<(Result<Event, Infallible>, Following)> {
    following.shared.feed.want();
    let event = match tokio::time::timeout(TURN, following.views.changed()).await {
        Ok(Ok(())) => {
            let view = following.views.borrow_and_update().clone();
            let status = view.as_ref().and_then(|view| view.status.as_ref().ok());
            let tabs = tabs("Status", &status.map(Status::waiting).unwrap_or_default()).into_string();
            Event::default().event("sections").data(rendered(&following.shared, view.as_deref()).to_string() + &tabs)
        }
        Ok(Err(_)) => return None,
        Err(_) => Event::default().comment("still here"),
    };
    Some((Ok(event), following))
}
