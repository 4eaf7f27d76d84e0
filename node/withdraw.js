// Takes back jobs whose callers have given up on them: docs/wire.md of the project, "Withdrawals".

import { Buffer } from 'node:buffer'
import { createHash, randomBytes } from 'node:crypto'
import { CLOSE_MS, within } from './session.js'

const EXCHANGE = 'vramq.withdrawals'
// The header of a job with the digest of its secret.
export const DIGEST = 'vramq-withdrawal'
// Withdrawn jobs whose end is awaited; of more, the oldest are not repeated any more.
const WITHDRAWN_MAX = 4096
// How often a withdrawal is repeated until its job has ended, and for how long: a worker that joins misses one for no longer than
// that, and a job that the broker itself removed never ends.
const REPEAT_MS = 5000
const REPEAT_FOR_MS = 3_600_000
// How long workers remember a withdrawal.
const REMEMBERED_MS = 3_600_000
// How long closing waits for the ends of withdrawn jobs. A worker that is not busy answers within milliseconds; the ends of jobs that
// wait in a queue are not to be waited for.
const ENDS_MS = 1000
// Before a flush itself gives up, after CLOSE_MS.
const MARGIN_MS = 100

export function newSecret() {
  return randomBytes(32).toString('hex')
}

export function digestOf(secret) {
  return createHash('sha256').update(secret).digest('hex')
}

// The jobs that were withdrawn and have not ended. Their withdrawals are published, and repeated.
export class Withdrawals {
  #session
  // By the job's id: the secret, since when, and whether the broker may have it.
  #open = new Map()
  #timer
  #flushing = Promise.resolve()
  #isDue = false
  // The channel for a session, and the session that it belongs to.
  #channel
  #of
  // The session in which the broker did not take the last attempt, and the error that was warned of last.
  #refusedIn
  #warned
  #whenOver = () => {}

  // `session` gives the client's session, undefined while there is none.
  constructor(session) {
    this.#session = session
  }

  // Withdraws a job until `ended` names it.
  add(id, secret) {
    if (this.#open.size >= WITHDRAWN_MAX) this.ended(this.#open.keys().next().value)
    this.#open.set(id, { secret, since: Date.now(), isSent: false })
    // What is withdrawn in one turn is published at once.
    if (!this.#isDue) {
      this.#isDue = true
      setImmediate(() => this.#flush(false))
    }
    this.#timer ??= setInterval(() => this.#flush(true), REPEAT_MS).unref()
  }

  // The job has ended: its withdrawal is not repeated any more.
  ended(id) {
    if (this.#open.delete(id) && this.#open.size === 0) this.#rest()
  }

  // Waits until all are published and have ended, for a short time. False if the broker does not take them.
  async close() {
    this.#flush(true)
    let isTaken = false
    await within(CLOSE_MS - MARGIN_MS, this.#flushing.then(() => (isTaken = true)))
    if (!isTaken) {
      this.stop()
      return false
    }
    const session = this.#session()
    if (this.#open.size > 0 && session && !session.isLost && session !== this.#refusedIn) {
      const over = new Promise((resolve) => (this.#whenOver = resolve))
      await within(ENDS_MS, over)
    }
    this.stop()
    return true
  }

  stop() {
    this.#open.clear()
    this.#rest()
  }

  #rest() {
    clearInterval(this.#timer)
    this.#timer = undefined
    this.#whenOver()
  }

  #flush(repeats) {
    this.#isDue = false
    this.#flushing = this.#flushing.then(() => this.#publish(repeats))
  }

  async #publish(repeats) {
    const session = this.#session()
    if (this.#open.size === 0 || !session || session.isLost) return
    // After a refusal new ones wait for the next repeat: the broker closes the channel each time.
    if (session === this.#refusedIn && !repeats) return
    let channel
    try {
      if (session !== this.#of || !this.#channel) {
        repeats = true
        this.#channel = await this.#openOn(session)
        this.#of = session
      }
      channel = this.#channel
      const now = Date.now()
      for (const [id, job] of this.#open) {
        if (now - job.since > REPEAT_FOR_MS) this.ended(id)
        else if (repeats || !job.isSent) publishOn(channel, id, job)
      }
      await within(CLOSE_MS, channel.waitForConfirms())
      if (this.#channel === channel) this.#refusedIn = undefined
    } catch (error) {
      // What closed the channel has been noted already.
      if (this.#channel === channel) this.#refused(session, error)
    }
  }

  // On a channel of its own, which the broker closes if it refuses: jobs go on.
  async #openOn(session) {
    const channel = await session.connections.at(-1).createConfirmChannel()
    const gone = (error) => this.#channel === channel && this.#refused(session, error)
    channel.on('error', gone)
    channel.on('close', gone)
    return channel
  }

  #refused(session, error) {
    this.#channel = undefined
    this.#refusedIn = session
    // With the connection lost they are published on the next one.
    if (error && !session.isLost && error.message !== this.#warned) {
      this.#warned = error.message
      const text = 'the broker does not take withdrawals of jobs, trying again: these jobs may run although their callers have given up. ' +
        `The exchange ${EXCHANGE} is missing, or the client's user may not write to it: ${error.message}`
      process.emitWarning(text, 'VramqWarning')
    }
    this.#whenOver()
  }
}

// The exchange is not declared: workers do that, and publishers need no permission but to write to it.
function publishOn(channel, id, job) {
  job.isSent = true
  const body = Buffer.from(JSON.stringify({ job: id, secret: job.secret }))
  const options = { type: 'withdraw', contentType: 'application/json', expiration: String(REMEMBERED_MS) }
  channel.publish(EXCHANGE, '', body, options)
}
