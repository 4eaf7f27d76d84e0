// Bodies of jobs and replies, and the assembly of a job's parts. No I/O; docs/wire.md of the project has the contract.

import { Buffer } from 'node:buffer'
import { classOf, isWellFormed, json } from './encodings.js'
import { InvalidJob } from './errors.js'

export const JOBS_EXCHANGE = 'vramq.jobs'

// The limits of the contract: a job beyond them would be dead-lettered, so it is refused before it is published.
const BODY_BYTES_MAX = 16 * 1024 * 1024
const ITEMS_MAX = 65_536
const MODEL_NAME = /^[a-zA-Z0-9._/:-]{1,128}$/

// The inputs of a job as an array. A single one is refused: split into its characters, a text would be many inputs.
export function inputList(inputs) {
  if (typeof inputs === 'string' || ArrayBuffer.isView(inputs) || inputs instanceof ArrayBuffer) {
    const kind = typeof inputs === 'string' ? 'string' : inputs.constructor.name
    throw new InvalidJob(`the inputs are a ${kind}, and have to be an array: for a single input write [input]`)
  }
  if (typeof inputs?.[Symbol.iterator] !== 'function') throw new InvalidJob('the inputs have to be an array')
  return [...inputs]
}

// The name of a model, or `key`, the routing key of its jobs.
export function checkName(name, what = 'the model') {
  if (typeof name !== 'string' || !MODEL_NAME.test(name)) {
    throw new InvalidJob(`${what} is ${JSON.stringify(String(name))}, and has to be 1 to 128 characters of a-z, A-Z, 0-9, - _ . / :`)
  }
  return name
}

export function encodeJob(model, inputs, params, encoding = json) {
  checkName(model)
  if (inputs.length === 0) throw new InvalidJob('a job without inputs has no result')
  if (inputs.length > ITEMS_MAX) throw new InvalidJob(`the job has ${inputs.length} inputs, at most ${ITEMS_MAX} are allowed`)
  // JSON has nothing of what is in a Map or a Set.
  if (params !== undefined && params !== null && (typeof params !== 'object' || Symbol.iterator in params)) {
    throw new InvalidJob(`params is of the type ${typeof params === 'object' ? classOf(params) : typeof params}, and has to be a plain object`)
  }
  const list = inputs.map((input, at) => withForm(`inputs[${at}]`, encoding, () => encodeInput(input, at, encoding)))
  const values = params && withForm('params', encoding, () => encoding.value(params))
  const body = withForm('the job', encoding, () => encoding.write({ model, inputs: list, ...(values && { params: values }) }))
  if (body.length > BODY_BYTES_MAX) {
    throw new InvalidJob(`the job takes ${body.length} bytes, at most ${BODY_BYTES_MAX} are allowed; submit several jobs`)
  }
  return body
}

function encodeInput(input, at, encoding) {
  if (typeof input === 'string' && isWellFormed(input)) return input
  if (input instanceof Uint8Array) {
    return { bytes: encoding.bytes(Buffer.from(input.buffer, input.byteOffset, input.byteLength)) }
  }
  if (typeof input?.uri === 'string' && isWellFormed(input.uri)) return { uri: input.uri }
  // What JSON leaves out is no value: undefined, a function, a symbol.
  if (input?.json !== undefined && typeof input.json !== 'function' && typeof input.json !== 'symbol') {
    return { json: encoding.value(input.json) }
  }
  const isHalf = [input, input?.uri].some((text) => typeof text === 'string' && !isWellFormed(text))
  const what = typeof input === 'object' && input !== null ? `it is of the type ${classOf(input)}; ` : ''
  const why = isHalf ? 'it has half a surrogate pair, which is no Unicode; ' : what
  throw new InvalidJob(`inputs[${at}]: ${why}an input is a string of Unicode, a Uint8Array, { uri } or { json }`)
}

// What `encode` gives, or an InvalidJob that names what has no form in the encoding: a number of 64 bits, NaN, what holds itself.
function withForm(name, encoding, encode) {
  try {
    return encode()
  } catch (error) {
    if (error instanceof InvalidJob) throw error
    throw new InvalidJob(`${name} has no form in ${encoding.contentType}: ${error.message}`)
  }
}

function progressOf(reader, content) {
  try {
    const body = reader.read(content)
    if (typeof body?.fraction !== 'number') return undefined
    return { progress: { item: count(body, 'item'), fraction: body.fraction, note: String(body.note ?? '') } }
  } catch {
    return undefined
  }
}

