// Publishes jobs to vramq workers, puts their replies together, reconnects. README.md has an example.

import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { encodingOf } from './encodings.js'
import { ClientClosed, Disconnected, DuplicateId, InvalidJob, JobTimeout, PublishTimeout, ReplyQueueLost } from './errors.js'
import { Job, Pending, Slots } from './job.js'
import { checkId, checkTimeout, messageProperties } from './message.js'
import { Publisher } from './publish.js'
import { CLOSE_MS, Connector, SILENT_MS, within } from './session.js'
import { checkName, encodeJob, inputList } from './wire.js'
import { DIGEST, Withdrawals, digestOf, newSecret } from './withdraw.js'

export * from './errors.js'
export { Job } from './job.js'

// Longer than a worker works on one job (24 minutes by default) after a long wait in the queue.
const TIMEOUT_MS = 3_600_000
const PUBLISH_TIMEOUT_MS = 60_000
const CONNECT_TIMEOUT_MS = 10_000
// How long the broker keeps the replies while this client is away.
const REPLY_QUEUE_EXPIRES_MS = 600_000
// Jobs published or about to be. Each costs its body until the confirm and its outputs until the last reply.
const JOBS_IN_FLIGHT = 1024
// Forgotten jobs whose ids are kept until their last replies; of more, the oldest are dropped.
const FORGOTTEN_MAX = 4096
// Waits before attempts to reconnect, doubled from the first to the last, each with up to half of it as jitter. A connection that
// lasted for longer than the last starts with the first again.
const BACKOFF_MS = [100, 5000]

export class Client {
  reconnects = 0
  strays = 0
  #options
  #connector
  #encoding
  #publisher
  #slots
  #withdrawals = new Withdrawals(() => this.#session)
  #userId
  // All that have not ended; and by id those whose replies come here.
  #pending = new Set()
  #jobs = new Map()
  // By id until when replies to forgotten jobs may come.
  #forgotten = new Map()
  #session
  #opened
  #keeper
  #ended
  #stopped = new AbortController()

  static async connect(url, options = {}) {
    const client = new Client(url, options)
    client.#encoding = await encodingOf(client.#options.encoding)
    client.#keeper = client.#keep(await client.#connector.open())
    return client
  }

