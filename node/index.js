// Publishes jobs to vramq workers, puts their replies together, reconnects. README.md has an example.

import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import amqp from 'amqplib'
import {
  ClientClosed, ConnectError, Disconnected, DuplicateId, InvalidReply, JobFailed, JobTimeout, PublishRefused, PublishTimeout,
  QueueFull, ReplyQueueLost, Unroutable,
} from './errors.js'
import { Assembly, CONTENT_TYPE, JOBS_EXCHANGE, checkId, decodeReply, encodeJob } from './wire.js'

export * from './errors.js'

// Longer than a worker works on one job (24 minutes by default) after a long wait in the queue.
const TIMEOUT_MS = 3_600_000
const CONNECT_TIMEOUT_MS = 10_000
// How long the broker keeps the replies while this client is away.
const REPLY_QUEUE_EXPIRES_MS = 600_000
// Jobs published or about to be. Each costs its body until the confirm and its outputs until the last reply.
const JOBS_IN_FLIGHT = 1024
// Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
const REPLY_PREFETCH = 128
// Waits between attempts to reconnect, doubled from the first to the last, each with up to half of it as jitter.
const BACKOFF_MS = [100, 5000]
const CLOSE_MS = 3000
// AMQP's code for what does not exist.
const NOT_FOUND = 404

export class Job {
  #pending

  constructor(pending) {
    this.#pending = pending
    this.id = pending.id
    this.model = pending.model
  }

  get itemsDone() {
    return this.#pending.assembly.done
  }

  result() {
    return this.#pending.result
  }

  async *progress() {
    const pending = this.#pending
    for (let seen = 0; ; ) {
      if (pending.assembly.done > seen) {
        seen = pending.assembly.done
        yield { itemsDone: seen, items: pending.assembly.outputs.length }
      } else if (pending.ended) {
        return
      } else {
        await pending.changed()
      }
    }
  }
}

class Pending {
  ended = false
  confirmed = false
  #wake = () => {}
  #change

  constructor(id, model, items, timeoutMs, onEnd) {
    Object.assign(this, { id, model, onEnd, timeoutMs, assembly: new Assembly(items) })
    this.result = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }))
    // When the job has ended, one way or the other. It also keeps Node.js from reporting an error that no caller asks for.
    this.over = this.result.then(() => {}, () => {})
    this.step()
    if (timeoutMs) this.timer = setTimeout(() => this.fail(new JobTimeout(timeoutMs, this.assembly.done, items)), timeoutMs)
  }

  step() {
    this.#wake()
    this.#change = new Promise((resolve) => (this.#wake = resolve))
  }

  changed() {
    return this.#change
  }

  end(settle, value) {
    if (this.ended) return
    this.ended = true
    clearTimeout(this.timer)
    settle(value)
    this.step()
    this.onEnd(this)
  }

  fail(error) {
    if (!this.ended) this.error = error
    this.end(this.reject, error)
  }

  take({ properties, content }) {
    try {
      const reply = decodeReply(properties, content)
      if (!reply) return
      if (reply.progress) return this.onProgress && setImmediate(this.onProgress, reply.progress)
      if (reply.failed) return this.fail(new JobFailed(reply.failed.reason, reply.failed.error, this.assembly.outputs))
      this.assembly.add(reply)
    } catch (error) {
      return this.fail(new InvalidReply(`the reply to job ${this.id} cannot be read: ${error.message}`))
    }
    this.step()
    const { assembly, id, model } = this
    if (assembly.done < assembly.outputs.length) return
    const { worker, attempt, queuedMs, ranMs, modelRevision } = assembly.last
    this.end(this.resolve, { id, model, outputs: assembly.outputs, worker, attempt, queuedMs, ranMs, modelRevision })
  }
}

// The connections to the broker. They are opened together, and dropped together when one of them is lost. Publishing and
// consuming have one each: a broker that is short of memory stops reading from connections that publish, and on a shared one
// it would not read the acknowledgements of the replies that fill its memory.
class Session {
  connections = []
  isLost = false
  returned = new Set()

  constructor() {
    this.lost = new Promise((resolve) => {
      this.lose = () => {
        this.isLost = true
        resolve()
      }
    })
  }

  watch(thing) {
    thing.on('error', () => this.lose())
    thing.on('close', () => this.lose())
    return thing
  }

  async drop() {
    this.lose()
    const closing = this.connections.map((connection) => connection.close().catch(() => {}))
    await Promise.race([Promise.all(closing), sleep(CLOSE_MS, undefined, { ref: false })])
  }
}

export class Client {
  reconnects = 0
  strays = 0
  #urls
  #options
  #jobs = new Map()
  #waiting = []
  #inFlight = 0
  #session
  #opened
  #ended
  #hadQueue = false
  #userId

