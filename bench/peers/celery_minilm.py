"""MiniLM on PyTorch in Celery: a task that embeds the texts of a job, results over RabbitMQ, acks late.

    python celery_minilm.py TEXT-FILE LINES TEXTS-EACH    starts the worker, publishes all, prints texts per second

MODEL, THREADS and BROKER_URL are in the environment. The pool is `solo`, as one process has one model.
"""

import json
import os
import subprocess
import sys
import time

from celery import Celery
from kombu import Connection, Queue

# PyTorch encodes so many texts at a time, sorted by length: larger batches only pad more on a CPU.
BATCH = 8

app = Celery("minilm", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=4,
    task_default_queue="vramq.bench.celery-minilm",
    result_persistent=True,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
)
model = None


@app.task(name="embed")
def embed(texts):
    global model
    if model is None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(int(os.environ["THREADS"]))
        model = SentenceTransformer(os.environ["MODEL"], device="cpu")
    return model.encode(texts, batch_size=BATCH, show_progress_bar=False).tolist()


def main(path, lines, each):
    texts = open(path, encoding="utf-8").read().splitlines()[:lines]
    jobs = [texts[start : start + each] for start in range(0, len(texts), each)]
    with Connection(os.environ["BROKER_URL"]) as connection:
        # What a run that was cut off has left would be run first.
        queue = Queue("vramq.bench.celery-minilm", channel=connection.channel())
        queue.declare()
        queue.purge()
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "celery_minilm", "worker", "--pool=solo", "--loglevel=ERROR",
         "--without-gossip", "--without-mingle", "--without-heartbeat"],
        cwd=os.path.dirname(os.path.abspath(__file__)),
        stdout=subprocess.DEVNULL,
    )
    try:
        for result in [embed.delay(job) for job in jobs[:3]]:
            result.get(timeout=300)
        started = time.perf_counter()
        for result in [embed.delay(job) for job in jobs]:
            result.get(timeout=300)
        print(json.dumps({"texts_per_s": len(texts) / (time.perf_counter() - started)}))
    finally:
        worker.terminate()
        worker.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
