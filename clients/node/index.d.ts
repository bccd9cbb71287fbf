// The types of the package.

/** The driver's function: runs one statement with parameters `$1`, `$2`, … in the caller's transaction. */
export type Query = (text: string, values: any[]) => PromiseLike<any[] | { rows: any[] }>;
/** A `Client` or `PoolClient` of pg, or a function; not a pool, whose statements are not in the caller's transaction. */
export type Transaction = { query: Query } | Query;

export interface ScheduleOptions {
  /** One of the worker's settings; `order` by default. */
  kind?: string;
  /** The W3C trace context of the caller; text that is none is left out. */
  traceparent?: string;
}

/** What was asked for is not known to have happened. The message is one sentence that says how to fix it; `cause` is the
 * driver's error. Roll the transaction back. */
export class OrderTimeoutError extends Error {
  /** No repetition can succeed, because of what was given. */
  readonly isFinal: boolean;
  /** PostgreSQL's error code, if the database has answered. */
  readonly sqlstate?: string;
}

/**
 * Schedules an alarm as part of the caller's transaction: it exists if, and only if, that transaction commits. `deadline` is
 * the one in the order's row.
 */
export function schedule(
  transaction: Transaction,
  orderId: string | number | bigint,
  deadline: Date,
  options?: ScheduleOptions,
): Promise<void>;

export interface Moved {
  /** `later` (or the same): the alarm in flight suffices. `earlier`: a new alarm is in the outbox. `unchanged`: the order is
   * not unpaid, or a trigger skipped the update. `too_far`: `extend_max` of its kind does not allow it. `unknown`: there is no
   * such order. */
  outcome: "later" | "earlier" | "unchanged" | "too_far" | "unknown";
  /** Of the order; null if there is none. */
  status: string | null;
  /** The deadline in the row now, to the millisecond; null if it has none. */
  deadline: Date | null;
}

/** Gives an unpaid order another deadline, and an alarm if that is earlier. Locks the order's row until the caller's transaction
 * ends. A repetition is always safe. */
export function moveDeadline(
  transaction: Transaction,
  orderId: string | number | bigint,
  deadline: Date,
  options?: { kind?: string },
): Promise<Moved>;

export interface Payment {
  outcome: "paid" | "partial" | "late";
  /** Why it is late, such as `closed`; otherwise null. */
  reason: string | null;
  /** What the order still lacks, in the currency's smallest unit, if `partial`; otherwise 0. */
  missingMinor: number;
  /** What was paid too much; it is late money. */
  surplusMinor: number;
  /** Whether this is the first report of this provider's reference. */
  isNew: boolean;
}

/** Reports that a provider has received this money for this order; each reference of a provider counts once. Call it first in
 * its transaction. After an error report it again, unless `isFinal`. */
export function paymentReceived(
  transaction: Transaction,
  orderId: string | number | bigint,
  provider: string,
  reference: string,
  amountMinor: number | bigint,
  currency: string,
  options?: { kind?: string },
): Promise<Payment>;

/** `closed` by this call. `attempt_open`: an attempt may still bring money. The others: docs/PAYMENTS.md. */
export type Released =
  | "closed"
  | "already_closed"
  | "paid"
  | "closing"
  | "attempt_open"
  | "paused"
  | "not_due"
  | "busy"
  | "unknown"
  | "malformed";

/** Closes an open order now, because its payment has failed for good. The event says `reason`, of 1 to 200 bytes. A repetition
 * is always safe. */
export function release(
  transaction: Transaction,
  orderId: string | number | bigint,
  reason: string,
  options?: { kind?: string },
): Promise<Released>;

/** Whether this event was not handled before; marks it in the table `handled_events`, in the caller's transaction. Waits for
 * a session that handles the same event now. */
export function firstDelivery(transaction: Transaction, eventId: string): Promise<boolean>;

/** An address, as amqplib takes it. */
export type Address = string | Record<string, any>;

/** Schedules alarms through RabbitMQ, with confirms. Connects at the first alarm, and again after the connection is lost. */
export class Publisher {
  /** `socketOptions` are those of amqplib, such as `{ ca }`. */
  constructor(url: Address, options?: { namespace?: string; socketOptions?: Record<string, any> });
  /** Schedules the alarm of an order that is committed; resolves when the broker has confirmed it, and rejects within
   * 10 seconds. A repetition does no harm. */
  schedule(orderId: string | number | bigint, deadline: Date, options?: ScheduleOptions): Promise<void>;
  close(): Promise<void>;
}

/** The body of `order.closed.v1`. */
export interface OrderClosed {
  order_id: string;
  deadline: string;
  closed_at: string;
  closed_by: "alarm" | "look_ahead" | "sweep" | "manual" | "released";
  reason: string;
  /** What the shop said when it released the order, or an operator who closed it. */
  why?: string;
}

/** An event, as docs/WIRE.md describes each type. */
export interface Event<Body = OrderClosed> {
  /** The same each time the event is delivered. */
  id: string;
  /** Such as `order.closed.v1`. */
  type: string;
  routingKey: string;
  body: Body;
  /** The W3C trace context of the order's alarm, if it had one. */
  traceparent?: string;
}

export interface ListenOptions {
  /** `["order.closed"]` by default. */
  routingKeys?: string[];
  namespace?: string;
  /** Ends the listener; its promise then resolves, after the handler that runs. */
  signal?: AbortSignal;
  /** `console` by default. */
  logger?: Pick<Console, "info" | "warn" | "error">;
  socketOptions?: Record<string, any>;
}

/**
 * Calls `handle` with each event, at least once; connects again after every error. `queue` is this service's own; it is declared,
 * and bound with the routing keys. An event is acknowledged after `handle` has returned. If it throws, the event is tried again
 * after a second and more, while others are handled. To handle each event once, call `firstDelivery` in the transaction that
 * handles it.
 */
export function listen<Body = OrderClosed>(
  url: Address,
  queue: string,
  handle: (event: Event<Body>) => unknown,
  options?: ListenOptions,
): Promise<void>;
