"""Publishes a job in MessagePack, and checks the reply. With pika and msgpack alone: no code of this project.

    python tests/foreign/msgpack_job.py AMQP_URL MODEL

The model answers with its inputs. Prints the reply's type.
"""

import sys

import msgpack
import pika

url, model = sys.argv[1:]
inputs = ["a text, 漢字", {"bytes": b"\0\xff"}, {"uri": "s3://bucket/key"}]
outputs = [{"json": "a text, 漢字"}, {"bytes": b"\0\xff", "media_type": "application/octet-stream"}, {"uri": "s3://bucket/key"}]

channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
replies = channel.queue_declare("", exclusive=True).method.queue
# The content type that Celery's library writes.
properties = pika.BasicProperties(
    message_id="job", reply_to=replies, delivery_mode=2, content_type="application/x-msgpack"
)
channel.basic_publish("vramq.jobs", model, msgpack.packb({"model": model, "inputs": inputs}), properties)
for _, reply, body in channel.consume(replies, auto_ack=True, inactivity_timeout=60):
    assert reply is not None, "no reply within a minute"
    assert reply.content_type == "application/msgpack", reply.content_type
    assert msgpack.unpackb(body) == {"model": model, "outputs": outputs}, body
    print(reply.type)
    break
