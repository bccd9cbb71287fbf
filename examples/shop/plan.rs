//! Which customer comes when, orders what, and pays when: drawn before the shop opens, so that the run only carries it
//! out.
//!
//! Pure: no I/O. The shares are exact, their assignment is random.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use order_timeout_core::order::Timestamp;
use uuid::Uuid;

const ARTICLES: [&str; 10] =
    ["candle", "chair", "kettle", "lamp", "mug", "notebook", "pillow", "scarf", "teapot", "vase"];
const MOST_OF_ONE_ARTICLE: i64 = 3;
/// "The last moment" and "while the close is running" are this close to the deadline.
const NEAR_DEADLINE_US: u64 = 5_000;
/// A payment in good time arrives at least this long before the deadline.
const GOOD_TIME: Duration = Duration::from_millis(50);

/// How long customers have to pay.
#[derive(Debug, Clone)]
pub struct Terms {
    /// The standard delay, if it is short enough for a demo.
    pub lane: Option<Duration>,
    /// Any other delay is in this range.
    pub other_ms: RangeInclusive<u64>,
    /// Appended to the names of articles, so that runs in one database do not share stock.
    pub mark: String,
}

/// The whole run, apart from the worker's actions.
#[derive(Debug)]
pub struct Plan {
    pub customers: Vec<Arc<Customer>>,
    pub articles: Vec<Article>,
    uuids: Vec<Uuid>,
    length: Duration,
}

/// An article and how many there are at the start: enough for every order.
#[derive(Debug, Clone)]
pub struct Article {
    pub id: String,
    pub initial: i64,
}

/// One order and its plan.
#[derive(Debug)]
pub struct Customer {
    pub order_id: Uuid,
    pub arrives_after: Duration,
    pub time_to_pay: Duration,
    /// In article order: several stock rows must always be locked in that order, or two customers could deadlock.
    pub basket: Vec<Item>,
    pub payment: Option<Payment>,
}

#[derive(Debug, Clone)]
pub struct Item {
    pub article_id: String,
    pub quantity: i64,
}

/// When a customer pays.
#[derive(Debug, Clone, Copy)]
pub enum Payment {
    /// After this share of the time between ordering and a little before the deadline.
    InGoodTime { share: f64 },
    /// So shortly before the deadline that it may be too late when it arrives.
    AtTheLastMoment { before: Duration },
    /// After the deadline, while the worker is closing: the first lock on the row wins.
    WhileClosing { after: Duration },
}

impl Payment {
    /// The time of the payment, by the clock that set the deadline.
    pub fn moment(self, ordered: Timestamp, deadline: Timestamp) -> Timestamp {
        match self {
            Self::InGoodTime { share } => ordered + (deadline - GOOD_TIME).since(ordered).mul_f64(share),
            Self::AtTheLastMoment { before } => deadline - before,
            Self::WhileClosing { after } => deadline + after,
        }
    }

    /// `count` payments: a tenth at the last moment, a tenth while the close is running.
    fn draw(count: usize) -> impl Iterator<Item = Self> {
        let tenth = share_of(count, 0.1);
        let close_to_the_deadline = || Duration::from_micros(fastrand::u64(0..=NEAR_DEADLINE_US));
        (0..count).map(move |index| match index {
            i if i < tenth => Self::AtTheLastMoment { before: close_to_the_deadline() },
            i if i < 2 * tenth => Self::WhileClosing { after: close_to_the_deadline() },
            _ => Self::InGoodTime { share: fastrand::f64() },
        })
    }
}

impl Plan {
    /// Forty of a hundred orders are paid, and ten of a hundred have a delay other than the standard one.
    pub fn draw(orders: u32, opening_hours: Duration, terms: &Terms) -> Self {
        let count = orders as usize;
        let articles: Vec<Article> = ARTICLES
            .iter()
            .map(|name| Article {
                id: format!("{name}-{}", terms.mark),
                initial: MOST_OF_ONE_ARTICLE * i64::from(orders),
            })
            .collect();
        let payments: Vec<Option<Payment>> = Payment::draw(share_of(count, 0.4)).map(Some).collect();
        let payments = shuffled(count, payments, || None);
        let other_delays = vec![None; share_of(count, 0.1)];
        let delays = shuffled(count, other_delays, || terms.lane);

        let customers: Vec<Arc<Customer>> = payments
            .into_iter()
            .zip(delays)
            .zip(0_u32..)
            .map(|((payment, lane), index)| {
                Arc::new(Customer {
                    order_id: Uuid::now_v7(),
                    arrives_after: opening_hours * index / orders,
                    time_to_pay: lane.unwrap_or_else(|| Duration::from_millis(fastrand::u64(terms.other_ms.clone()))),
                    basket: draw_basket(&articles),
                    payment,
                })
            })
            .collect();
        let uuids = customers.iter().map(|customer| customer.order_id).collect();
        let last_deadline = customers.iter().map(|customer| customer.arrives_after + customer.time_to_pay).max();
        Self { customers, articles, uuids, length: last_deadline.unwrap_or(opening_hours) }
    }

    pub fn uuids(&self) -> &[Uuid] {
        &self.uuids
    }

    pub fn ids(&self) -> impl Iterator<Item = String> {
        self.uuids.iter().map(Uuid::to_string)
    }

    /// How many customers will try to pay.
    pub fn payers(&self) -> usize {
        self.customers.iter().filter(|customer| customer.payment.is_some()).count()
    }

    /// From the first order to the last deadline.
    pub fn length(&self) -> Duration {
        self.length
    }
}

fn draw_basket(articles: &[Article]) -> Vec<Item> {
    // The articles are in order of their ids, and `choose_multiple` would not keep that order.
    let mut chosen: Vec<usize> = (0..articles.len()).collect();
    fastrand::shuffle(&mut chosen);
    chosen.truncate(fastrand::usize(1..=3));
    chosen.sort_unstable();
    let item = |index: usize| Item {
        article_id: articles[index].id.clone(),
        quantity: fastrand::i64(1..=MOST_OF_ONE_ARTICLE),
    };
    chosen.into_iter().map(item).collect()
}

/// `special` filled up to `count` with ordinary ones, in random order.
fn shuffled<T>(count: usize, mut special: Vec<T>, ordinary: impl FnMut() -> T) -> Vec<T> {
    special.resize_with(count, ordinary);
    fastrand::shuffle(&mut special);
    special
}

fn share_of(count: usize, share: f64) -> usize {
    (count as f64 * share).round() as usize
}
