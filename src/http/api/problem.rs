//! Errors of the API: `application/problem+json` (RFC 9457), with one sentence that names the fix.
//!
//! Renders; decides nothing.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::super::site::{Denied, SourceError};
use crate::operations::forecast::ForecastError;
use crate::operations::late_payments::ReopenError;
use crate::operations::parked::ParkedError;
use crate::operations::pause_closing::PauseError;
use crate::operations::unresolved::DecisionError;
use crate::postgres::DatabaseError;
use crate::sanitize;

/// An error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(in crate::http) struct Problem {
    /// The HTTP status.
    pub status: u16,
    /// The status in words.
    pub title: String,
    /// One sentence that names the fix.
    pub detail: String,
}

impl Problem {
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        let title = status.canonical_reason().unwrap_or_default().to_owned();
        Self { status: status.as_u16(), title, detail: detail.into() }
    }

    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let shown = Self { detail: sanitize::one_line(&self.detail).into_owned(), ..self };
        let mut response = (status, Json(shown)).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Denied> for Problem {
    fn from(denied: Denied) -> Self {
        let why = denied.to_string();
        match denied {
            Denied::ReadOnly => Self::new(StatusCode::FORBIDDEN, why),
            Denied::WrongToken => Self::new(StatusCode::UNAUTHORIZED, why),
        }
    }
}

impl From<DatabaseError> for Problem {
    fn from(error: DatabaseError) -> Self {
        Self::unavailable(error.to_string())
    }
}

impl From<SourceError> for Problem {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::NoKind { .. } => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            SourceError::Database(error) => error.into(),
        }
    }
}

impl From<PauseError> for Problem {
    fn from(error: PauseError) -> Self {
        match error {
            PauseError::UnknownKind(..) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            PauseError::IsPaused(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            PauseError::Database(error) => error.into(),
        }
    }
}

impl From<ParkedError> for Problem {
    fn from(error: ParkedError) -> Self {
        match error {
            ParkedError::Gone(_) => Self::new(StatusCode::NOT_FOUND, error.to_string()),
            ParkedError::Database(error) => error.into(),
        }
    }
}

impl From<ReopenError> for Problem {
    fn from(error: ReopenError) -> Self {
        match error {
            ReopenError::Database(_) => Self::unavailable(error.to_string()),
            _ => Self::new(StatusCode::CONFLICT, error.to_string()),
        }
    }
}

impl From<DecisionError> for Problem {
    fn from(error: DecisionError) -> Self {
        match error {
            DecisionError::Database(_) => Self::unavailable(error.to_string()),
            _ => Self::new(StatusCode::CONFLICT, error.to_string()),
        }
    }
}

impl From<ForecastError> for Problem {
    fn from(error: ForecastError) -> Self {
        let status = match error {
            ForecastError::Unknown(_) => StatusCode::SERVICE_UNAVAILABLE,
            ForecastError::Reach(_) => StatusCode::BAD_REQUEST,
            ForecastError::Place(_) => StatusCode::NOT_FOUND,
            ForecastError::EmptyWindow { .. } => StatusCode::CONFLICT,
        };
        Self::new(status, error.to_string())
    }
}

impl From<QueryRejection> for Problem {
    fn from(fault: QueryRejection) -> Self {
        Self::bad_request(format!("{}; docs/openapi.yaml lists the parameters", fault.body_text()))
    }
}

impl From<PathRejection> for Problem {
    fn from(fault: PathRejection) -> Self {
        Self::bad_request(format!("{}; percent-encode the id", fault.body_text()))
    }
}

impl From<JsonRejection> for Problem {
    fn from(fault: JsonRejection) -> Self {
        // JSON of another form is refused like any other value that does not fit.
        let status = Some(fault.status()).filter(|status| *status != StatusCode::UNPROCESSABLE_ENTITY);
        let why = format!("{}; docs/openapi.yaml describes the body", fault.body_text());
        Self::new(status.unwrap_or(StatusCode::BAD_REQUEST), why)
    }
}
