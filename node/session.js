// The connections of a client to the broker: how they are opened, watched and closed.

import { setTimeout as sleep } from 'node:timers/promises'
import amqp from 'amqplib'
import { CHANNELS_MAX, JobChannels } from './channels.js'
import { ConnectError } from './errors.js'

// Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
const REPLY_PREFETCH = 128
// How long the broker may take for what closing asks of it. Then it is not asked for more, and the connections are dropped.
export const CLOSE_MS = 3000
// How long the connections to a broker that did not answer may take to close.
export const SILENT_MS = 200
// In this time those who use a lost connection learn why from amqplib.
const LOST_MS = 1000
// What a timer of Node.js can wait, 24 days; more would be no wait at all.
export const TIMER_MS_MAX = 2 ** 31 - 1
// For so long half as many channels are opened, after the broker has refused one.
const LIMITED_FOR_MS = 600_000

// What the broker says when it refuses a login, or what the user may not do. Of what else it says, and amqplib repeats, nothing is a
// refusal: it goes away (CONNECTION_FORCED), or a part of it is down (INTERNAL_ERROR, NOT_FOUND of a queue).
const REFUSED = /ACCESS_REFUSED|NOT_ALLOWED/
// What amqplib says when the broker closes the connection instead of opening the virtual host. It keeps the broker's code and words to
// itself, so nobody knows whether the same call can succeed later.
const VHOST_CLOSED = /got <ConnectionClose/

// Waits for work, but not for longer. The timer keeps the process alive, so that what follows is done.
export async function within(ms, work) {
  const timer = new AbortController()
  try {
    await Promise.race([work, sleep(ms, undefined, { signal: timer.signal })])
  } finally {
    timer.abort()
  }
}

