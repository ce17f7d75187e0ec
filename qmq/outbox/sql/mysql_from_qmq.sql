-- Add the columns and indexes of qmq's watchdog to QMQ's own table qmq_msg_queue on MariaDB and MySQL; QMQ's clients continue to work.
ALTER TABLE qmq_msg_queue ADD COLUMN reason VARCHAR(500), ADD COLUMN claim VARCHAR(128);

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim);
