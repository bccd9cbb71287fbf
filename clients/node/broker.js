// Schedules alarms through RabbitMQ, and listens to events; the wire is docs/WIRE.md of order-timeout. Needs amqplib.
//
// The database is not needed here. An alarm is scheduled after the commit of its order; inside the transaction it is `schedule`.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { OrderTimeoutError, checkedDeadline, checkedId, checkedTraceparent, refuse } from "./input.js";

// As those of the Rust client.
const TIMEOUT_MS = 5_000;
const MAX_DELAY_MS = 3_650 * 86_400_000;
// An event whose handler fails is tried again after this time, and after twice the last one up to the longest.
const FIRST_RETRY_MS = 1_000;
const LONGEST_RETRY_MS = 60_000;
const PREFETCH = 100;
const RETURNED = "message returned";
// As amqplib says it.
const NACKED = "message nacked";

async function connect(url, socketOptions) {
  const amqp = await import("amqplib").catch((cause) => {
    throw new OrderTimeoutError("the broker is reached through amqplib; run `npm install amqplib`", { cause });
  });
  const connection = await amqp.default.connect(url, { timeout: TIMEOUT_MS, ...socketOptions });
  // "close" follows, with the same error.
  connection.on("error", () => {});
  return connection;
}

/** The same promise, but rejected if it takes too long. */
function inTime(promise) {
  let timer;
  const tooLate = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`there was no answer within ${TIMEOUT_MS} ms`)), TIMEOUT_MS);
  });
  return Promise.race([promise, tooLate]).finally(() => clearTimeout(timer));
}

export class Publisher {
  #url;
  #socketOptions;
  #exchange;
  // A promise of the open channel.
  #open;

  constructor(url, { namespace = "order", socketOptions } = {}) {
    this.#url = url;
    this.#socketOptions = socketOptions;
    this.#exchange = `${namespace}.schedule`;
  }

  async schedule(orderId, deadline, { kind = "order", traceparent } = {}) {
    const body = { order_id: checkedId(orderId), deadline: checkedDeadline(deadline) };
    if (deadline - Date.now() > MAX_DELAY_MS) {
      refuse(`the deadline ${body.deadline} is further ahead than delay.max_delay allows; is its unit right?`);
    }
    if (kind !== "order") body.kind = kind;
    const context = checkedTraceparent(traceparent);
    const properties = {
      type: "order.timeout.v1",
      contentType: "application/json",
      persistent: true,
      mandatory: true,
      timestamp: Math.floor(Date.now() / 1000),
      messageId: randomUUID(),
      appId: "order-timeout",
      headers: context ? { traceparent: context } : {},
    };
    const open = (this.#open ??= this.#connect());
    try {
      const { channel } = await inTime(open);
      await inTime(this.#publish(channel, Buffer.from(JSON.stringify(body)), properties));
    } catch (error) {
      // Without an answer, the connection may be lost and not know it.
      if (![RETURNED, NACKED].includes(error.message)) this.#close(open);
      const text = `the alarm of order ${orderId} is not scheduled: ${this.#fix(error)}`;
      throw new OrderTimeoutError(text, { cause: error });
    }
  }

  #connect() {
    const open = connect(this.#url, this.#socketOptions).then(async (connection) => {
      const channel = await connection.createConfirmChannel();
      // The ids of the messages that were returned; their confirms follow.
      channel.returned = new Set();
      channel.on("return", ({ properties }) => channel.returned.add(properties.messageId));
      channel.on("error", (error) => (channel.failure = error));
      channel.on("close", () => this.#close(open));
      return { connection, channel };
    });
    return open;
  }

  async #close(open) {
    // Another call may have opened another one since.
    if (this.#open === open) this.#open = undefined;
    // It is not needed again, so its errors are ignored.
    await open?.then(({ connection }) => connection.close()).catch(() => {});
  }

  #publish(channel, body, properties) {
    return new Promise((resolve, reject) => {
      channel.publish(this.#exchange, "", body, properties, (error) => {
        if (error) reject(channel.failure ?? error);
        else if (channel.returned.delete(properties.messageId)) reject(new Error(RETURNED));
        else resolve();
      });
    });
  }

  #fix({ message, code }) {
    const setup = "run `order-timeout setup` with this namespace on this virtual host";
    if (message === RETURNED) return `no queue is bound to the exchange ${this.#exchange}; ${setup}`;
    if (message === NACKED) return "the broker has refused it, because a queue is full or away; repeat it";
    if (code === 404) return `the broker has no exchange ${this.#exchange}; ${setup}`;
    return `${message || code}; repeat it when the broker can be reached and is not short of memory or disk`;
  }

  async close() {
    await this.#close(this.#open);
  }
}

