// Prints each order that was closed, once. Needs com.rabbitmq:amqp-client.
//
// Reads AMQP_URL, and ends after EVENTS of them if that is set.
import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.DefaultConsumer;
import com.rabbitmq.client.Envelope;
import com.rabbitmq.client.ShutdownSignalException;
import java.nio.charset.StandardCharsets;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;

public class Listen {
    static final String QUEUE = "shop.order-closed";
    static final String URL = System.getenv().getOrDefault("AMQP_URL", "amqp://guest:guest@localhost:5672/%2f");
    static final long WANTED = Long.parseLong(System.getenv().getOrDefault("EVENTS", "" + Long.MAX_VALUE));
    // A real service keeps the ids in its database, in the transaction that handles the event.
    static final Set<String> HANDLED = new HashSet<>();

    // Your code, which reads the JSON with a library of your choice. If it throws, the event is delivered again.
    static void handle(String event) {
        System.out.println("closed: " + event);
    }

    static void listen() throws Exception {
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(URL);
        // The loop in main connects again. The client's own recovery would hide a deleted queue.
        factory.setAutomaticRecoveryEnabled(false);
        try (Connection connection = factory.newConnection()) {
            Channel channel = connection.createChannel();
            // A queue of this service's own: it keeps the events while the service does not run.
            channel.queueDeclare(QUEUE, true, false, false, Map.of("x-queue-type", "quorum"));
            channel.queueBind(QUEUE, "order.events", "order.closed");
            channel.basicQos(100);
            CompletableFuture<Void> ended = new CompletableFuture<>();
            channel.basicConsume(QUEUE, false, new DefaultConsumer(channel) {
                @Override
                public void handleConsumeOk(String tag) {
                    System.out.println("listening: " + QUEUE);
                }

                @Override
                public void handleDelivery(String tag, Envelope envelope, AMQP.BasicProperties properties, byte[] body) {
                    try {
                        // Events are delivered at least once, each under one message id.
                        if (!HANDLED.contains(properties.getMessageId())) {
                            handle(new String(body, StandardCharsets.UTF_8));
                            HANDLED.add(properties.getMessageId());
                        }
                        // After the event has been handled, or it would be lost with this process.
                        channel.basicAck(envelope.getDeliveryTag(), false);
                        if (HANDLED.size() >= WANTED) {
                            ended.complete(null);
                        }
                    } catch (Exception fault) {
                        ended.completeExceptionally(fault);
                    }
                }

                // The queue was deleted.
                @Override
                public void handleCancel(String tag) {
                    ended.completeExceptionally(new Exception("the broker cancelled the consumer"));
                }

                @Override
                public void handleShutdownSignal(String tag, ShutdownSignalException signal) {
                    ended.completeExceptionally(signal);
                }
            });
            ended.get();
            // Sends the last acknowledgement before the connection is closed.
            channel.close();
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        while (HANDLED.size() < WANTED) {
            try {
                listen();
            } catch (InterruptedException interrupted) {
                throw interrupted;
            } catch (Exception fault) {
                // The broker restarts, the network fails, or the queue is deleted. The broker delivers again what was
                // not acknowledged.
                System.out.println("connecting again in a second: " + fault.getMessage());
                Thread.sleep(1000);
            }
        }
    }
}