  constructor(url, options) {
    this.#options = {
      timeoutMs: TIMEOUT_MS, connectTimeoutMs: CONNECT_TIMEOUT_MS, replyQueueExpiresMs: REPLY_QUEUE_EXPIRES_MS,
      jobsInFlight: JOBS_IN_FLIGHT, reconnectForMs: Infinity, name: `vramq-node ${process.pid}`, anonymous: false,
      encoding: 'json', ...given(options),
    }
    this.replyQueue = `vramq.replies.client.${randomUUID()}`
    this.#connector = new Connector(
      url, this.#options, this.replyQueue, (session, message) => this.#take(session, message), () => this.#loseReplies(),
    )
    this.broker = this.#connector.broker
    this.#publisher = new Publisher((pending) => this.#sessionFor(pending), () => this.#connector.openAlone())
    this.#slots = new Slots(this.#options.jobsInFlight)
    // Left out where there is none: the broker refuses an empty one.
    this.#userId = this.#options.anonymous || this.#connector.user === '' ? undefined : this.#connector.user
  }

  async run(model, inputs, options) {
    return (await this.submit(model, inputs, options)).result()
  }

  async submit(model, inputs, options = {}) {
    const { onProgress } = options
    if (onProgress !== undefined && typeof onProgress !== 'function') throw new InvalidJob('onProgress is not a function')
    const params = onProgress ? { ...options.params, progress: true } : options.params
    const replies = { ...options, params, replyTo: this.replyQueue, withdraws: true }
    const { pending, publish } = this.#prepare(model, inputs, this.#options.timeoutMs, replies)
    const taken = this.#jobs.has(pending.id) ? 'is already in flight'
      : this.#forgotten.get(pending.id) > Date.now() && 'is that of a job that was forgotten and has not been answered'
    if (taken) {
      pending.fail(new DuplicateId(`job id ${pending.id} ${taken}`))
      throw pending.error
    }
    this.#jobs.set(pending.id, pending)
    pending.atEnd(() => this.#leave(pending))
    await publish()
    return new Job(pending)
  }

  async publish(model, inputs, options = {}) {
    const { pending, publish } = this.#prepare(model, inputs, PUBLISH_TIMEOUT_MS, { ...options, onProgress: undefined, withdraws: false })
    await publish()
    pending.fail(new ClientClosed('published'))
    return pending.id
  }

  async close() {
    if (!this.#ended) for (const pending of this.#pending) pending.withdraw()
    this.#end(new ClientClosed('the client was closed'))
    this.#stopped.abort()
    // It may be about to connect.
    await within(3 * CLOSE_MS, this.#keeper)
    this.#withdrawals.stop()
  }

  #leave(pending) {
    this.#jobs.delete(pending.id)
    if (!pending.isForgotten) return
    if (this.#forgotten.size >= FORGOTTEN_MAX) this.#forgotten.delete(this.#forgotten.keys().next().value)
    this.#forgotten.set(pending.id, pending.endsAt)
  }

  // A job that was checked, and what publishes it.
  #prepare(model, inputs, timeout, options) {
    const list = inputList(inputs)
    const body = encodeJob(model, list, options.params, this.#encoding)
    const id = checkId(options.id === undefined ? randomUUID() : options.id)
    // A caller that names a digest has a secret of its own, and withdraws the job by itself.
    const secret = options.withdraws && options.headers?.[DIGEST] === undefined ? newSecret() : undefined
    const { contentType } = this.#encoding
    const properties = messageProperties({ ...options, id, userId: this.#userId, digest: secret && digestOf(secret), contentType })
    const timeoutMs = checkTimeout(options.timeoutMs ?? timeout)
    const key = options.key === undefined ? model : checkName(options.key, 'key')
    options.signal?.throwIfAborted()
    const publish = () => this.#publish(pending, body, properties)
    const { onProgress, signal } = options
    const pending = new Pending({
      id, model, key, items: list.length, timeoutMs, onProgress, signal, withdrawals: this.#withdrawals, secret,
      encoding: this.#encoding,
    })
    return { pending, publish }
  }

  // Returns once the broker has the job. However else this ends, the job has ended, too.
  async #publish(pending, body, properties) {
    this.#pending.add(pending)
    pending.atEnd(() => this.#pending.delete(pending))
    try {
      if (this.#ended) throw this.#ended
      if (!(await this.#slots.take(pending)) && pending.error instanceof JobTimeout) {
        throw new PublishTimeout(`${this.#slots.count} jobs are in flight, and this one had no slot within ${pending.timeoutMs} ms`)
      }
      await this.#publisher.publish(pending, body, properties)
    } catch (error) {
      pending.fail(error)
      throw error
    }
  }

  // The session, once there is one; undefined if the job ends first.
  async #sessionFor(pending) {
    while (!pending.ended) {
      if (this.#session && !this.#session.isLost) return this.#session
      await Promise.race([this.#opened, pending.over])
    }
  }

  // Keeps a session until the client ends.
  async #keep(session) {
    for (let wait = BACKOFF_MS[0]; ; ) {
      const since = Date.now()
      let opened
      this.#session = session
      this.#opened = new Promise((resolve) => (opened = resolve))
      await untilAborted(this.#stopped.signal, session.lost)
      if (this.#ended) {
        // Before the queue is gone: a withdrawal may come too late, and a reply without a queue is a dead letter.
        if (await this.#withdrawals.close()) return this.#connector.leave(session)
        return session.drop(SILENT_MS)
      }
      await session.drop()
      if (Date.now() - since > BACKOFF_MS[1]) wait = BACKOFF_MS[0]
      try {
        ;[session, wait] = await this.#reopen(wait)
      } catch (error) {
        this.#withdrawals.stop()
        return this.#end(new Disconnected(`the connection to the broker is lost: ${error.message}`, error.retryable !== false))
      } finally {
        // Those who wait look again, and find the session, or why there is none.
        setImmediate(opened)
      }
      this.reconnects += 1
    }
  }

  // A new session, and how long to wait before the one after it.
  async #reopen(wait) {
    for (const since = Date.now(); ; ) {
      await sleep(wait * (1 + Math.random() / 2), undefined, { signal: this.#stopped.signal })
      wait = Math.min(2 * wait, BACKOFF_MS[1])
      try {
        return [await this.#connector.open(), wait]
      } catch (error) {
        if (this.#ended || Date.now() - since + wait > this.#options.reconnectForMs) throw error
      }
    }
  }

  #take(session, message) {
    // The broker cancelled the consumer: the queue was deleted.
    if (message === null) return session.lose()
    const pending = this.#jobs.get(message.properties.correlationId)
    if (!pending || pending.take(message) === false) {
      this.strays += 1
      if (['done', 'failed'].includes(message.properties.type)) {
        this.#forgotten.delete(message.properties.correlationId)
        this.#withdrawals.ended(message.properties.correlationId)
      }
    }
    try {
      session.replies.ack(message)
    } catch {
      // The channel is gone; the broker delivers the reply again, and its items are dropped as duplicates.
    }
  }

  #loseReplies() {
    for (const pending of [...this.#jobs.values()]) {
      if (!pending.confirmed) continue
      pending.withdraw()
      pending.fail(new ReplyQueueLost('the reply queue was lost, and with it any reply; the job itself may have run'))
    }
  }

  #end(error) {
    this.#ended ??= error
    for (const pending of [...this.#pending]) pending.fail(this.#ended)
  }
}

// Options that are undefined are left out, as those that are not there.
function given(options) {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined))
}

// Waits for a promise, or until the signal is aborted. It leaves no listener: of more than ten Node.js warns.
async function untilAborted(signal, promise) {
  if (signal.aborted) return
  let abort
  const aborted = new Promise((resolve) => (abort = resolve))
  signal.addEventListener('abort', abort)
  try {
    await Promise.race([promise, aborted])
  } finally {
    signal.removeEventListener('abort', abort)
  }
}
