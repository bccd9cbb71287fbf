//! The connection of a publisher's channels: opened when it is needed, reopened when it is broken.
//!
//! Publishes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection};
use tokio::sync::Mutex;

use super::PublishError;
use super::error::closed;
use super::missing_route::MissingRoute;
use crate::AmqpSettings;
use crate::connect::{self, BrokerError};

/// The connection that the channels share; reopened when it is broken.
#[derive(Debug)]
pub(super) struct SharedConnection {
    pub(super) settings: AmqpSettings,
    name: &'static str,
    current: Mutex<Option<Arc<Connection>>>,
    pub(super) missing_route: Arc<MissingRoute>,
    /// When the broker last confirmed a message, on any channel.
    last_confirm: std::sync::Mutex<Option<Instant>>,
}

impl SharedConnection {
    pub(super) fn new(settings: &AmqpSettings, name: &'static str) -> Self {
        Self {
            settings: settings.clone(),
            name,
            current: Mutex::new(None),
            missing_route: Arc::default(),
            last_confirm: std::sync::Mutex::default(),
        }
    }

    /// The broker has confirmed a message.
    pub(super) fn note_confirm(&self) {
        *self.last_confirm.lock().expect("no holder panics") = Some(Instant::now());
    }

    /// How long ago the broker last confirmed a message.
    pub(super) fn last_confirm(&self) -> Option<Duration> {
        self.last_confirm.lock().expect("no holder panics").map(|at| at.elapsed())
    }

    pub(super) async fn connection(&self) -> Result<Arc<Connection>, BrokerError> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| connection.status().connected()) {
            return Ok(connection.clone());
        }
        let connection = Arc::new(connect::connect(&self.settings, self.name).await?);
        *current = Some(connection.clone());
        Ok(connection)
    }

    /// The same, unless the broker reads nothing from it at present.
    pub(super) async fn usable_connection(&self) -> Result<Arc<Connection>, PublishError> {
        let connection = self.connection().await.map_err(PublishError::NotConnected)?;
        if connection.status().blocked() { Err(PublishError::Blocked) } else { Ok(connection) }
    }

    pub(super) async fn open_channel(&self) -> Result<(Arc<Connection>, Channel), PublishError> {
        let connection = self.usable_connection().await?;
        let opening = async {
            let channel = connection.create_channel().await.map_err(|error| closed(&error))?;
            channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(|error| closed(&error))?;
            Ok(channel)
        };
        let timeout = self.settings.confirm_timeout;
        let channel = tokio::time::timeout(timeout, opening).await.map_err(|_| PublishError::TimedOut(timeout))??;
        Ok((connection, channel))
    }
}