// What work gives, or an error when that takes longer.
async function inTime(ms, work) {
  let timer
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no answer within ${ms} ms`)), Math.min(ms, TIMER_MS_MAX))
  })
  try {
    return await Promise.race([work, late])
  } finally {
    clearTimeout(timer)
  }
}

// The connections to the broker. They are opened together, and dropped together when one of them is lost. Publishing and
// consuming have one each: a broker that is short of memory stops reading from connections that publish, and on a shared one
// it would not read the acknowledgements of the replies that fill its memory.
export class Session {
  connections = []
  isLost = false
  // What the broker said when it closed a channel or connection of jobs, an error with a code.
  fault = undefined
  // The channels on which jobs are published, and the jobs that wait for their confirm.
  jobs = undefined
  unconfirmed = new Set()

  constructor() {
    this.lost = new Promise((resolve) => (this.#lost = resolve))
  }

  #lost
  #gone = () => this.lose()

  lose() {
    if (this.isLost) return
    this.isLost = true
    this.#lost()
    this.jobs?.lose()
    const end = () => {
      for (const job of [...this.unconfirmed]) job.end(new Error('the connection was lost'))
    }
    if (this.unconfirmed.size > 0) setTimeout(end, LOST_MS)
  }

  watch(thing) {
    thing.on('error', this.#gone)
    thing.on('close', this.#gone)
    return thing
  }

  // It is going to be closed.
  unwatch(thing) {
    thing.off('close', this.#gone)
  }

  watchJobs(thing) {
    // amqplib does not call it an error when an operator closes a connection.
    for (const event of ['error', 'close']) {
      thing.on(event, (error) => {
        if (typeof error?.code === 'number') this.fault ??= error
      })
    }
    return this.watch(thing)
  }

  async drop(ms = CLOSE_MS) {
    this.lose()
    await within(ms, Promise.all(this.connections.map((connection) => connection.close().catch(() => {}))))
    // What the broker does not answer would keep the process alive.
    for (const { connection } of this.connections) {
      connection.heartbeater?.clear()
      connection.stream.destroy()
    }
  }
}

// Opens sessions. `take` is called with each message of the reply queue; `missed` when the queue of an earlier session did not exist
// any more, and was created again.
export class Connector {
  #urls
  #options
  #take
  #missed
  #hadQueue = false
  // The queue was not there, and that is not told yet.
  #isMissed = false
  // After the broker has refused a further channel: how many there may be, and until when.
  #channelsLimit = CHANNELS_MAX
  #limitedUntil = 0

  constructor(url, options, replyQueue, take, missed) {
    const parts = /^(amqps?:\/\/)((?:[^@/]*@)?)([^/?]+)(.*)$/.exec(url)
    if (!parts) throw new ConnectError('the broker URL is not like amqp://user:password@host:5672/vhost', false)
    const [, scheme, credentials, hosts, rest] = parts
    this.broker = hosts
    this.user = decoded(credentials.slice(0, -1).split(':')[0])
    this.replyQueue = replyQueue
    this.#urls = hosts.split(',').map((host) => `${scheme}${credentials}${host}${rest}`)
    this.#options = options
    this.#take = take
    this.#missed = missed
  }

  // A session with the first host that takes one.
  open() {
    return this.#openBy((url, session) => this.#openBoth(url, session))
  }

  // A session that only publishes, for a job that must not share a connection with others.
  openAlone() {
    return this.#openBy((url, session) => this.#openJobs(url, session, 'one job'))
  }

  async #openBy(steps) {
    let refused
    let unreachable
    for (const url of this.#urls) {
      const session = new Session()
      try {
        // amqplib's own limit is for the handshake alone: a broker that hangs behind it would be waited for until its heartbeats are missed.
        await inTime(this.#options.connectTimeoutMs, steps(url, session))
        return session
      } catch (thrown) {
        // If the broker refuses the channel for jobs, amqplib throws only that it is closed.
        const error = session.fault ?? thrown
        await session.drop()
        if (REFUSED.test(error.message)) refused = error
        else if (!VHOST_CLOSED.test(error.message)) unreachable = error
        else unreachable = new Error(`no vhost ${vhostOf(url)}, or none for this user, or it takes no more connections, or it is down`)
      }
    }
    if (unreachable) throw new ConnectError(`cannot reach the broker at ${this.broker}: ${unreachable.message || unreachable.code}`, true)
    throw new ConnectError(`the broker at ${this.broker} refuses: ${refused.message}`, false)
  }

  // In the order that leaves no gap: reply queue, prefetch, consumer, and only then publishing.
  async #openBoth(url, session) {
    const replies = session.watch(await this.#connect(url, session, 'replies'))
    const newlyMissed = this.#hadQueue && !this.#isMissed && !(await hasQueue(replies, this.replyQueue))
    const channel = session.watch(await replies.createChannel())
    session.replies = channel
    await channel.prefetch(REPLY_PREFETCH)
    // From here on also if this attempt fails: the next one may find the queue that this one creates.
    this.#isMissed ||= newlyMissed
    try {
      await channel.assertQueue(this.replyQueue, { durable: true, arguments: { 'x-expires': this.#options.replyQueueExpiresMs } })
    } catch (error) {
      // Nothing was created: the queue's node is down. The queue and the replies in it are there when it is back.
      if (newlyMissed && error.code === NOT_FOUND) this.#isMissed = false
      throw error
    }
    if (this.#isMissed) {
      this.#isMissed = false
      this.#missed()
    }
    this.#hadQueue = true
    const { consumerTag } = await channel.consume(this.replyQueue, (message) => this.#take(session, message))
    session.consumer = consumerTag
    await this.#openJobs(url, session, 'jobs')
  }

  async #openJobs(url, session, what) {
    const connection = session.watchJobs(await this.#connect(url, session, what))
    // If the broker refuses also the first one, nothing can be published.
    const first = await openChannel(session, connection)
    // One is left for withdrawals.
    const allowed = Math.max(1, connection.connection.channelMax - 1)
    const max = Math.min(Date.now() < this.#limitedUntil ? this.#channelsLimit : CHANNELS_MAX, allowed)
    const open = () => openChannel(session, connection).catch(() => session.lose())
    session.jobs = new JobChannels(first, open, (channel) => closeChannel(session, channel), max)
    session.lost.then(() => {
      const { count } = session.jobs
      if (session.fault?.code !== NOT_ALLOWED || count === 0) return
      // The broker allows no further channel: for now half as many have to be enough. Others of this user may need some, too.
      this.#channelsLimit = Math.max(1, count >> 1)
      this.#limitedUntil = Date.now() + LIMITED_FOR_MS
    })
  }

  async #connect(url, session, what) {
    const { name, connectTimeoutMs, tls } = this.#options
    const clientProperties = { connection_name: `${name} (${what})` }
    // Without noDelay a small job waits for the acknowledgement of the packet before it.
    const connection = await amqp.connect(url, { noDelay: true, timeout: connectTimeoutMs, clientProperties, ...tls })
    session.connections.push(connection)
    // It came after the time was over.
    if (session.isLost) await session.drop()
    return connection
  }

  // Deletes the reply queue, and closes the connections. The queue expires by itself where this does not reach the broker.
  async leave(session) {
    let isAnswered = session.isLost
    if (!isAnswered) {
      const deleted = session.replies.cancel(session.consumer).then(() => session.replies.deleteQueue(this.replyQueue))
      await within(CLOSE_MS, deleted.catch(() => {}).then(() => (isAnswered = true)))
    }
    await session.drop(isAnswered ? CLOSE_MS : SILENT_MS)
  }
}

function decoded(text) {
  try {
    return decodeURIComponent(text)
  } catch {
    throw new ConnectError('the user in the broker URL is not percent-encoded', false)
  }
}

function vhostOf(url) {
  return new URL(url).pathname.slice(1) || '/'
}

// A channel for jobs.
async function openChannel(session, connection) {
  const channel = session.watchJobs(await connection.createConfirmChannel())
  channel.on('return', ({ properties }) => {
    for (const job of session.unconfirmed) job.returned ||= job.channel === channel && job.id === properties.messageId
  })
  return channel
}

async function closeChannel(session, channel) {
  session.unwatch(channel)
  try {
    await channel.close()
  } catch {
    session.lose()
  }
}

// AMQP's codes for a queue that does not exist, or whose node is down, and for more channels than the broker allows.
const NOT_FOUND = 404
const NOT_ALLOWED = 530

async function hasQueue(connection, queue) {
  // On a channel of its own: the broker closes it if there is no such queue.
  const channel = await connection.createChannel()
  channel.on('error', () => {})
  try {
    await channel.checkQueue(queue)
  } catch (error) {
    if (error.code === NOT_FOUND) return false
    throw error
  }
  await channel.close()
  return true
}