export async function listen(url, queue, handle, options = {}) {
  const { routingKeys = ["order.closed"], namespace = "order", signal, logger = console, socketOptions } = options;
  while (!signal?.aborted) {
    try {
      const connection = await connect(url, socketOptions);
      try {
        const channel = await connection.createChannel();
        const failed = new Promise((_, reject) => {
          channel.on("error", reject);
          channel.on("close", () => reject(new Error("the connection was closed")));
        });
        // The steps before it is awaited fail themselves.
        failed.catch(() => {});
        // It keeps the events while the service does not run.
        await channel.assertQueue(queue, { durable: true, arguments: { "x-queue-type": "quorum" } });
        for (const key of routingKeys) await channel.bindQueue(queue, `${namespace}.events`, key);
        await channel.prefetch(PREFETCH);
        await consume(channel, queue, handle, failed, signal, logger);
        // Sends the last acknowledgement before the connection ends.
        await channel.close();
      } finally {
        await connection.close().catch(() => {});
      }
    } catch (error) {
      const hint = error.code === 404 ? "; run `order-timeout setup` first" : "";
      logger.warn(`connecting again in a second: ${error.message || error.code}${hint}`);
      await sleep(1000, undefined, { signal }).catch(() => {});
    }
  }
}

/** Returns when the signal says so, and no handler runs any more; rejects when the channel is lost. */
async function consume(channel, queue, handle, failed, signal, logger) {
  let isOver = false;
  // One event after the other, in the order of their delivery.
  let turn = Promise.resolve();
  const take = (message, event, pause) => {
    turn = turn.then(async () => {
      if (isOver) return;
      try {
        await handle(event);
      } catch (error) {
        // Kept here and not returned to the queue: RabbitMQ 4 drops a message after twenty returns.
        logger.error(`event ${event.id} was not handled; it is tried again in ${pause} ms:`, error);
        setTimeout(take, pause, message, event, Math.min(2 * pause, LONGEST_RETRY_MS)).unref();
        return;
      }
      try {
        channel.ack(message);
      } catch {
        // The channel was lost meanwhile, so the event comes again.
      }
    });
  };
  let stop;
  const stopped = new Promise((resolve) => (stop = resolve));
  const cancelled = new Promise((_, reject) => {
    const receive = (message) => {
      if (message === null) return reject(new Error("the broker cancelled the consumer"));
      const event = read(message);
      if (event) return take(message, event, FIRST_RETRY_MS);
      logger.error("a message is no event, and was rejected: it has no message id, or is no JSON object");
      channel.reject(message, false);
    };
    channel.consume(queue, receive).then(() => logger.info(`listening: ${queue}`), reject);
  });
  signal?.addEventListener("abort", stop);
  if (signal?.aborted) stop();
  try {
    await Promise.race([stopped, cancelled, failed]);
  } finally {
    isOver = true;
    signal?.removeEventListener("abort", stop);
    await turn;
  }
}

function read({ content, fields, properties }) {
  try {
    const body = JSON.parse(content.toString());
    if (!properties.messageId || body === null || typeof body !== "object" || Array.isArray(body)) return undefined;
    const { messageId: id, type, headers } = properties;
    return { id, type: type ?? "", routingKey: fields.routingKey, body, traceparent: headers?.traceparent };
  } catch {
    return undefined;
  }
}
