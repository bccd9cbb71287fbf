//! The status for the page, refreshed in the background while a page is open, so that however many pages are open and however
//! large the table is, a page is rendered from memory.
//!
//! Reads through the operations; decides nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use order_timeout_core::kind::Kind;
use tokio::sync::{Notify, watch};

use super::sources::{LazySources, Sources};
use crate::give_way::GiveWay;
use crate::operations::forecast::{self, Forecast};
use crate::operations::orders_table::OrdersTable;
use crate::operations::reminders::{self, SentReminders};
use crate::operations::status::{Status, Waiting, status};

/// How often an open page changes.
const REFRESH_EVERY: Duration = Duration::from_secs(2);
/// The forecast reads every order that falls due within hours.
const FORECAST_EVERY: Duration = Duration::from_secs(15);
/// And takes at most a tenth of the time.
const FORECAST_SHARE: u32 = 10;
/// A page that was not asked for again within this time is closed.
const INTEREST: Duration = Duration::from_secs(30);
/// A status that is older is not shown as the present.
const STALE: Duration = Duration::from_secs(8);
/// How long the first page waits for the first status.
const FIRST_WAIT: Duration = Duration::from_secs(3);
/// How long any other page waits for it, for the counts at its tabs.
const TABS_WAIT: Duration = Duration::from_millis(300);

/// What was last read.
#[derive(Debug)]
pub(in crate::http) struct View {
    /// When it was read.
    pub read_at: Instant,
    /// The state, or why it cannot be read.
    pub status: Result<Status, String>,
    /// What falls due of each kind, or why that cannot be read; none until it was counted once.
    pub forecasts: Forecasts,
    /// The reminders of the last hour, or why they cannot be read; `None` until they were read once.
    pub reminders: Option<Reminders>,
    /// Rendered once, however many pages show it.
    pub rendered: OnceLock<Arc<str>>,
}

/// The reminders of the last hour.
pub(in crate::http) type Reminders = Result<Arc<Vec<SentReminders>>, String>;

/// What falls due, by kind.
pub(in crate::http) type Forecasts = BTreeMap<Kind, Result<Arc<Forecast>, String>>;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(in crate::http) struct StatusFeed {
    views: Arc<watch::Sender<Option<Arc<View>>>>,
    asked: Arc<watch::Sender<Option<Instant>>>,
    wanted: Arc<Notify>,
}

impl StatusFeed {
    pub fn new() -> Self {
        let (views, asked) = (Arc::new(watch::Sender::new(None)), Arc::new(watch::Sender::new(None)));
        Self { views, asked, wanted: Arc::default() }
    }

    /// Keeps the status fresh for a while.
    pub fn want(&self) {
        self.asked.send_replace(Some(Instant::now()));
        self.wanted.notify_one();
    }

    /// The views from now on; `None` before the first.
    pub fn follow(&self) -> watch::Receiver<Option<Arc<View>>> {
        self.want();
        self.views.subscribe()
    }

    /// The present state. `None` if there is none within a few seconds.
    pub async fn view(&self) -> Option<Arc<View>> {
        self.view_within(FIRST_WAIT).await
    }

    /// How much waits for a person, and the database's time: nothing and no time where that is not known soon.
    pub async fn waiting(&self) -> (Waiting, String) {
        let view = self.view_within(TABS_WAIT).await;
        let status = view.as_ref().and_then(|view| view.status.as_ref().ok());
        status.map(|status| (status.waiting(), status.at.clone())).unwrap_or_default()
    }

    async fn view_within(&self, wait: Duration) -> Option<Arc<View>> {
        let mut views = self.follow();
        let is_fresh = |view: &Option<Arc<View>>| view.as_ref().is_some_and(|view| view.read_at.elapsed() < STALE);
        let fresh = tokio::time::timeout(wait, views.wait_for(is_fresh)).await;
        fresh.ok()?.ok()?.clone()
    }

    fn is_wanted(&self) -> bool {
        self.asked.borrow().is_some_and(|asked| asked.elapsed() < INTEREST)
    }
}

/// Refreshes the status while it is wanted, until it is dropped.
pub(super) async fn refresh(feed: StatusFeed, sources: Arc<LazySources>, mut give_way: GiveWay) {
    let mut next_forecast = Instant::now();
    let (mut forecasts, mut reminders) = (Forecasts::new(), None);
    loop {
        while !feed.is_wanted() {
            feed.wanted.notified().await;
        }
        let show = |status, forecasts, reminders| {
            let view = View { read_at: Instant::now(), status, forecasts, reminders, rendered: OnceLock::new() };
            feed.views.send_replace(Some(Arc::new(view)));
        };
        match sources.get().await {
            Err(why) => show(Err(why.to_string()), forecasts.clone(), reminders.clone()),
            Ok(sources) => {
                let orders = sources.all_orders().await;
                let read = status(&sources.database, &orders).await.map_err(|error| error.to_string());
                let is_up = read.is_ok();
                show(read.clone(), forecasts.clone(), reminders.clone());
                if is_up && next_forecast <= Instant::now() {
                    let began = Instant::now();
                    for (kind, table) in orders {
                        forecasts.insert(kind, count(sources, table).await);
                    }
                    reminders = Some(read_reminders(sources).await);
                    show(read, forecasts.clone(), reminders.clone());
                    next_forecast = Instant::now() + FORECAST_EVERY.max(FORECAST_SHARE * began.elapsed());
                }
            }
        }
        // A burst of closes needs the same database; two seconds later the page is as good.
        give_way.due(tokio::time::Instant::now() + REFRESH_EVERY).await;
    }
}

async fn read_reminders(sources: &Sources) -> Reminders {
    let sent = reminders::sent_in_last_hour(&sources.database).await;
    sent.map(Arc::new).map_err(|error| error.to_string())
}

async fn count(sources: &Sources, table: Result<&OrdersTable, String>) -> Result<Arc<Forecast>, String> {
    let counted = forecast::forecast(&sources.database, table?, forecast::USUAL_REACH).await;
    counted.map(Arc::new).map_err(|error| error.to_string())
}
