import { randomUUID } from 'node:crypto'
import amqp from 'amqplib'
const [url, model] = process.argv.slice(2)
const connection = await amqp.connect(url)
const channel = await connection.createChannel()
const { queue: replyTo } = await channel.assertQueue('', { exclusive: true })
channel.consume(replyTo, async ({ content, properties: { type } }) => {
  const { outputs, error } = JSON.parse(content)
  for (const item of outputs ?? [{ error }]) console.log(type, String(Object.values(item)[0]).slice(0, 60))
  if (type !== 'part') await connection.close()
}, { noAck: true })
const job = { model, inputs: ['A man is eating food.', 'Someone has a meal.'] }
channel.publish('vramq.jobs', model, Buffer.from(JSON.stringify(job)), { messageId: randomUUID(), replyTo, persistent: true })
