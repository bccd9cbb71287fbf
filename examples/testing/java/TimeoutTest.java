// A shop's test with JUnit 5, and the extension that moves the clock that the worker reads. JDBC_URL says where.
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTimeoutPreemptively;

import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.UUID;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.AfterEachCallback;
import org.junit.jupiter.api.extension.BeforeEachCallback;
import org.junit.jupiter.api.extension.ExtensionContext;
import org.junit.jupiter.api.extension.RegisterExtension;

class TimeoutTest {
    static class Clock implements BeforeEachCallback, AfterEachCallback {
        Connection database;

        public void beforeEach(ExtensionContext context) throws SQLException {
            database = DriverManager.getConnection(System.getenv("JDBC_URL"));
        }

        public void afterEach(ExtensionContext context) throws SQLException {
            database.close();
        }

        void advance(Duration step) throws SQLException {
            ask("SELECT order_timeout_clock.advance(interval '" + step + "')::text");
        }

        String ask(String sql) throws SQLException {
            try (ResultSet row = database.createStatement().executeQuery(sql)) {
                row.next();
                return row.getString(1);
            }
        }
    }

    @RegisterExtension Clock clock = new Clock();

    @Test
    void unpaidOrderIsClosed() throws SQLException {
        // Your checkout instead.
        String id = UUID.randomUUID().toString();
        clock.ask("INSERT INTO orders (id, expires_at) VALUES ('" + id + "', now() + interval '30 min') RETURNING id");
        String status = "SELECT status FROM orders WHERE id = '" + id + "'";

        clock.advance(Duration.ofMinutes(29));
        assertEquals("unpaid", clock.ask(status));
        clock.advance(Duration.ofMinutes(1));
        assertTimeoutPreemptively(Duration.ofSeconds(10), () -> {
            while (!clock.ask(status).equals("closed")) Thread.sleep(20);
        });
    }
}
