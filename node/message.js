// A job's AMQP properties and headers, checked before they are sent: what cannot be encoded, or what the broker refuses, would end a
// connection that other jobs share.

import { Buffer } from 'node:buffer'
import { isWellFormed } from './encodings.js'
import { InvalidJob } from './errors.js'
import { encodable, isPlain, shown } from './headers.js'
import { TIMER_MS_MAX } from './session.js'
import { DIGEST } from './withdraw.js'

// An AMQP short string.
const SHORT_BYTES_MAX = 255
// What amqplib encodes; workers take 120 KiB. And 49 days: RabbitMQ counts milliseconds in 32 bits.
export const limits = { headerBytes: 64 * 1024, expirationMs: 2 ** 32 - 1 }
// The revision of the model that a job demands, as workers take it.
const MODEL_REVISION = 'vramq-model-revision'
const MODEL_REVISION_BYTES_MAX = 2048
const PRIORITY_MAX = 255
const BATCH_HINT_MAX = 2 ** 32 - 1

// The id of a job, as workers take it.
export function checkId(id) {
  return echoed('id', id)
}

// A time limit of a job as a timer takes it; Infinity for none.
export function checkTimeout(timeoutMs) {
  if (typeof timeoutMs !== 'number' || !(timeoutMs >= 0)) throw new InvalidJob(`timeoutMs is ${shown(timeoutMs)}, and has to be at least 0`)
  return timeoutMs === Infinity ? Infinity : Math.min(timeoutMs, TIMER_MS_MAX)
}

export function messageProperties({ id, replyTo, userId, priority, expirationMs, batchHint, traceparent, appId, headers, digest, contentType }) {
  if (priority !== undefined) integer('priority', priority, 0, PRIORITY_MAX)
  if (expirationMs !== undefined) integer('expirationMs', expirationMs, 0, limits.expirationMs)
  if (batchHint !== undefined) integer('batchHint', batchHint, 1, BATCH_HINT_MAX)
  if (traceparent !== undefined) shortText('traceparent', traceparent)
  if (appId !== undefined) shortText('appId', appId)
  if (replyTo !== undefined) echoed('replyTo', replyTo)
  if (headers !== undefined && !isPlain(headers)) throw new InvalidJob(`headers is ${shown(headers)}, and has to be an object`)
  const all = {
    ...headers, ...(batchHint !== undefined && { 'batch-hint': batchHint }), ...(traceparent !== undefined && { traceparent }),
    ...(digest !== undefined && { [DIGEST]: digest }),
  }
  const { value: table, bytes } = encodable(all)
  if (bytes > limits.headerBytes) throw new InvalidJob(`the job's headers take ${bytes} bytes, at most ${limits.headerBytes} are allowed`)
  checkRevision(table[MODEL_REVISION])
  return {
    messageId: id, userId, appId, correlationId: id, replyTo, priority, contentType, persistent: true, mandatory: true,
    timestamp: Math.floor(Date.now() / 1000), ...(expirationMs !== undefined && { expiration: String(expirationMs) }), headers: table,
  }
}

function checkRevision(revision) {
  if (typeof revision !== 'string' && !Buffer.isBuffer(revision)) return
  const bytes = Buffer.byteLength(revision)
  if (bytes > MODEL_REVISION_BYTES_MAX) throw new InvalidJob(`headers.${MODEL_REVISION} has ${bytes} bytes, at most ${MODEL_REVISION_BYTES_MAX} are allowed`)
}

function shortText(name, text) {
  if (typeof text !== 'string' || !isWellFormed(text)) throw new InvalidJob(`${name} is ${shown(text)}, and has to be a string of Unicode`)
  const bytes = Buffer.byteLength(text)
  if (bytes === 0 || bytes > SHORT_BYTES_MAX) throw new InvalidJob(`${name} must have 1 to ${SHORT_BYTES_MAX} bytes`)
  return text
}

// What replies repeat, or go to. There workers read U+FFFD for bytes that are not a text, and cannot tell the two apart.
function echoed(name, text) {
  if (shortText(name, text).includes('\ufffd')) throw new InvalidJob(`${name} has the character U+FFFD, which workers do not take there`)
  return text
}

function integer(name, value, least, most) {
  if (Number.isSafeInteger(value) && value >= least && value <= most) return
  throw new InvalidJob(`${name} is ${shown(value)}, and has to be a whole number from ${least} to ${most}`)
}