  static async connect(url, options = {}) {
    const client = new Client(url, options)
    client.#keep(await client.#open())
    return client
  }

  constructor(url, options) {
    const parts = /^(amqps?:\/\/)((?:[^@/]*@)?)([^/?]+)(.*)$/.exec(url)
    if (!parts) throw new ConnectError('the broker URL is not like amqp://user:password@host:5672/vhost', false)
    const [, scheme, credentials, hosts, rest] = parts
    this.broker = hosts
    this.#urls = hosts.split(',').map((host) => `${scheme}${credentials}${host}${rest}`)
    this.#options = {
      timeoutMs: TIMEOUT_MS, connectTimeoutMs: CONNECT_TIMEOUT_MS, replyQueueExpiresMs: REPLY_QUEUE_EXPIRES_MS,
      jobsInFlight: JOBS_IN_FLIGHT, reconnectForMs: Infinity, name: `vramq-node ${process.pid}`, anonymous: false, ...options,
    }
    const user = decodeURIComponent(credentials.slice(0, -1).split(':')[0])
    // Left out where there is none: the broker refuses an empty one.
    this.#userId = this.#options.anonymous || user === '' ? undefined : user
    this.replyQueue = `vramq.replies.client.${randomUUID()}`
  }

  async run(model, inputs, options) {
    return (await this.submit(model, inputs, options)).result()
  }

  async submit(model, inputs, options = {}) {
    const { id = randomUUID(), timeoutMs = this.#options.timeoutMs, onProgress } = options
    const params = onProgress ? { ...options.params, progress: true } : options.params
    const body = encodeJob(model, [...inputs], params)
    checkId(id)
    while (this.#inFlight >= this.#options.jobsInFlight) await new Promise((resolve) => this.#waiting.push(resolve))
    if (this.#jobs.has(id)) throw new DuplicateId(`job id ${id} is already in flight`)
    const pending = new Pending(id, model, inputs.length, timeoutMs, (ended) => this.#forget(ended))
    pending.onProgress = onProgress
    this.#jobs.set(id, pending)
    this.#inFlight += 1
    try {
      await this.#publish(pending, body, { ...options, replyTo: this.replyQueue })
    } catch (error) {
      pending.fail(error)
      throw error
    }
    return new Job(pending)
  }

  async publish(model, inputs, options = {}) {
    const { id = randomUUID(), timeoutMs = 60_000 } = options
    const body = encodeJob(model, [...inputs], options.params)
    const pending = new Pending(checkId(id), model, inputs.length, timeoutMs, () => {})
    try {
      await this.#publish(pending, body, options)
    } finally {
      pending.fail(new ClientClosed('published'))
    }
    return id
  }

  async close() {
    const session = this.#session
    this.#end(new ClientClosed('the client was closed'))
    if (!session || session.isLost) return
    // The queue expires by itself where this does not reach the broker.
    const deleted = session.replies.cancel(session.consumer).then(() => session.replies.deleteQueue(this.replyQueue))
    await Promise.race([deleted.catch(() => {}), sleep(CLOSE_MS, undefined, { ref: false })])
    await session.drop()
  }

  async #publish(pending, body, options) {
    while (!pending.ended) {
      const session = await this.#sessionFor(pending)
      if (!session) break
      const error = await Promise.race([publishOnce(session, pending, body, { ...options, userId: this.#userId }), pending.over])
      // A reply may come before the confirm.
      if (pending.ended) break
      if (session.returned.delete(pending.id)) {
        throw new Unroutable(`no queue for model ${pending.model}: is a worker for it configured?`)
      }
      if (!error) {
        pending.confirmed = true
        return
      }
      // amqplib's words for a nack; every other error means that the channel is gone.
      if (error.message === 'message nacked') throw new QueueFull(`the queue of model ${pending.model} is full; try again later`)
      session.lose()
      if (session.refusal?.code === NOT_FOUND) {
        throw new Unroutable(`no exchange ${JOBS_EXCHANGE}: was a worker ever started on this virtual host?`)
      }
      if (session.refusal) {
        throw new PublishRefused(`the broker refuses jobs for exchange ${JOBS_EXCHANGE}: ${session.refusal.message}`)
      }
    }
    if (this.#ended) throw this.#ended
    if (pending.error instanceof JobTimeout) {
      throw new PublishTimeout(`the broker did not confirm the job within ${pending.timeoutMs} ms`)
    }
  }

  async #sessionFor(pending) {
    while (!pending.ended) {
      if (this.#ended) throw this.#ended
      if (this.#session && !this.#session.isLost) return this.#session
      await Promise.race([this.#opened, pending.over])
    }
  }

  async #open() {
    let refused
    let unreachable
    for (const url of this.#urls) {
      const session = new Session()
      try {
        return await this.#openAt(url, session)
      } catch (error) {
        await session.drop()
        // The broker's own answer has a code, or comes during the handshake.
        if (/ACCESS_REFUSED|NOT_ALLOWED|Handshake terminated/.test(error.message)) refused = error
        else unreachable = error
      }
    }
    if (unreachable) throw new ConnectError(`cannot reach the broker at ${this.broker}: ${unreachable.message || unreachable.code}`, true)
    throw new ConnectError(`the broker at ${this.broker} refuses: ${refused.message}`, false)
  }

  async #openAt(url, session) {
    const { name, connectTimeoutMs, tls, replyQueueExpiresMs } = this.#options
    for (const what of ['replies', 'jobs']) {
      const clientProperties = { connection_name: `${name} (${what})` }
      // Without noDelay a small job waits for the acknowledgement of the packet before it.
      const options = { noDelay: true, timeout: connectTimeoutMs, clientProperties, ...tls }
      session.connections.push(session.watch(await amqp.connect(url, options)))
    }
    const [replies, jobs] = session.connections
    const missed = this.#hadQueue && !(await hasQueue(replies, this.replyQueue))
    session.replies = session.watch(await replies.createChannel())
    await session.replies.prefetch(REPLY_PREFETCH)
    await session.replies.assertQueue(this.replyQueue, { durable: true, arguments: { 'x-expires': replyQueueExpiresMs } })
    if (missed) {
      for (const pending of [...this.#jobs.values()]) {
        if (pending.confirmed) pending.fail(new ReplyQueueLost('the reply queue was lost, and with it any reply; the job itself may have run'))
      }
    }
    this.#hadQueue = true
    const { consumerTag } = await session.replies.consume(this.replyQueue, (message) => this.#take(session, message))
    session.consumer = consumerTag
    session.jobs = session.watch(await jobs.createConfirmChannel())
    session.jobs.on('return', ({ properties }) => session.returned.add(properties.messageId))
    session.jobs.on('error', (error) => (session.refusal = error))
    return session
  }

  async #keep(session) {
    for (;;) {
      this.#session = session
      let opened
      this.#opened = new Promise((resolve) => (opened = resolve))
      await session.lost
      await session.drop()
      try {
        if (this.#ended) return
        session = await this.#reopen()
      } catch (error) {
        this.#end(new Disconnected(`the connection to the broker is lost: ${error.message}`))
        return
      } finally {
        // Those who wait look again, and find the session, or why there is none.
        setImmediate(opened)
      }
      if (this.#ended) return session.drop()
      this.reconnects += 1
    }
  }

  async #reopen() {
    const since = Date.now()
    for (let wait = BACKOFF_MS[0]; ; wait = Math.min(2 * wait, BACKOFF_MS[1])) {
      try {
        return await this.#open()
      } catch (error) {
        if (this.#ended || Date.now() - since + wait > this.#options.reconnectForMs) throw error
      }
      await sleep(wait * (1 + Math.random() / 2))
    }
  }

  #take(session, message) {
    // The broker cancelled the consumer: the queue was deleted.
    if (message === null) return session.lose()
    const pending = this.#jobs.get(message.properties.correlationId)
    if (pending) pending.take(message)
    else this.strays += 1
    try {
      session.replies.ack(message)
    } catch {
      // The channel is gone; the broker delivers the reply again, and its items are dropped as duplicates.
    }
  }

  #forget(pending) {
    this.#jobs.delete(pending.id)
    this.#inFlight -= 1
    this.#waiting.shift()?.()
  }

  #end(error) {
    this.#ended ??= error
    for (const pending of [...this.#jobs.values()]) pending.fail(this.#ended)
  }
}

// undefined once the broker has confirmed the job, or the error.
function publishOnce(session, { id, model }, body, { replyTo, userId, priority, expirationMs, batchHint, traceparent, headers }) {
  const properties = {
    messageId: id, userId, correlationId: id, replyTo, priority, contentType: CONTENT_TYPE, persistent: true, mandatory: true,
    timestamp: Math.floor(Date.now() / 1000), ...(expirationMs !== undefined && { expiration: String(expirationMs) }),
    headers: { ...headers, ...(batchHint !== undefined && { 'batch-hint': batchHint }), ...(traceparent && { traceparent }) },
  }
  return new Promise((resolve) => {
    try {
      session.jobs.publish(JOBS_EXCHANGE, model, body, properties, (error) => resolve(error ?? undefined))
    } catch (error) {
      resolve(error)
    }
  })
}

async function hasQueue(connection, queue) {
  // On a channel of its own: the broker closes it if there is no such queue.
  const channel = await connection.createChannel()
  channel.on('error', () => {})
  try {
    await channel.checkQueue(queue)
  } catch {
    return false
  }
  await channel.close()
  return true
}
