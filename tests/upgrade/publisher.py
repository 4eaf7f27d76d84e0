"""A foreign client that publishes jobs without a pause, and keeps a ledger of their replies."""

import json
import threading
import uuid
from array import array
from queue import SimpleQueue

import pika

from deployed import MODEL, Failed, ensure, until
from programs import FIXTURES, FOLDERS

REPLIES = "vramq.replies.client.upgrade"
# The message behind the last reply.
MARK = "mark"
PAUSE_S = 0.1
# Every tenth job has so many texts, of some ten tokens each, that it is large.
TEXTS, LARGE_TEXTS, LARGE_EVERY = 3, 80, 10
# The tests of the encoder have narrower bounds. Here it is enough that the vector is that of this text.
FAR = 1e-4


def reference(fixture):
    """The vectors of sentence-transformers, by text."""
    texts = json.loads((FIXTURES / fixture / "texts.json").read_text())
    numbers = array("f", (FIXTURES / fixture / "vectors.f32").read_bytes())
    width = len(numbers) // len(texts)
    return {text: numbers[row * width : (row + 1) * width] for row, text in enumerate(texts)}


VECTORS = {model: reference(fixture) for model, fixture in FOLDERS.items()}


class Job:
    """A job, and the replies to it."""

    def __init__(self, model, texts):
        self.model, self.texts = model, texts
        # How often each text was answered.
        self.answers = [0] * len(texts)
        self.done = 0
        self.attempt = None
        self.reasons = []
        # A dead letter that nobody retries has no answer.
        self.wants_answer = True
        self.wanted_reasons = []

    def note(self, kind, headers, body):
        """A reply to it."""
        if kind == "failed":
            self.reasons.append(body["reason"])
            return
        self.done += kind == "done"
        self.attempt = headers["attempt"]
        for index, output in enumerate(body["outputs"], headers["offset"]):
            self.answers[index] += 1
            text = self.texts[index]
            far = max(map(lambda one, other: abs(one - other), output["embedding"], VECTORS[self.model].get(text, ())), default=0)
            ensure(far < FAR, f"the vector of {text!r} is off by {far}")

    def is_answered(self):
        return self.done > 0

    def is_settled(self):
        return self.is_answered() >= self.wants_answer and len(self.reasons) >= len(self.wanted_reasons)

    def fault(self):
        """What is wrong with the replies to it, if all of them have come."""
        wanted = 1 if self.wants_answer else 0
        if self.done != wanted or any(count != wanted for count in self.answers) or self.reasons != self.wanted_reasons:
            return f"{self.done} last replies, answers by text {self.answers}, reasons {self.reasons}"
        return None


class Publisher(threading.Thread):
    """Publishes for as long as `publishes` is true."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.connection = pika.BlockingConnection(pika.URLParameters(url + "?heartbeat=0"))
        self.channel = self.connection.channel()
        self.channel.confirm_delivery()
        self.channel.queue_declare(REPLIES, durable=True)
        self.channel.basic_consume(REPLIES, self.reply, auto_ack=True)
        self.jobs = {}
        self.asked = SimpleQueue()
        self.publishes = True
        self.has_read_all = False
        self.error = None

    def run(self):
        try:
            texts = sorted(VECTORS[MODEL])
            while not self.has_read_all:
                while not self.asked.empty():
                    self.publish(*self.asked.get())
                count = len(self.jobs)
                size = LARGE_TEXTS if count % LARGE_EVERY == 0 else TEXTS
                if self.publishes:
                    self.publish(uuid.uuid4().hex, MODEL, [texts[(count + place) % len(texts)] for place in range(size)], {})
                self.connection.sleep(PAUSE_S)
        # Whatever it is, the checks end with it.
        except Exception as error:
            self.error = error

    def publish(self, job, model, texts, properties):
        """A queue that is missing or full is an error."""
        self.jobs[job] = Job(model, texts)
        body = properties.pop("body", None) or json.dumps({"model": model, "inputs": texts})
        about = {"message_id": job, "reply_to": REPLIES, "delivery_mode": 2, "user_id": "guest", "content_type": "application/json"}
        self.channel.basic_publish("vramq.jobs", model, body, pika.BasicProperties(**about | properties), mandatory=True)

    def reply(self, _channel, _method, properties, body):
        if properties.type == MARK:
            self.has_read_all = True
            return
        self.jobs[properties.correlation_id].note(properties.type, properties.headers, json.loads(body))

    def submit(self, job, model, texts, **properties):
        """Publishes a job besides, with this id and perhaps another body, and gives its entry in the ledger."""
        self.asked.put((job, model, texts, properties))
        return self.until(f"the job {job} is published", lambda: self.jobs.get(job))

    def answered(self, job, model, texts):
        """The same, and waits for the answer."""
        self.until(f"the job {job} is answered", self.submit(job, model, texts).is_answered)

    def until(self, what, look):
        """As `until`, but at once an error if the thread has ended by one."""

        def alive():
            ensure(not self.error, f"the publisher ended: {self.error!r}")
            return look()

        return until(what, alive)

    def settled(self):
        """Waits until all jobs of before now have the replies that they should have."""
        jobs = list(self.jobs.items())
        try:
            self.until("all jobs are settled", lambda: all(job.is_settled() for _, job in jobs))
        except Failed as error:
            waiting = [name for name, job in jobs if not job.is_settled()]
            raise Failed(f"{error}: {len(waiting)} of {len(jobs)} wait for replies, such as {waiting[:3]}") from error

    def faults(self, broker):
        """The last of it: what is wrong with the replies to all jobs. To be asked when nothing is left that could reply."""
        broker.send(REPLIES, MARK)
        self.until("the last reply is read", lambda: self.has_read_all)
        return [f"{name}: {fault}" for name, job in self.jobs.items() if (fault := job.fault())]
