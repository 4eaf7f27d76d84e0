"""The message path in Celery: a task that returns its argument, results over RabbitMQ, acks late.

    celery -A celery_echo worker --pool=solo        (from this folder; BROKER_URL in the environment)
    python celery_echo.py JOBS                      fills the queue, starts the worker, prints jobs per second
"""

import json
import os
import subprocess
import sys
import time

from celery import Celery
from kombu import Connection, Queue

app = Celery("bench", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=4,
    task_default_queue="vramq.bench.celery",
    result_persistent=True,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="echo")
def echo(text):
    return text


def main(jobs):
    with Connection(os.environ["BROKER_URL"]) as connection:
        channel = connection.channel()
        Queue("vramq.bench.celery", channel=channel).declare()
        channel.queue_purge("vramq.bench.celery")
    text = "x" * 980
    sent = [echo.apply_async((text,)) for _ in range(jobs)]
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "celery_echo", "worker", "--pool=solo", "--loglevel=ERROR",
         "--without-gossip", "--without-mingle", "--without-heartbeat"],
        cwd=os.path.dirname(os.path.abspath(__file__)),
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
    main(int(sys.argv[1]))
