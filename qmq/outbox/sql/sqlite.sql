-- Create the outbox on SQLite. To use another name, change it in each statement. Times are UTC.
CREATE TABLE qmq_msg_queue (
    id          INTEGER  NOT NULL PRIMARY KEY AUTOINCREMENT,    -- never reused
    content     TEXT     NOT NULL,                  -- the message, as JSON
    status      SMALLINT NOT NULL DEFAULT 0,        -- 0: to be sent; negative: parked
    error       INTEGER  NOT NULL DEFAULT 0,        -- failed attempts of the watchdog
    create_time TEXT     NOT NULL DEFAULT CURRENT_TIMESTAMP,
    update_time TEXT     NOT NULL DEFAULT CURRENT_TIMESTAMP,
    reason      VARCHAR(500),                       -- reason of parking or of the last failure
    claim       VARCHAR(128)                        -- the watchdog's batch with this row
);

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim) WHERE claim IS NOT NULL;
