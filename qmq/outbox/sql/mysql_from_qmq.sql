-- QMQ's own table qmq_msg_queue on MariaDB and MySQL gets what our watchdog needs; QMQ's clients go on using it.
ALTER TABLE qmq_msg_queue ADD COLUMN reason VARCHAR(500), ADD COLUMN claim VARCHAR(128);

CREATE INDEX qmq_msg_queue_due ON qmq_msg_queue (status, update_time, id);

CREATE INDEX qmq_msg_queue_claim ON qmq_msg_queue (claim);
