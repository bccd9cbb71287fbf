//! Amounts as providers write them, as amounts in a currency's smallest unit.
//!
//! Pure. What is not exactly an amount is refused, never rounded.

use order_timeout_core::payment::{Currency, Money};

/// Currencies of ISO 4217 whose smallest unit is not a hundredth, with their number of decimals. A table of our own,
/// because it is all that is needed of the standard.
const DECIMALS: [(&[&str], u32); 3] = [
    (
        &[
            "BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "UYI", "VND", "VUV", "XAF",
            "XOF", "XPF",
        ],
        0,
    ),
    (&["BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"], 3),
    (&["CLF", "UYW"], 4),
];

/// An amount that is already in the smallest unit. `currency` may be in lower case, as Stripe writes it.
pub(crate) fn from_minor(amount_minor: i64, currency: &str) -> Option<Money> {
    let currency = Currency::new(&currency.to_ascii_uppercase()).ok()?;
    (amount_minor >= 0).then_some(Money { amount_minor, currency })
}

/// A decimal amount, such as `88.88`.
pub(crate) fn from_decimal(text: &str, currency: &str) -> Option<Money> {
    let currency = Currency::new(currency).ok()?;
    let decimals = DECIMALS.iter().find(|(codes, _)| codes.contains(&currency.as_str())).map_or(2, |(_, count)| *count);
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        return None;
    }
    // 10.00 JPY is 10 JPY, and 10.50 JPY is no amount.
    let digits = fraction.trim_end_matches('0');
    let missing = decimals.checked_sub(u32::try_from(digits.len()).ok()?)?;
    let digits: i64 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    let whole = whole.parse::<i64>().ok()?.checked_mul(10_i64.pow(decimals))?;
    let amount_minor = whole.checked_add(digits.checked_mul(10_i64.pow(missing))?)?;
    Some(Money { amount_minor, currency })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_decimals_of_each_currency() {
        for (text, currency, expected) in [
            ("88.88", "CNY", Some(8_888)),
            ("0.01", "CNY", Some(1)),
            ("5", "EUR", Some(500)),
            ("5.5", "EUR", Some(550)),
            ("1000", "JPY", Some(1_000)),
            ("1000.00", "JPY", Some(1_000)),
            ("1000.50", "JPY", None),
            ("1.234", "KWD", Some(1_234)),
            ("1.2345", "CLF", Some(12_345)),
            ("1.234", "EUR", None),
            ("1.230", "EUR", Some(123)),
            ("-1.00", "EUR", None),
            ("+1.00", "EUR", None),
            ("1,00", "EUR", None),
            ("1e3", "EUR", None),
            (".5", "EUR", None),
            ("5.", "EUR", None),
            ("", "EUR", None),
            ("92233720368547758.08", "EUR", None),
            ("5", "eur", None),
        ] {
            let amount = from_decimal(text, currency).map(|money| money.amount_minor);
            assert_eq!(amount, expected, "{text} {currency}");
        }
    }

    #[test]
    fn refuses_negative_minor_amounts() {
        assert_eq!(from_minor(1_999, "eur").unwrap().to_string(), "1999 EUR (smallest unit)");
        assert_eq!((from_minor(-1, "eur"), from_minor(1, "euro")), (None, None));
    }

    proptest! {
        #[test]
        fn hundredths_are_read_exactly(cents in 0i64..i64::MAX / 100) {
            let text = format!("{}.{:02}", cents / 100, cents % 100);
            prop_assert_eq!(from_decimal(&text, "EUR").unwrap().amount_minor, cents);
        }

        #[test]
        fn never_panics(text in "\\PC*", currency in "\\PC*") {
            from_decimal(&text, &currency);
        }
    }
}
