import os

import torch
from celery import Celery
from sentence_transformers import SentenceTransformer

app = Celery("tasks", broker=os.environ["BROKER_URL"], backend="rpc://")
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1)
model = None


@app.task(bind=True, max_retries=5)
def embed(self, texts):
    global model
    try:
        model = model or SentenceTransformer("all-MiniLM-L6-v2")
        return model.encode(texts, batch_size=len(texts)).tolist()
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise self.retry(exc=error, countdown=10)
