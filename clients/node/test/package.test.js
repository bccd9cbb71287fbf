// Tests the package against a running worker, its database and its broker: DATABASE_URL, AMQP_URL and NAMESPACE say where.
//
// `cargo test --test examples node_package` starts them, and installs the drivers. FIXTURES is the folder of the wire's vectors.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:net";
import { after as afterAll, before, beforeEach, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import amqp from "amqplib";
import { sql } from "drizzle-orm";
import { drizzle } from "drizzle-orm/node-postgres";
import {
  OrderTimeoutError,
  Publisher,
  firstDelivery,
  listen,
  moveDeadline,
  paymentReceived,
  release,
  schedule,
} from "order-timeout";
import pg from "pg";

const { DATABASE_URL, AMQP_URL, NAMESPACE, FIXTURES } = process.env;
const LIMIT_MS = 30_000;
const TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

const pool = new pg.Pool({ connectionString: DATABASE_URL });
const publisher = new Publisher(AMQP_URL, { namespace: NAMESPACE });
let client, broker, channel, queue;

const after = (seconds) => new Date(Math.floor(Date.now() / 1000 + seconds) * 1000);

async function waitFor(condition) {
  const end = Date.now() + LIMIT_MS;
  while (!(await condition())) {
    assert(Date.now() < end, "in time");
    await sleep(50);
  }
}

async function order(deadline) {
  const id = randomUUID();
  await client.query("INSERT INTO orders (id, expires_at, amount_minor, currency) VALUES ($1, $2, 1999, 'EUR')", [
    id,
    deadline,
  ]);
  return id;
}

async function alarms(id) {
  const text = "SELECT deadline, kind, traceparent FROM alarm_outbox WHERE order_id = $1 ORDER BY created_at";
  return (await client.query({ text, values: [id], rowMode: "array" })).rows;
}

async function statusOf(id) {
  return (await client.query("SELECT status::text FROM orders WHERE id = $1", [id])).rows[0].status;
}

/** The error of one sentence with these parts. */
async function refused(promise, ...parts) {
  const error = await promise.then(
    () => assert.fail("it is refused"),
    (error) => error,
  );
  assert(error instanceof OrderTimeoutError, error);
  assert(!error.message.includes("\n"), error.message);
  for (const part of parts) assert(error.message.includes(part), error.message);
  return error;
}

/** Listens while `during` runs. */
async function listening(handle, options, during) {
  const end = new AbortController();
  let begin;
  const begun = new Promise((resolve) => (begin = resolve));
  const logger = { info: begin, warn: console.warn, error: () => {} };
  const done = listen(AMQP_URL, queue, handle, { signal: end.signal, logger, ...options });
  await begun;
  try {
    await during();
  } finally {
    end.abort();
    await done;
  }
  const { messageCount } = await channel.checkQueue(queue);
  assert.equal(messageCount, 0);
  await channel.deleteQueue(queue);
}

describe("the package", () => {
  before(async () => {
    client = await pool.connect();
    broker = await amqp.connect(AMQP_URL);
  });

  beforeEach(async () => {
    channel = await broker.createChannel();
    queue = `shop.${randomUUID()}`;
  });

  afterAll(async () => {
    client.release();
    await pool.end();
    await publisher.close();
    await broker.close();
  });

  test("a transaction schedules, and its event is heard once", async () => {
    const [tried, heard] = [[], []];
    await client.query(
      "CREATE TABLE IF NOT EXISTS handled_events (id uuid PRIMARY KEY, handled_at timestamptz NOT NULL DEFAULT now())",
    );
    const unsafe = firstDelivery(client, randomUUID());
    await refused(unsafe, "is not marked as handled: begin a transaction first");
    const handle = async (event) => {
      const own = await pool.connect();
      try {
        await own.query("BEGIN");
        tried.push(event.id);
        if (await firstDelivery(own, event.id)) {
          heard.push(event);
          if (tried.length === 1) throw new Error("the transaction is rolled back, and the event is tried again");
        }
        await own.query("COMMIT");
      } catch (error) {
        await own.query("ROLLBACK");
        throw error;
      } finally {
        own.release();
      }
    };
    await listening(handle, { namespace: NAMESPACE }, async () => {
      const [deadline, id] = [after(2), randomUUID()];
      await client.query("BEGIN");
      await client.query("INSERT INTO orders (id, expires_at) VALUES ($1, $2)", [id, deadline]);
      await schedule(client, id, deadline, { traceparent: TRACE });
      await client.query("COMMIT");
      await client.query("BEGIN");
      await schedule(client, "rolled back", deadline);
      await client.query("ROLLBACK");
      assert.deepEqual(await alarms("rolled back"), []);
      assert.deepEqual(await alarms(id), [[deadline, "order", TRACE]]);
      const ofOrder = () => heard.filter((event) => event.body.order_id === id);
      // One whose transaction is rolled back, and the one that counts.
      await waitFor(() => ofOrder().length === 2);
      const event = ofOrder()[1];
      assert.deepEqual([event.type, event.routingKey, event.traceparent], ["order.closed.v1", "order.closed", TRACE]);
      assert.equal(new Date(event.body.deadline).getTime(), deadline.getTime());
      assert.equal(await statusOf(id), "closed");
      // The same event once more.
      await client.query("UPDATE event_outbox SET sent_at = NULL WHERE id = $1", [event.id]);
      await waitFor(() => tried.filter((id) => id === event.id).length > 2);
      assert.equal(ofOrder().length, 2);
    });
  });

  test("pg, a function and Drizzle write the same", async () => {
    const [deadline, earlier] = [after(3600), after(3000)];
    const ways = {
      pg: (use) => use(client),
      function: (use) => use(async (text, values) => (await client.query(text, values)).rows),
      drizzle: (use) =>
        drizzle(client).transaction((tx) =>
          // As the README has it.
          use((text, values) =>
            tx.execute(
              sql.join(text.split(/\$(\d)/).map((part, at) => (at % 2 ? sql`${values[+part - 1]}` : sql.raw(part)))),
            ),
          ),
        ),
    };
    for (const [name, way] of Object.entries(ways)) {
      const id = await order(deadline);
      await way(async (db) => {
        await schedule(db, id, deadline, { kind: "acceptance", traceparent: "no trace context" });
        const moved = await moveDeadline(db, id, earlier);
        assert.deepEqual(moved, { outcome: "earlier", status: "unpaid", deadline: earlier }, name);
        const paid = await paymentReceived(db, id, "stripe", `pi_${id}`, 2000n, "EUR");
        assert.deepEqual(paid, { outcome: "paid", reason: null, missingMinor: 0, surplusMinor: 1, isNew: true }, name);
      });
      assert.deepEqual(
        await alarms(id),
        [
          [deadline, "acceptance", null],
          [earlier, "order", null],
        ],
        name,
      );
      assert.equal(await statusOf(id), "paid");
    }
    const failing = drizzle(client).transaction((tx) => {
      const db = (text) => tx.execute(sql.raw(text.replaceAll(/\$\d/g, "'7'")));
      return schedule(db, "7", deadline);
    });
    assert.equal((await refused(failing, "is not scheduled")).sqlstate, "22007", "of the error that Drizzle wraps");
  });

  test("a deadline moves later, earlier or not", async () => {
    const [deadline, later, id] = [after(600), after(900), await order(after(600))];
    assert.deepEqual(await moveDeadline(client, id, later), { outcome: "later", status: "unpaid", deadline: later });
    assert.deepEqual(await alarms(id), []);
    assert.equal((await moveDeadline(client, id, deadline)).outcome, "earlier");
    await client.query("UPDATE orders SET status = 'cancelled', expires_at = NULL WHERE id = $1", [id]);
    assert.deepEqual(await moveDeadline(client, id, later), {
      outcome: "unchanged",
      status: "cancelled",
      deadline: null,
    });
    const unknown = { outcome: "unknown", status: null, deadline: null };
    assert.deepEqual(await moveDeadline(client, randomUUID(), later), unknown);
    assert.deepEqual(await moveDeadline(client, "7", later), unknown);
  });

  test("payments are answered", async () => {
    const [id, reference] = [await order(after(600)), randomUUID()];
    const report = (part, amount, of = id) =>
      paymentReceived(client, of, "stripe", `${reference}${part}`, amount, "EUR");
    const answer = { outcome: "partial", reason: null, missingMinor: 1000, surplusMinor: 0, isNew: true };
    assert.deepEqual(await report(1, 999), answer);
    assert.deepEqual(await report(1, 999), { ...answer, isNew: false });
    assert.deepEqual(await report(2, 1001), { ...answer, outcome: "paid", missingMinor: 0, surplusMinor: 1 });
    assert.deepEqual(await report(3, 5), { ...answer, outcome: "late", reason: "already_paid", missingMinor: 0 });
    assert.equal((await report(4, 5, randomUUID())).reason, "unknown_order");
    const repeated = await refused(report(1, 998), "is not recorded: final: payment", "reference of its own");
    assert.deepEqual([repeated.isFinal, repeated.sqlstate], [true, "23505"]);
    const negative = await refused(report(5, -1), "the amount -1 is negative; report what was received");
    assert.deepEqual([negative.isFinal, negative.sqlstate], [true, "22023"]);
    // A CHECK of the shop's own tables, which it may mend: nothing was recorded, and the payment must be reported again.
    const unreserved = await order(after(600));
    const item = "INSERT INTO order_items (order_id, article_id, quantity) VALUES ($1, 'article', 1)";
    await client.query(item, [unreserved]);
    const refusedByShop = await refused(report(7, 1999, unreserved), "reserved_is_never_negative", "and repeat it");
    assert.deepEqual([refusedByShop.isFinal, refusedByShop.sqlstate], [false, "23514"]);
    await refused(report(6, 19.99), "the amount 19.99 is not a whole number", "smallest unit");
  });

  test("an order is released unless it may be paid", async () => {
    const id = await order(after(600));
    const attempt = "INSERT INTO payment_attempts VALUES ('stripe', $1, $2, 1999, 'EUR')";
    await client.query(attempt, [randomUUID(), id]);
    assert.equal(await release(client, id, "declined"), "attempt_open");
    await client.query("UPDATE payment_attempts SET state = 'closed' WHERE order_id = $1", [id]);
    assert.equal(await release(client, id, "declined", { kind: "order" }), "closed");
    assert.deepEqual([await statusOf(id), await release(client, id, "again")], ["closed", "already_closed"]);
    const select = "SELECT payload FROM event_outbox WHERE payload ->> 'order_id' = $1";
    const { closed_by: by, why } = (await client.query(select, [id])).rows[0].payload;
    assert.deepEqual([by, why], ["released", "declined"]);
    const empty = await refused(release(client, id, ""), "is not released: final: the reason '' is not 1 to 200 bytes");
    assert(empty.isFinal);
    assert.equal(await release(client, randomUUID(), "declined"), "unknown");
  });

  test("the broker takes the wire's vectors", async () => {
    const own = new Publisher(AMQP_URL, { namespace: queue });
    await refused(own.schedule("1", after(60)), "no exchange shop.", "run `order-timeout setup`");
    const exchange = `${queue}.schedule`;
    await channel.assertExchange(exchange, "fanout", { autoDelete: true });
    const unroutable = await refused(own.schedule("1", after(60)), "no queue is bound to", "run `order-timeout setup`");
    assert.equal(unroutable.isFinal, false);
    await channel.assertQueue(queue, { exclusive: true });
    await channel.bindQueue(queue, exchange, "");
    const deadline = new Date("2026-11-20T11:30:00+01:00");
    await own.schedule("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", deadline, { traceparent: TRACE });
    await own.schedule(4711, deadline, { kind: "acceptance" });
    const vectors = { "timeout_due.v1.json": { traceparent: TRACE }, "timeout_due_of_kind.v1.json": {} };
    for (const [name, headers] of Object.entries(vectors)) {
      const { content, properties } = await channel.get(queue, { noAck: true });
      assert.deepEqual(JSON.parse(content), JSON.parse(readFileSync(`${FIXTURES}/${name}`)));
      const { type, deliveryMode, contentType, expiration, timestamp, messageId } = properties;
      assert.deepEqual(
        [type, deliveryMode, contentType, expiration],
        ["order.timeout.v1", 2, "application/json", undefined],
      );
      assert.deepEqual(properties.headers, headers);
      assert(Math.abs(timestamp * 1000 - Date.now()) < LIMIT_MS);
      assert.match(messageId, /^[0-9a-f-]{36}$/);
    }
    // What a queue is full for, it refuses with a nack.
    await channel.assertQueue(`${queue}.full`, {
      exclusive: true,
      maxLength: 0,
      arguments: { "x-overflow": "reject-publish" },
    });
    await channel.bindQueue(`${queue}.full`, exchange, "");
    await refused(own.schedule("1", after(60)), "the broker has refused it", "repeat it");
    await channel.deleteQueue(`${queue}.full`);
    await Promise.all(Array.from({ length: 20 }, (_, at) => own.schedule(at, after(60))));
    await own.close();
  });

  test("the listener reads the wire's vectors", async () => {
    const [body, exchange, events] = [readFileSync(`${FIXTURES}/order_closed.v1.json`), `${queue}.events`, []];
    await channel.assertExchange(exchange, "topic");
    const options = { namespace: queue, routingKeys: ["order.closed", "order.expiring"] };
    await listening(
      (event) => events.push(event),
      options,
      async () => {
        const send = (content, messageId, key = "order.closed") =>
          channel.publish(exchange, key, content, { messageId, type: `${key}.v1` });
        send(body, "1");
        send(Buffer.from("not JSON"), "2");
        send(body, undefined);
        send(body, "3", "order.expiring");
        await waitFor(() => events.at(-1)?.id === "3");
      },
    );
    await channel.deleteExchange(exchange);
    const read = {
      id: "1",
      type: "order.closed.v1",
      routingKey: "order.closed",
      body: JSON.parse(body),
      traceparent: undefined,
    };
    assert.deepEqual(events[0], read);
    assert.deepEqual(
      events.map((event) => event.id),
      ["1", "3"],
      "what is no event is rejected",
    );
  });

  test("the broker schedules", async () => {
    const [deadline, id] = [after(1), await order(after(1))];
    await publisher.schedule(id, deadline);
    await waitFor(async () => (await statusOf(id)) === "closed");
    const silent = createServer().listen(0, "127.0.0.1");
    await once(silent, "listening");
    const unanswered = new Publisher(`amqp://127.0.0.1:${silent.address().port}`);
    await refused(unanswered.schedule("1", deadline), "is not scheduled", "repeat it");
    silent.close();
    const away = new Publisher("amqp://127.0.0.1:1");
    await refused(away.schedule("1", deadline), "ECONNREFUSED", "repeat it when the broker can be reached");
    await refused(new Publisher("amqp://guest:wrong@127.0.0.1").schedule("1", deadline), "is not scheduled");
  });

  test("bad input is refused with advice", async () => {
    const deadline = after(600);
    const ways = [
      (...given) => schedule(client, ...given),
      (...given) => publisher.schedule(...given),
      (...given) => moveDeadline(client, ...given),
    ];
    for (const way of ways) {
      for (const bad of ["", "a\nb", "x".repeat(201), null, undefined]) {
        const { isFinal } = await refused(way(bad, deadline), "1 to 200 bytes", "as the orders table prints it");
        assert(isFinal);
      }
      for (const bad of [new Date(NaN), new Date(Date.UTC(10000, 0)), Date.now(), "2026-11-20", undefined]) {
        await refused(way("7", bad), "is not a Date in the years 1 to 9999");
      }
    }
    await refused(schedule(client, "7", new Date("9999-12-31T01:00:00Z")), "choose a deadline before the year 9999");
    await refused(publisher.schedule("7", after(11 * 366 * 86_400)), "further ahead than delay.max_delay");
    const elsewhere = new pg.Client({ connectionString: DATABASE_URL, options: "-c search_path=pg_catalog" });
    await elsewhere.connect();
    const setup = ["run `order-timeout setup`", "search_path"];
    await refused(schedule(elsewhere, "7", deadline), ...setup);
    await refused(moveDeadline(elsewhere, "7", deadline), ...setup);
    await refused(paymentReceived(elsewhere, "7", "stripe", "pi_1", 1, "EUR"), ...setup);
    await elsewhere.query("BEGIN");
    await refused(firstDelivery(elsewhere, randomUUID()), "run `CREATE TABLE handled_events");
    await refused(schedule(elsewhere, "7", deadline), "roll it back first");
    await elsewhere.end();
    await refused(schedule(elsewhere, "7", deadline), "is not scheduled", "connect again");
    for (const bad of [pool, undefined, DATABASE_URL]) {
      await assert.rejects(schedule(bad, "7", deadline), /^TypeError: give the client of the transaction/);
    }
  });
});
