// Publishes jobs until the broker has them, or has said why not.

import { setTimeout as sleep } from 'node:timers/promises'
import {
  InvalidJob, InvalidReply, JobFailed, JobTimeout, PublishRefused, PublishTimeout, QueueFull, Unroutable,
} from './errors.js'
import { JOBS_EXCHANGE } from './wire.js'

// AMQP's codes by which the broker closes a channel: no permission, nothing there, and something wrong with what was sent.
const ACCESS_REFUSED = 403
const NOT_FOUND = 404
const PRECONDITION_FAILED = 406
// With these the broker closes a channel or a connection over something that was sent on it: also frames, syntax, commands and
// resources, and what is not implemented. Which of several jobs that was it does not say.
const BLAMES = [PRECONDITION_FAILED, 501, 502, 503, 505, 506, 540]
// A broker closes connections with these codes, whatever was published on them: for an operator or because it shuts down, and over a channel
// more than the user may have.
const FORCED = [320, 530]
// So often a connection may be lost without a reason while a job is being published on it, before the job goes alone. It is never refused
// for such losses: networks and brokers fail as well, and a broker that is short of memory lets jobs wait for long.
const LOSSES_MAX = 2
// Before another attempt to publish a job alone: the broker may limit how many connections a user has.
const ALONE_WAIT_MS = 1000
// So many jobs are published alone at a time, each on a connection.
const ALONE_MAX = 8

// Publishes on the session that jobs share. A job that may have ended a session is then published alone, on a connection of its own:
// then no other job is ended by it, and what the broker says is about this job.
export class Publisher {
  #sessions
  #openAlone
  // The last job of each lane in which jobs are published alone, one after the other; and how often a lane was taken.
  #lanes = Array.from({ length: ALONE_MAX }, () => Promise.resolve())
  #next = 0

  // `sessions` waits for the shared session, `openAlone` opens one for a single job.
  constructor(sessions, openAlone) {
    this.#sessions = sessions
    this.#openAlone = openAlone
  }

  // Returns once the broker has the job, or the job was answered before that.
  async publish(pending, body, properties) {
    for (let losses = 0; losses < LOSSES_MAX; ) {
      const session = await this.#sessions(pending)
      const lost = session && (await publishOnce(session, pending, body, properties))
      if (!lost) return ended(pending)
      if (lost.blame) losses = LOSSES_MAX
      else if (!lost.isForced) losses += 1
    }
    await Promise.race([this.#publishAlone(pending, body, properties), pending.over])
    ended(pending)
  }

  async #publishAlone(pending, body, properties) {
    while (!pending.ended) {
      const lost = await this.#inLane(() => this.#attemptAlone(pending, body, properties))
      if (!lost) return
      if (lost.blame) throw new PublishRefused(`the broker refuses this job: ${lost.blame}`)
      await Promise.race([sleep(ALONE_WAIT_MS), pending.over])
    }
  }

  // One attempt at a time in each lane; between its attempts a job gives its place to others.
  #inLane(attempt) {
    const lane = this.#next++ % this.#lanes.length
    const made = this.#lanes[lane].catch(() => {}).then(attempt)
    this.#lanes[lane] = made
    return made
  }

  async #attemptAlone(pending, body, properties) {
    // While the broker is away, its return is waited for where all wait for it.
    if (!(await this.#sessions(pending))) return undefined
    const session = await this.#openAlone().catch(() => undefined)
    if (!session) return {}
    try {
      // It may have ended meanwhile, and is not to run then.
      return pending.ended ? undefined : await publishOnce(session, pending, body, properties)
    } finally {
      await session.drop()
    }
  }
}

// undefined once the broker has confirmed the job, or the job has ended. If the connection was lost: what the broker said, if it was
// about something published; and whether the broker closed it for a reason of its own.
async function publishOnce(session, pending, body, properties) {
  const outcome = await Promise.race([confirm(session, pending, body, properties), pending.over])
  // A reply may come before the confirm.
  if (!outcome || pending.ended) return undefined
  // Whatever ended the session, it was not this job.
  if (outcome.isUnsent) return { isForced: true }
  if (outcome.returned) throw new Unroutable(`no queue for ${pending.destination}: is a worker for it configured? If its workers set a \`key\`, name it.`)
  if (!outcome.error) {
    pending.confirmed = true
    return undefined
  }
  // amqplib's words for a nack; every other error means that the channel is gone.
  if (outcome.error.message === 'message nacked') throw new QueueFull(`the queue of ${pending.destination} is full; try again later`)
  session.lose()
  const { fault } = session
  if (fault?.code === NOT_FOUND) throw new Unroutable(`no exchange ${JOBS_EXCHANGE}: was a worker ever started on this virtual host?`)
  // For want of permission, or because of the user_id: another job of this client would be refused as well.
  if (fault?.code === ACCESS_REFUSED || (fault?.code === PRECONDITION_FAILED && fault.message.includes('user_id'))) {
    throw new PublishRefused(`the broker refuses jobs for exchange ${JOBS_EXCHANGE}: ${fault.message}`)
  }
  return { blame: BLAMES.includes(fault?.code) ? fault.message : undefined, isForced: FORCED.includes(fault?.code) }
}

// Waits for the job's turn, sends it, and waits for its confirm.
function confirm(session, pending, body, properties) {
  return new Promise((resolve, reject) => {
    if (pending.ended) return resolve(undefined)
    const send = (channel, endTurn) => {
      const job = {
        id: pending.id,
        channel,
        returned: false,
        end(error) {
          if (!session.unconfirmed.delete(job)) return
          // One turn later, because amqplib may say only then why the channel is gone.
          setImmediate(resolve, { error, returned: job.returned })
          endTurn()
        },
      }
      const confirmed = (error) => job.end(error ?? undefined)
      try {
        channel.publish(JOBS_EXCHANGE, pending.key, body, properties, confirmed)
      } catch (error) {
        // Before 2.0 amqplib waits for a confirm of what it has not sent: each following job would have the confirm of the one before.
        const waiting = channel.unconfirmed
        if (waiting?.at(-1) === confirmed) waiting.pop()
        // The channel is closed, or a value has no form in AMQP: then nothing was sent.
        if (session.isLost || error.name === 'IllegalOperationError') {
          session.lose()
          resolve({ isUnsent: true })
        } else reject(new InvalidJob(`the job's properties or headers have no form in AMQP: ${error.message}`))
        return false
      }
      session.unconfirmed.add(job)
      pending.sent = true
      return true
    }
    session.jobs.add(pending.key, { send, lost: () => resolve({ isUnsent: true }), atEnd: (call) => pending.atEnd(call) })
  })
}

// What became of a job that is published no more: nothing to say if it was confirmed or answered.
function ended({ hasFailed, error, timeoutMs }) {
  if (error instanceof JobFailed || error instanceof InvalidReply) return
  if (error instanceof JobTimeout) throw new PublishTimeout(`the broker did not confirm the job within ${timeoutMs} ms`)
  if (hasFailed) throw error
}
