// A job's AMQP properties and headers, checked before they are sent: what cannot be encoded, or what the broker refuses, would end a
// connection that other jobs share.

import { Buffer } from 'node:buffer'
import { isWellFormed } from './encodings.js'
import { InvalidJob } from './errors.js'
import { TIMER_MS_MAX } from './session.js'
import { DIGEST } from './withdraw.js'

// An AMQP short string.
const SHORT_BYTES_MAX = 255
// The field names of AMQP.
const HEADER_NAME_BYTES_MAX = 128
// What amqplib encodes; workers take 120 KiB. And 49 days: RabbitMQ counts milliseconds in 32 bits.
export const limits = { headerBytes: 64 * 1024, expirationMs: 2 ** 32 - 1 }
// As workers read them.
const HEADER_DEPTH_MAX = 32
const PRIORITY_MAX = 255
const BATCH_HINT_MAX = 2 ** 32 - 1

export function checkId(id) {
  return shortText('id', id)
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
  if (replyTo !== undefined) shortText('replyTo', replyTo)
  if (headers !== undefined && !isPlain(headers)) throw new InvalidJob(`headers is ${shown(headers)}, and has to be an object`)
  const all = {
    ...headers, ...(batchHint !== undefined && { 'batch-hint': batchHint }), ...(traceparent !== undefined && { traceparent }),
    ...(digest !== undefined && { [DIGEST]: digest }),
  }
  const bytes = valueBytes(all, 'headers', 0)
  if (bytes > limits.headerBytes) throw new InvalidJob(`the job's headers take ${bytes} bytes, at most ${limits.headerBytes} are allowed`)
  return {
    messageId: id, userId, appId, correlationId: id, replyTo, priority, contentType, persistent: true, mandatory: true,
    timestamp: Math.floor(Date.now() / 1000), ...(expirationMs !== undefined && { expiration: String(expirationMs) }), headers: all,
  }
}

// What the value of a header takes in AMQP. Throws InvalidJob if it has no form there, or another than its writer meant.
function valueBytes(value, name, depth) {
  if (depth > HEADER_DEPTH_MAX) throw new InvalidJob(`${name} is nested in more than ${HEADER_DEPTH_MAX} others`)
  if (value === null) return 1
  switch (typeof value) {
    case 'boolean':
      return 2
    case 'number':
      if (Number.isFinite(value)) return 9
      break
    case 'string':
      if (isWellFormed(value)) return 5 + Buffer.byteLength(value)
      break
    case 'object':
      if (Buffer.isBuffer(value)) return 5 + value.length
      if (Array.isArray(value)) return value.reduce((sum, item, at) => sum + valueBytes(item, `${name}[${at}]`, depth + 1), 5)
      if (isPlain(value)) return tableBytes(value, name, depth)
  }
  const allowed = 'null, a boolean, a finite number, a string of Unicode, a Buffer, an array or an object of these'
  throw new InvalidJob(`${name} is ${shown(value)}: the value of a header is ${allowed}`)
}

function tableBytes(table, name, depth) {
  let sum = 5
  for (const [key, value] of Object.entries(table)) {
    // amqplib leaves it out.
    if (value === undefined) continue
    const bytes = Buffer.byteLength(key)
    if (bytes === 0 || bytes > HEADER_NAME_BYTES_MAX || !isWellFormed(key)) {
      throw new InvalidJob(`the name ${shown(key)} of a header must have 1 to ${HEADER_NAME_BYTES_MAX} bytes of Unicode`)
    }
    sum += 1 + bytes + valueBytes(value, `${name}.${key}`, depth + 1)
  }
  return sum
}

function isPlain(value) {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return false
  const prototype = Object.getPrototypeOf(value)
  return prototype === Object.prototype || prototype === null
}

function shortText(name, text) {
  if (typeof text !== 'string' || !isWellFormed(text)) throw new InvalidJob(`${name} is ${shown(text)}, and has to be a string of Unicode`)
  const bytes = Buffer.byteLength(text)
  if (bytes === 0 || bytes > SHORT_BYTES_MAX) throw new InvalidJob(`${name} must have 1 to ${SHORT_BYTES_MAX} bytes`)
  // Workers read that for bytes that are not a text, and cannot tell the two apart.
  if (text.includes('\ufffd')) throw new InvalidJob(`${name} has the character U+FFFD`)
  return text
}

function integer(name, value, least, most) {
  if (Number.isSafeInteger(value) && value >= least && value <= most) return
  throw new InvalidJob(`${name} is ${shown(value)}, and has to be a whole number from ${least} to ${most}`)
}

function shown(value) {
  if (typeof value === 'string') return JSON.stringify(value.slice(0, 40))
  return typeof value === 'object' && value !== null ? `a ${value.constructor?.name ?? 'object'}` : String(value)
}
