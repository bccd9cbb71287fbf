// Schedules alarms, moves deadlines, reports payments and releases orders inside the caller's Postgres transaction. Opens no
// connection and commits nothing.
//
// Each statement is written for any driver: its parameters are text, which the database casts, and so are its answers.
import { OrderTimeoutError, checkedDeadline, checkedId, checkedTraceparent, refuse } from "./input.js";

const SETUP = "run `order-timeout setup`, and put its schema on search_path";
const BUSY = "another session holds the order; roll back and repeat it";
const RESTARTING = "the database is restarting; connect again and repeat it";
const FIXES = {
  // undefined_table, undefined_function, undefined_column, invalid_schema_name
  ...{ "42P01": SETUP, 42883: SETUP, 42703: SETUP, "3F000": SETUP },
  // lock_not_available, query_canceled, serialization_failure, deadlock_detected
  ...{ "55P03": BUSY, 57014: BUSY, 40001: BUSY, "40P01": BUSY },
  // admin_shutdown, crash_shutdown, cannot_connect_now
  ...{ "57P01": RESTARTING, "57P02": RESTARTING, "57P03": RESTARTING },
  25006: "this is a standby; connect to the primary",
  "25P02": "an earlier statement of this transaction has failed; roll it back first",
};
const DEADLINE = "choose a deadline before the year 9999, and a kind of a-z, 0-9 and _";
// invalid_text_representation and check_violation, where a call has a fix for them: elsewhere they are about the shop's own
// tables, and it may mend those. What our functions refuse for good begins with `final: `.
const FINAL = ["22P02", "23514"];

/** What the database has said, through pg, Drizzle (`cause`) or Prisma (`meta`). */
function said(error) {
  for (let inner = error; inner; inner = inner.cause) {
    const { originalCode, originalMessage } = inner.meta?.driverAdapterError?.cause ?? {};
    // Prisma's own codes begin with P1 to P9, and those of Node have no digit.
    const isState = (code) => /^(?!P[1-9])(?=.*\d)[0-9A-Z]{5}$/.test(code);
    const sqlstate = [originalCode, inner.meta?.code, inner.code].find(isState);
    if (sqlstate) return { sqlstate, sentence: originalMessage ?? inner.meta?.message ?? inner.message };
  }
  return { sentence: error.message || error.code || String(error) };
}

/** Runs one statement; `failed` is what has not happened if it fails, and `fixes` how an SQLSTATE is fixed. */
export async function run(db, text, values, failed, fixes) {
  if (typeof db !== "function" && (typeof db?.query !== "function" || db.totalCount !== undefined)) {
    // A pool would run the statement in another transaction than the caller's.
    throw new TypeError(
      "give the client of the transaction, such as `await pool.connect()`, or a function (text, values)",
    );
  }
  try {
    const result = await (typeof db === "function" ? db(text, values) : db.query(text, values));
    return result.rows ?? result;
  } catch (error) {
    const { sqlstate, sentence } = said(error);
    const isFinal = sentence.includes("final: ") || (FINAL.includes(sqlstate) && sqlstate in fixes);
    // What is final says by itself what to do; without a code, the answer may have been lost.
    const advice = isFinal ? "" : `; ${sqlstate ? "roll back" : "connect again"} and repeat it`;
    const fix = fixes[sqlstate] ?? FIXES[sqlstate] ?? sentence.trim().split("\n")[0] + advice;
    throw new OrderTimeoutError(`${failed}: ${fix}`, { cause: error, isFinal, sqlstate });
  }
}

export async function schedule(db, orderId, deadline, { kind = "order", traceparent } = {}) {
  const values = [checkedId(orderId), checkedDeadline(deadline), checkedTraceparent(traceparent), kind];
  const text =
    "INSERT INTO alarm_outbox (order_id, deadline, traceparent, kind)" +
    " VALUES ($1::text, $2::text::timestamptz, $3::text, $4::text)";
  await run(db, text, values, `the alarm of order ${orderId} is not scheduled`, {
    42501: "grant this user INSERT on alarm_outbox",
    23514: DEADLINE,
  });
}

export async function moveDeadline(db, orderId, deadline, { kind = "order" } = {}) {
  const values = [checkedId(orderId), checkedDeadline(deadline), kind];
  // The deadline is text: `infinity`, for example, is not a Date.
  const text =
    "SELECT outcome, status," +
    ` to_char(coalesce(moved_to, before) AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS deadline` +
    " FROM move_deadline($1::text, $2::text::timestamptz, $3::text)";
  const [row] = await run(db, text, values, `the deadline of order ${orderId} is unchanged`, {
    42501: "GRANT EXECUTE ON FUNCTION move_deadline to this user",
    23514: DEADLINE,
  });
  if (!row) return { outcome: "unknown", status: null, deadline: null };
  return { outcome: row.outcome, status: row.status, deadline: row.deadline && new Date(row.deadline) };
}

export async function paymentReceived(
  db,
  orderId,
  provider,
  reference,
  amountMinor,
  currency,
  { kind = "order" } = {},
) {
  if (typeof amountMinor !== "bigint" && !Number.isSafeInteger(amountMinor)) {
    refuse(`the amount ${amountMinor} is not a whole number; give it in the currency's smallest unit`);
  }
  const text =
    "SELECT outcome, reason, missing_minor::text AS missing, surplus_minor::text AS surplus, is_new" +
    " FROM payment_received($1::text, $2::text, $3::text, $4::text::bigint, $5::text, $6::text)";
  const values = [checkedId(orderId), provider, reference, String(amountMinor), currency, kind];
  const [row] = await run(db, text, values, `payment ${JSON.stringify(reference)} of ${provider} is not recorded`, {
    42501: "GRANT EXECUTE ON FUNCTION payment_received to this user",
  });
  const { outcome, reason, missing, surplus, is_new: isNew } = row;
  return { outcome, reason, missingMinor: Number(missing), surplusMinor: Number(surplus), isNew };
}

export async function release(db, orderId, reason, { kind = "order" } = {}) {
  const text = "SELECT release($1::text, $2::text, $3::text) AS outcome";
  const [row] = await run(db, text, [checkedId(orderId), reason, kind], `order ${orderId} is not released`, {
    42501: "GRANT EXECUTE ON FUNCTION release to this user",
  });
  return row.outcome;
}

export async function firstDelivery(db, eventId) {
  const failed = `event ${JSON.stringify(eventId)} is not marked as handled`;
  const fixes = {
    "42P01": "run `CREATE TABLE handled_events (id uuid PRIMARY KEY, handled_at timestamptz DEFAULT now())`",
    42501: "grant this user INSERT and SELECT on handled_events",
    "22P02": "the message id of an event is a UUID",
    // no_active_sql_transaction
    "25P01": "begin a transaction first, whose rollback takes the mark back if the event is not handled",
  };
  // The database refuses it outside a transaction, where a failed handler would leave the event marked and lost.
  await run(db, "LOCK TABLE handled_events IN ACCESS SHARE MODE", [], failed, fixes);
  const text =
    "INSERT INTO handled_events (id) VALUES ($1::text::uuid) ON CONFLICT DO NOTHING RETURNING true AS is_first";
  return (await run(db, text, [eventId], failed, fixes)).length > 0;
}
