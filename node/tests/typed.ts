// Uses the package as its README says. The compiler has to find nothing wrong, and to find wrong what is marked so. It is not run.

import { Client, ConnectError, Job, JobFailed, JobTimeout, VramqError, type Output, type Result } from 'vramq'

const client: Client = await Client.connect('amqp://localhost', { timeoutMs: 5000, tls: { ca: 'PEM' }, encoding: 'msgpack' })
const { outputs } = await client.run('m', ['a text', new Uint8Array(1), Buffer.from('b'), { uri: 'x' }, { json: [1, null] }])
console.log(outputs[0].embedding)
for (const output of outputs) {
  if (output.embedding) console.log(output.embedding.length, output.dtype)
  if ('sparse' in output && output.sparse) console.log(output.sparse.indices[0])
  if (output.bytes) console.log(output.bytes.byteLength, output.mediaType)
}
const job: Job = await client.submit('m', ['a'], {
  onProgress: ({ item, fraction, note }) => console.log(item + 1, fraction, note.length),
  signal: AbortSignal.timeout(1000),
})
for await (const { itemsDone, items } of job.progress()) console.log(itemsDone / items)
try {
  const result: Result = await job.result()
  console.log(result.queuedMs + 1, result.modelRevisions.join().length)
} catch (error) {
  if (error instanceof JobFailed) console.log(error.reason.length, error.outputs[0]?.embedding, error.retryable)
  else if (error instanceof JobTimeout) console.log(error.itemsDone + error.items)
  else if (error instanceof ConnectError || error instanceof VramqError) console.log(error.message)
}
const id: string = await client.publish('m', ['a'], { replyTo: 'q', priority: 1, appId: 'shop' })
console.log(id, client.reconnects + client.strays, client.replyQueue.length)
// @ts-expect-error an input is no number
await client.run('m', [1])
// @ts-expect-error no such option
await client.run('m', ['a'], { tiemoutMs: 1 })
// @ts-expect-error only `publish` has a reply queue
await client.submit('m', ['a'], { replyTo: 'q' })
// @ts-expect-error no such encoding
await Client.connect('amqp://localhost', { encoding: 'pickle' })
// @ts-expect-error a client is made by `connect`
new Client()
await client.close()
