-- Create the outbox on MariaDB and MySQL. To use another name or database, change it in each statement.
CREATE TABLE qmq_msg_queue (
    id          BIGINT       NOT NULL AUTO_INCREMENT PRIMARY KEY,
    content     LONGTEXT     NOT NULL,              -- the message, as JSON
    status      SMALLINT     NOT NULL DEFAULT 0,    -- 0: to be sent; negative: parked
    error       INT UNSIGNED NOT NULL DEFAULT 0,    -- failed attempts of the watchdog
    create_time DATETIME     NOT NULL DEFAULT CURRENT_TIMESTAMP,
    update_time TIMESTAMP    NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
    reason      VARCHAR(500),                       -- reason of parking or of the last failure
    claim       VARCHAR(128)                        -- the watchdog's batch with this row
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim);
