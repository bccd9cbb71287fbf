// What callers give, and what they are told if it cannot be used. No I/O.

// As the worker reads it from a message, and as `alarm_outbox` keeps it.
const MAX_ORDER_ID_BYTES = 200;
// Of the W3C specification: no version ff, no ids of zeros; version 00 has nothing behind the flags.
const TRACEPARENT =
  /^(?!ff|00.{53}.|.{3}0{32}|.{36}0{16})[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x00-\x7f]{0,144})?$/;

export class OrderTimeoutError extends Error {
  name = "OrderTimeoutError";

  constructor(message, { cause, isFinal = false, sqlstate } = {}) {
    super(message, { cause });
    this.isFinal = isFinal;
    this.sqlstate = sqlstate;
  }
}

export function refuse(sentence) {
  throw new OrderTimeoutError(sentence, { isFinal: true });
}

export function checkedId(orderId) {
  const text = String(orderId);
  const isId = ["string", "number", "bigint"].includes(typeof orderId) && !/[\x00-\x1f\x7f-\x9f]/.test(text);
  const bytes = Buffer.byteLength(text);
  if (!isId || bytes < 1 || bytes > MAX_ORDER_ID_BYTES) {
    const given = JSON.stringify(text.slice(0, 50));
    refuse(
      `the order id ${given} is not 1 to ${MAX_ORDER_ID_BYTES} bytes without control characters; ` +
        "give it as the orders table prints it",
    );
  }
  return text;
}

/** The deadline as RFC 3339. */
export function checkedDeadline(deadline) {
  const year = deadline instanceof Date ? deadline.getUTCFullYear() : NaN;
  if (!(year >= 1 && year <= 9999)) {
    refuse(
      `the deadline ${deadline} is not a Date in the years 1 to 9999; give one such as new Date(Date.now() + 1800000)`,
    );
  }
  return deadline.toISOString();
}

/** No order may fail for its trace, so text that is no trace context is left out. */
export function checkedTraceparent(context) {
  return TRACEPARENT.test(context ?? "") ? context : null;
}
