//! A database with all migrations, which each environment copies: applying them takes several times as long as copying.
//!
//! One for each test process, and one with a clock that moves, dropped when no environment is left. Only on the server that the environment variables
//! name: a private server has one environment, for which a template saves nothing.

use order_timeout::Settings;
use order_timeout::config::DatabaseSettings;
use order_timeout::postgres::{self, DatabaseError, test_clock};
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::{execute_on_server, is_on_private_database};

/// How many environments need this process's template, which exists if any does: without the clock for tests, and with it.
static USERS: [Mutex<Users>; 2] = [const { Mutex::const_new(Users { count: 0, database: String::new() }) }; 2];

struct Users {
    count: usize,
    /// The template's database.
    database: String,
}

/// One environment's need of the template.
pub(crate) struct Template {
    /// `None` on a private server.
    database: Option<String>,
    /// Whether its clock can be moved.
    has_clock: bool,
}

impl Template {
    /// Creates the template for its first user. [`Self::release`] must follow.
    pub(crate) async fn acquire(settings: &Settings, has_clock: bool) -> Self {
        if is_on_private_database(settings) {
            return Self { database: None, has_clock };
        }
        let mut users = USERS[usize::from(has_clock)].lock().await;
        if users.count == 0 {
            users.database = create(settings, has_clock).await;
        }
        users.count += 1;
        Self { database: Some(users.database.clone()), has_clock }
    }

    /// Creates the database that these settings name, with all migrations.
    pub(crate) async fn create_database(&self, name: &str, settings: &Settings) {
        match &self.database {
            Some(template) => {
                execute_on_server(settings, format!("CREATE DATABASE {name} TEMPLATE {template}")).await;
                if self.has_clock {
                    // Also a copy needs it, for the sessions of the test.
                    test_clock::create(&settings.database).await.unwrap();
                }
            }
            None => {
                execute_on_server(settings, format!("CREATE DATABASE {name}")).await;
                set_up(&settings.database, self.has_clock).await.unwrap();
            }
        }
    }

    /// Drops the template after its last user.
    pub(crate) async fn release(self, settings: Settings) {
        let Some(template) = self.database else { return };
        let mut users = USERS[usize::from(self.has_clock)].lock().await;
        users.count -= 1;
        if users.count == 0 {
            execute_on_server(&settings, format!("DROP DATABASE {template} WITH (FORCE)")).await;
        }
    }
}

/// Creates the template, or leaves nothing behind.
async fn create(settings: &Settings, has_clock: bool) -> String {
    let name = format!("order_timeout_template_{}", Uuid::now_v7().simple());
    execute_on_server(settings, format!("CREATE DATABASE {name}")).await;
    // Not the first test's timeouts.
    let mut database = Settings::load(None, &[]).unwrap().database;
    database.url = database.url_of(&name);
    if let Err(error) = set_up(&database, has_clock).await {
        execute_on_server(settings, format!("DROP DATABASE {name} WITH (FORCE)")).await;
        panic!("{error}");
    }
    name
}

async fn set_up(settings: &DatabaseSettings, has_clock: bool) -> Result<(), DatabaseError> {
    if has_clock {
        test_clock::create(settings).await?;
    }
    postgres::migrate(settings).await.map(drop)
}
