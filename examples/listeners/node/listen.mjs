// Prints each order that was closed, once. Needs amqplib, pg and the package in clients/node.
//
// Reads AMQP_URL and DATABASE_URL, and ends after EVENTS of them if that is set.
import { firstDelivery, listen } from "order-timeout";
import pg from "pg";

const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL });
const stop = new AbortController();
let wanted = Number(process.env.EVENTS ?? Infinity);

async function handle(event) {
  const client = await pool.connect();
  try {
    // One transaction: what is done about the event is committed with its id, or neither is.
    await client.query("BEGIN");
    if (await firstDelivery(client, event.id)) {
      // Your code. If it throws, the event is tried again.
      console.log(`closed: order ${event.body.order_id} by ${event.body.closed_by}`);
      wanted -= 1;
    }
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
  if (wanted === 0) stop.abort();
}

await pool.query("CREATE TABLE IF NOT EXISTS handled_events (id uuid PRIMARY KEY, handled_at timestamptz DEFAULT now())");
await listen(process.env.AMQP_URL, "shop.order-closed", handle, { signal: stop.signal });
await pool.end();
