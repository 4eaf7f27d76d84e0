"""The message path in Celery: a task that returns its argument, results over RabbitMQ.

    python celery_echo.py JOBS POOL PROCESSES PREFETCH    fills the queue, starts the worker, prints jobs per second

POOL is `solo` or `prefork`, PREFETCH the jobs that the broker may send ahead for each process. BROKER_URL and MESSAGES are in the
environment. MESSAGES says what the broker is asked for: `classic` and `quorum` are durable queues of that type, with persistent messages
and acks late; with `transient`, the messages of a classic queue are not written to disk, and a task is acknowledged before it runs.
Gossip, mingle, heartbeats, events and rate limits are off; prefetch and transient messages are as Celery's guide to optimizing has them.
Results stay on: the job that is measured has a reply.
"""

import json
import os
import subprocess
import sys
import time

from celery import Celery
from kombu import Connection, Queue

MESSAGES = os.environ.get("MESSAGES", "classic")
QUEUE = f"vramq.bench.celery.{MESSAGES}"
IS_TRANSIENT = MESSAGES == "transient"
QUEUE_TYPE = "quorum" if MESSAGES == "quorum" else "classic"

app = Celery("bench", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.update(
    task_acks_late=not IS_TRANSIENT,
    task_default_delivery_mode="transient" if IS_TRANSIENT else "persistent",
    task_default_queue_type=QUEUE_TYPE,
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", 4)),
    task_default_queue=QUEUE,
    result_persistent=not IS_TRANSIENT,
    worker_disable_rate_limits=True,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="echo")
def echo(text):
    return text


def main(jobs, pool, processes, prefetch):
    # For a classic queue Celery passes no x-queue-type.
    arguments = {"x-queue-type": QUEUE_TYPE} if QUEUE_TYPE == "quorum" else None
    with Connection(os.environ["BROKER_URL"]) as connection:
        # What a run that was cut off has left would be run first.
        queue = Queue(QUEUE, channel=connection.channel(), queue_arguments=arguments)
        queue.declare()
        queue.purge()
    text = "x" * 980
    sent = [echo.apply_async((text,)) for _ in range(jobs)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "celery_echo", "worker", f"--pool={pool}", f"--concurrency={processes}", "--loglevel=ERROR",
         "--without-gossip", "--without-mingle", "--without-heartbeat"],
        cwd=os.path.dirname(os.path.abspath(__file__)),
        env=os.environ | {"PREFETCH": prefetch},
        stdout=subprocess.DEVNULL,
    )
    try:
        sent[0].get(timeout=60)
        started = time.perf_counter()
        for result in sent[1:]:
            result.get(timeout=60)
        print(json.dumps({"jobs_per_s": (jobs - 1) / (time.perf_counter() - started)}))
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
