-- Add the columns and indexes of qmq's watchdog to a table qmq_msg_queue with QMQ's columns on SQLite; QMQ's clients continue to work.
ALTER TABLE qmq_msg_queue ADD COLUMN reason VARCHAR(500);

ALTER TABLE qmq_msg_queue ADD COLUMN claim VARCHAR(128);

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim) WHERE claim IS NOT NULL;
