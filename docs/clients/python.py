import json, sys, uuid, pika
url, model = sys.argv[1:3]
connection = pika.BlockingConnection(pika.URLParameters(url))
channel = connection.channel()
replies = channel.queue_declare("", exclusive=True).method.queue
body = json.dumps({"model": model, "inputs": ["A man is eating food.", "Someone has a meal."]})
properties = pika.BasicProperties(message_id=str(uuid.uuid4()), reply_to=replies, delivery_mode=2)
channel.basic_publish("vramq.jobs", model, body, properties)
for method, reply, body in channel.consume(replies, auto_ack=True):
    for item in json.loads(body).get("outputs", [{"failed": body.decode()}]):
        print(reply.type, str(next(iter(item.values())))[:60])
    if reply.type != "part":
        break
