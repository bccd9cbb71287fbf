//! Which rows of a list an operator has chosen.
//!
//! Reads no row.

use uuid::Uuid;

/// A choice of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection<Id = Uuid> {
    /// All of them.
    All,
    /// Those that are there for this reason.
    Reason(String),
    /// Those with these keys.
    Ids(Vec<Id>),
}

impl<Id> Selection<Id> {
    /// The reason, if it is one of a reason.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Reason(reason) => Some(reason),
            Self::All | Self::Ids(_) => None,
        }
    }

    /// The keys, if it is one of keys.
    #[must_use]
    pub fn ids(&self) -> Option<&[Id]> {
        match self {
            Self::Ids(ids) => Some(ids),
            Self::All | Self::Reason(_) => None,
        }
    }
}
