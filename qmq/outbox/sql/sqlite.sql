-- The outbox on SQLite, from nothing. With another name, change it in each statement. Times are UTC.
CREATE TABLE qmq_msg_queue (
    id          INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,    -- never used twice
    content     TEXT     NOT NULL,                  -- the message, as JSON
    status      SMALLINT NOT NULL DEFAULT 0,        -- 0: to be sent; below: parked
    error       INTEGER  NOT NULL DEFAULT 0,        -- failed tries of the watchdog
    create_time TEXT     NOT NULL DEFAULT CURRENT_TIMESTAMP,
    update_time TEXT     NOT NULL DEFAULT CURRENT_TIMESTAMP,
    reason      VARCHAR(500),                       -- why it is parked, or failed last
    claim       VARCHAR(128)                        -- the watchdog's batch that it travels in
);

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim) WHERE claim IS NOT NULL;
