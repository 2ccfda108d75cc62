//! Errors as problem documents (RFC 9457).

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// An error of a request, or of the host.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, ToSchema)]
pub struct Problem {
    /// Always `about:blank`: `status` has the kind.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Text of the status.
    pub title: &'static str,
    /// Status, as in the response.
    pub status: u16,
    /// One line: cause and help.
    pub detail: String,
}

impl Problem {
    /// Creates a problem with this status.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: detail.into(),
        }
    }

    /// Creates a problem for a malformed request.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Creates a problem for a failure of the host.
    pub fn internal(error: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let kind = [(header::CONTENT_TYPE, "application/problem+json")];
        let body = serde_json::to_vec(&self).unwrap_or_default();
        (status, kind, body).into_response()
    }
}
