//! What the targets need of libFuzzer. Without the feature `run`, stand-ins by which they can be checked: libFuzzer is C++,
//! and for its sake most dependencies would be compiled once more.

#[cfg(feature = "run")]
pub use libfuzzer_sys::{Corpus, fuzz_target};

/// Whether the fuzzer shall keep an input, as in `libfuzzer_sys`.
#[cfg(not(feature = "run"))]
#[derive(Debug)]
pub enum Corpus {
    /// It may be kept.
    Keep,
    /// It is of no use.
    Reject,
}

/// Checks a target as `libfuzzer_sys` compiles it; the program tries an empty input.
#[cfg(not(feature = "run"))]
#[macro_export]
macro_rules! fuzz_target {
    (|$input:ident: $of:ty| $body:block) => {
        $crate::fuzz_target!(|$input: $of| -> () $body);
    };
    (|$input:ident: $of:ty| -> $answer:ty $body:block) => {
        fn target($input: $of) -> $answer $body

        fn main() {
            let _answer = target(Default::default());
        }
    };
}