// A reply of the contract, or an Error that says why it is none; undefined for a type that this version does not know, and for a progress
// report that it cannot read, which is no reason to give the job up. `encoding` is the job's. JSON is read, too.
export function decodeReply({ type, contentType, headers }, content, encoding = json) {
  headers ??= {}
  if (!['part', 'done', 'failed', 'progress'].includes(type)) return undefined
  const reader = [json, encoding].find((known) => known.contentType === (contentType || json.contentType))
  if (!reader) throw new Error(`its content type is ${contentType}, and the job's was ${encoding.contentType}`)
  if (type === 'progress') return progressOf(reader, content)
  const body = reader.read(content)
  if (type === 'failed') return { failed: { reason: String(body?.reason), error: String(body?.error) } }
  if (!Array.isArray(body?.outputs)) throw new Error('its body has no outputs')
  if (count(headers, 'items') !== body.outputs.length) {
    throw new Error(`its headers say ${headers.items} items, and it holds ${body.outputs.length}`)
  }
  return {
    offset: count(headers, 'offset'),
    itemsTotal: count(headers, 'items-total'),
    outputs: body.outputs.map(decodeOutput),
    worker: String(headers.worker ?? ''),
    attempt: count(headers, 'attempt', 0),
    queuedMs: count(headers, 'queued', 0),
    ranMs: count(headers, 'ran', 0),
    modelRevision: textOf(headers['vramq-model-revision']),
  }
}

// A header's value as text, whichever of AMQP's types it has; undefined if it is no text.
function textOf(value) {
  if (value instanceof Uint8Array) return Buffer.from(value).toString()
  return typeof value === 'string' ? value : undefined
}

function count(headers, name, absent) {
  const value = headers[name] ?? absent
  if (!Number.isSafeInteger(value) || value < 0) throw new Error(`its ${name} is ${JSON.stringify(value)}`)
  return value
}

function decodeOutput(output) {
  if (output?.embedding !== undefined) return decodeEmbedding(output.embedding, output.dtype ?? 'f32')
  if (output?.json !== undefined) return { json: output.json }
  if (output?.bytes !== undefined) return { bytes: bytesOf(output.bytes), mediaType: output.media_type }
  if (typeof output?.uri === 'string') return { uri: output.uri }
  if (output?.sparse !== undefined) return { sparse: decodeSparse(output.sparse) }
  throw new Error('an output is of no known kind')
}

function decodeEmbedding(values, dtype) {
  if (dtype !== 'f32' && dtype !== 'f16') throw new Error(`an embedding has the dtype ${JSON.stringify(dtype)}`)
  if (Array.isArray(values)) return { embedding: Float32Array.from(numbers(values, 'an embedding')), dtype }
  const bytes = bytesOf(values)
  const size = dtype === 'f32' ? 4 : 2
  if (bytes.length % size !== 0) throw new Error(`an embedding of ${bytes.length} bytes is not a whole number of elements`)
  const read = dtype === 'f32' ? (at) => bytes.readFloatLE(at) : (at) => fromHalf(bytes.readUInt16LE(at))
  return { embedding: Float32Array.from({ length: bytes.length / size }, (_, at) => read(at * size)), dtype }
}

function decodeSparse(sparse) {
  const [indices, values] = [sparse?.indices, sparse?.values].map((list) => numbers(list, 'a sparse vector'))
  if (indices.length !== values.length) throw new Error('a sparse vector has not as many indices as values')
  return { indices: Uint32Array.from(indices), values: Float32Array.from(values) }
}

// Not whatever has a length: an object that only claims one would be given that much memory.
function numbers(list, what) {
  if (Array.isArray(list) && list.every((value) => typeof value === 'number')) return list
  throw new Error(`${what} has something else than numbers`)
}

// Bytes as MessagePack has them, or base64 of JSON. Copied: MessagePack's are a view of the whole body.
function bytesOf(text) {
  if (text instanceof Uint8Array) return Buffer.from(text)
  if (typeof text !== 'string' || text.length % 4 !== 0) throw new Error('bytes are not base64')
  const bytes = Buffer.from(text, 'base64')
  // Node.js stops at the first character that is not of base64.
  if (bytes.length !== Buffer.byteLength(text, 'base64')) throw new Error('bytes are not base64')
  return bytes
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1
  const exponent = (bits >> 10) & 0x1f
  const fraction = bits & 0x3ff
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity
  return exponent === 0 ? sign * fraction * 2 ** -24 : sign * (1 + fraction / 1024) * 2 ** (exponent - 15)
}

// The outputs of one job as far as they have come. Its size is that of the job, whatever a reply claims.
export class Assembly {
  constructor(items) {
    this.outputs = new Array(items).fill(null)
    this.done = 0
    this.last = null
    // The revisions of the model that computed the outputs, each once.
    this.modelRevisions = []
  }

  // Takes a part in. Of an item that comes twice the first answer stands.
  add(part) {
    const items = this.outputs.length
    if (part.itemsTotal !== items) throw new Error(`it is for a job of ${part.itemsTotal} items, and the job has ${items}`)
    if (part.offset + part.outputs.length > items) {
      throw new Error(`it holds ${part.outputs.length} items from ${part.offset} on, the job has ${items}`)
    }
    const { done } = this
    part.outputs.forEach((output, at) => {
      if (this.outputs[part.offset + at] !== null) return
      this.outputs[part.offset + at] = output
      this.done += 1
    })
    const { modelRevision } = part
    if (this.done > done && modelRevision !== undefined && !this.modelRevisions.includes(modelRevision)) {
      this.modelRevisions.push(modelRevision)
    }
    this.last = part
  }
}
