//! No thread is detached at about the time at which it ends: glibc then reads the thread's stack after it was freed, and
//! the process may crash (docs/decisions/0065-threads-are-joined.md).
//!
//! A test program of its own, because it replaces `pthread_detach`. The crash itself takes a delay between two
//! instructions of that function, which no test can bring about.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "it replaces a function of the C library")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use order_timeout_amqp::connect::{self, BrokerError};

use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{TestEnv, small_settings, wait_for, with_parts};

/// How long each detach waits for the thread's end. The I/O thread of a connection ends within a millisecond after it
/// was closed.
const END_WITHIN: Duration = Duration::from_millis(10);

/// Together some hundred connections.
const TURNS: usize = 15;
const AT_ONCE: usize = 8;
const SECOND: Duration = Duration::from_secs(1);

static DETACHED_AT_END: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    /// glibc and musl: joins the thread if it has ended, otherwise returns EBUSY.
    fn pthread_tryjoin_np(thread: libc::pthread_t, result: *mut *mut c_void) -> c_int;
}

/// std calls this one instead of the system's. Counts threads that end while they are detached, and joins them instead.
#[unsafe(no_mangle)]
extern "C" fn pthread_detach(thread: libc::pthread_t) -> c_int {
    std::thread::sleep(END_WITHIN);
    // SAFETY: std detaches a thread once, and only one that it has neither joined nor detached before.
    if unsafe { pthread_tryjoin_np(thread, std::ptr::null_mut()) } == 0 {
        DETACHED_AT_END.fetch_add(1, Ordering::SeqCst);
        return 0;
    }
    // SAFETY: the system's function of this name has this signature.
    unsafe {
        let system = libc::dlsym(libc::RTLD_NEXT, c"pthread_detach".as_ptr());
        std::mem::transmute::<*mut c_void, extern "C" fn(libc::pthread_t) -> c_int>(system)(thread)
    }
}

/// How many threads were detached at their end meanwhile. One call at a time, because it counts those of the process.
fn detached_at_end(during: impl FnOnce()) -> usize {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = DETACHED_AT_END.load(Ordering::SeqCst);
    during();
    DETACHED_AT_END.load(Ordering::SeqCst) - before
}

/// Runs this with connections of a runtime of its own, many times and several at once.
fn repeat(turn: impl AsyncFn()) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let turns = async || {
        for _ in 0..TURNS {
            turn().await;
        }
    };
    runtime.block_on(join_all((0..AT_ONCE).map(|_| turns())));
}

#[test]
fn detach_at_end_is_counted() {
    let ending = std::thread::spawn(|| ());
    while !ending.is_finished() {
        std::thread::yield_now();
    }
    assert_eq!(detached_at_end(|| drop(ending)), 1);
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let found = detached_at_end(|| drop(std::thread::spawn(move || receiver.recv())));
    assert_eq!(found, 0);
    drop(sender);
}

#[test]
fn closed_connections_are_joined() {
    let settings = small_settings();
    let found = detached_at_end(|| {
        repeat(async || {
            let connection = connect::connect(&settings.amqp, "closed").await.unwrap();
            connect::close(&connection, SECOND).await;
        });
    });
    assert_eq!(found, 0);
}

#[test]
fn dropped_connections_are_joined() {
    let settings = small_settings();
    let found = detached_at_end(|| {
        repeat(async || drop(connect::connect(&settings.amqp, "dropped").await.unwrap()));
    });
    assert_eq!(found, 0);
}

#[test]
fn refused_logins_detach_nothing() {
    let mut settings = small_settings();
    settings.amqp.url = with_parts(&settings.amqp.url, Some("nemo:wrong"), None, None);
    let found = detached_at_end(|| {
        repeat(async || {
            let refused = connect::connect(&settings.amqp, "refused").await.map(drop);
            assert!(matches!(refused, Err(BrokerError::Refused(_))), "{refused:?}");
        });
    });
    assert_eq!(found, 0);
}

#[test]
fn unreachable_broker_detaches_nothing() {
    let mut settings = small_settings();
    settings.amqp.url = with_parts(&settings.amqp.url, None, Some("127.0.0.1:9"), None);
    let found = detached_at_end(|| {
        repeat(async || assert!(connect::connect(&settings.amqp, "away").await.is_err()));
    });
    assert_eq!(found, 0);
}

#[test]
fn broken_handshakes_detach_nothing() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let mut settings = small_settings();
    settings.amqp.url = with_parts(&settings.amqp.url, None, Some(&address), None);
    let found = detached_at_end(|| {
        repeat(async || assert!(connect::connect(&settings.amqp, "broken").await.is_err()));
    });
    assert_eq!(found, 0);
}

#[test]
fn broken_connections_are_joined() {
    let mut settings = small_settings();
    let found = detached_at_end(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let network = Proxy::before(&settings.amqp.url).await;
            settings.amqp.url = network.address(&settings.amqp.url);
            for _ in 0..TURNS {
                let opening = (0..AT_ONCE).map(|_| connect::connect(&settings.amqp, "broken"));
                let connections: Vec<_> = join_all(opening).await.into_iter().map(Result::unwrap).collect();
                network.reset_connections();
                for connection in connections {
                    wait_for("the end", async || !connection.status().connected()).await;
                }
            }
        });
    });
    assert_eq!(found, 0);
}

#[test]
fn stopped_worker_detaches_nothing() {
    let found = detached_at_end(|| {
        TestEnv::builder().run(async |env| {
            let worker = env.worker().await;
            env.deliver(&env.orders(5, Duration::from_millis(500)).await).await;
            wait_for("every close", async || env.closed().await == 5).await;
            worker.stop().await;
        });
    });
    assert_eq!(found, 0);
}
