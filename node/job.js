// A job in flight: what is known of it, who waits for it, and the slot that it has.

import { Forgotten, InvalidReply, JobFailed, JobTimeout, Withdrawn } from './errors.js'
import { Assembly, decodeReply } from './wire.js'

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

  withdraw() {
    this.#pending.withdraw()
    this.#pending.fail(new Withdrawn(`job ${this.id} was withdrawn`))
  }

  forget() {
    this.#pending.forget()
  }
}

// What is to be called for each signal: with a listener for each job Node.js would warn of more than ten.
const aborts = new WeakMap()

// Has this called when the signal is aborted; returns what prevents it.
function whenAborted(signal, call) {
  let { calls, listener } = aborts.get(signal) ?? {}
  if (!calls) {
    calls = new Set()
    listener = () => [...calls].forEach((each) => each())
    aborts.set(signal, { calls, listener })
    signal.addEventListener('abort', listener)
  }
  calls.add(call)
  return () => {
    if (!calls.delete(call) || calls.size > 0) return
    signal.removeEventListener('abort', listener)
    aborts.delete(signal)
  }
}

// A job from the call that makes it until its last reply.
export class Pending {
  ended = false
  // `error` alone does not show it: a signal may be aborted with null as its reason.
  hasFailed = false
  confirmed = false
  // Whether its replies still come although nobody waits for them.
  isForgotten = false
  // Whether the broker may have it.
  sent = false
  #wake = () => {}
  #change
  #atEnd = []

  // `key` is the routing key: the model's name, unless its workers have another. `secret` withdraws the job; undefined if this client does
  // not.
  constructor({ id, model, key, items, timeoutMs, onProgress, signal, withdrawals, secret, encoding }) {
    Object.assign(this, { id, model, key, timeoutMs, onProgress, withdrawals, secret, encoding, assembly: new Assembly(items) })
    // For messages.
    this.destination = key === model ? `model ${model}` : `model ${model} with key ${key}`
    this.result = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }))
    // When the job has ended, one way or the other. It also keeps Node.js from reporting an error that no caller asks for.
    this.over = this.result.then(() => {}, () => {})
    this.endsAt = Date.now() + timeoutMs
    this.#step()
    if (timeoutMs !== Infinity) {
      const late = () => {
        // Nobody waits for it any more.
        this.withdraw()
        this.fail(new JobTimeout(timeoutMs, this.assembly.done, items))
      }
      const timer = setTimeout(late, timeoutMs)
      this.atEnd(() => clearTimeout(timer))
    }
    if (signal) {
      const abort = () => {
        this.withdraw()
        this.fail(signal.reason)
      }
      this.atEnd(whenAborted(signal, abort))
    }
  }

  // What is called when the job ends, before anybody learns of it.
  atEnd(call) {
    this.#atEnd.push(call)
  }

  #step() {
    this.#wake()
    this.#change = new Promise((resolve) => (this.#wake = resolve))
  }

  changed() {
    return this.#change
  }

  #end(settle, value) {
    if (this.ended) return
    this.ended = true
    for (const call of this.#atEnd) call()
    settle(value)
    this.#step()
  }

  // Takes the job back if it has not ended, and the broker may have it. The caller ends it next.
  withdraw() {
    if (this.ended || !this.sent || !this.secret) return
    const { id, secret } = this
    this.secret = undefined
    this.withdrawals.add(id, secret)
  }

  forget() {
    this.isForgotten = !this.ended
    this.fail(new Forgotten(`job ${this.id} was forgotten`))
  }

  fail(error) {
    if (!this.ended) Object.assign(this, { error, hasFailed: true })
    this.#end(this.reject, error)
  }

  // What the caller's function throws must not end the process.
  #report(progress) {
    if (!this.onProgress) return
    setImmediate(async () => {
      try {
        await this.onProgress(progress)
      } catch (error) {
        process.emitWarning(`onProgress of job ${this.id} failed: ${error?.stack ?? error}`, 'VramqWarning')
      }
    })
  }

  // False for the end of an earlier job with this id: its caller gave up on it, and has submitted it again.
  take({ properties, content }) {
    try {
      const reply = decodeReply(properties, content, this.encoding)
      if (!reply) return
      if (reply.failed?.reason === 'withdrawn' && this.secret) return false
      if (reply.progress) return this.#report(reply.progress)
      if (reply.failed) return this.fail(new JobFailed(reply.failed.reason, reply.failed.error, this.assembly.outputs))
      this.assembly.add(reply)
    } catch (error) {
      return this.fail(new InvalidReply(`the reply to job ${this.id} cannot be read: ${error.message}`))
    }
    this.#step()
    const { assembly, id, model } = this
    if (assembly.done < assembly.outputs.length) return
    const { outputs, modelRevisions } = assembly
    const { worker, attempt, queuedMs, ranMs } = assembly.last
    this.#end(this.resolve, { id, model, outputs, modelRevisions, worker, attempt, queuedMs, ranMs })
  }
}

// Bounds the jobs in flight. Jobs get their slots in the order in which they ask.
export class Slots {
  #holders = new Set()
  #waiting = new Map()

  constructor(count) {
    if (!Number.isSafeInteger(count) || count < 1) throw new RangeError(`jobsInFlight is ${count}, and has to be at least 1`)
    this.count = count
  }

  // Resolves when the job has its slot, to true, or has ended without one. A job that ends gives its slot back.
  async take(pending) {
    pending.atEnd(() => this.#giveBack(pending))
    if (pending.ended) return false
    if (this.#holders.size < this.count) this.#holders.add(pending)
    else await Promise.race([new Promise((resolve) => this.#waiting.set(pending, resolve)), pending.over])
    return this.#holders.has(pending)
  }

  #giveBack(pending) {
    this.#holders.delete(pending)
    this.#waiting.delete(pending)
    if (this.#holders.size >= this.count) return
    for (const [following, turn] of this.#waiting) {
      this.#waiting.delete(following)
      this.#holders.add(following)
      return turn()
    }
  }
}
