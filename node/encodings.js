// How bodies are written and read: as JSON, or as MessagePack, whose package is loaded only for a client that asks for it.

import { Buffer } from 'node:buffer'
import { types } from 'node:util'

// Of a body that is written. Workers take 127 levels of a JSON value; these are some more, so that they say what is wrong.
const DEPTH_MAX = 256

// JSON has no bytes: they are base64.
export const json = {
  contentType: 'application/json',
  write: (body) => Buffer.from(JSON.stringify(body)),
  read: (content) => JSON.parse(content.toString()),
  bytes: (bytes) => bytes.toString('base64'),
  value(value) {
    JSON.stringify(value, refuseLosses)
    return value
  },
}

// What JSON.stringify writes as {}, or with other fields, whatever is in it.
const EMPTIED = [
  types.isMap, types.isSet, types.isWeakMap, types.isWeakSet, types.isAnyArrayBuffer, types.isRegExp, types.isNativeError, types.isPromise,
  // Headers, Blob, URLSearchParams, a Proxy of a Map: they keep what is in them elsewhere than in fields.
  (value) => typeof value === 'object' && value !== null && !hasPlainPrototype(value) && Object.keys(value).length === 0,
]

// Whether a value is an array, or an object without a class: the prototypes of plain objects, of any realm, and of dictionaries have no
// prototype of their own.
function hasPlainPrototype(value) {
  const prototype = Object.getPrototypeOf(value)
  return Array.isArray(value) || prototype === null || Object.getPrototypeOf(prototype) === null
}

// The name of an object's class, for messages.
export function classOf(value) {
  return (typeof value.constructor === 'function' && value.constructor.name) || 'object'
}

// Throws for what JSON.stringify, which calls this for each value after the value's own toJSON, writes as something else or leaves out.
// Fields that are undefined are as good as absent. Half a surrogate pair it writes as an escape, which workers refuse.
function refuseLosses(key, converted) {
  const given = this[key]
  // As it is written: new Number(1) as 1.
  const value = types.isBoxedPrimitive(converted) ? converted.valueOf() : converted
  const place = key === '' ? 'it' : JSON.stringify(key)
  if (value !== undefined && !isWellFormed(key)) throw new Error(`a field is named ${place}, which is no Unicode: half a surrogate pair`)
  if (typeof value === 'string' && !isWellFormed(value)) {
    throw new Error(`${place} is ${JSON.stringify(value.slice(0, 40))}, which is no Unicode: half a surrogate pair`)
  }
  if (ArrayBuffer.isView(given)) throw new Error(`${place} is of the type ${classOf(given)}, and JSON has no bytes: make it base64 or an array`)
  if (EMPTIED.some((is) => is(value))) throw new Error(`${place} is of the type ${classOf(value)}, of which JSON has no fields: pass a plain object`)
  const isLost = typeof value === 'number' ? !Number.isFinite(value) : ['function', 'symbol'].includes(typeof value)
  // A Date that is none is null in JSON.
  if (isLost || (types.isDate(given) && value === null)) throw new Error(`${place} is ${String(isLost ? value : given).slice(0, 40)}`)
  if (value === undefined && (given !== undefined || Array.isArray(this))) {
    throw new Error(`${place} is ${given === undefined ? 'undefined' : 'an object whose toJSON gives undefined'}`)
  }
  return value
}

export async function encodingOf(name) {
  if (name === 'json') return json
  if (name === 'msgpack') return messagePack()
  throw new RangeError(`the encoding is ${JSON.stringify(name)}; there are json and msgpack`)
}

async function messagePack() {
  const { encode, decode } = await library()
  return {
    contentType: 'application/msgpack',
    write(body) {
      const { buffer, byteOffset, byteLength } = encode(body, { maxDepth: DEPTH_MAX })
      return Buffer.from(buffer, byteOffset, byteLength)
    },
    // An element has at least one byte: a list that claims more would be given memory for them.
    read: (content) => decode(content, { maxArrayLength: content.length, maxMapLength: content.length }),
    bytes: (bytes) => bytes,
    value: asJson,
  }
}

async function library() {
  try {
    return await import('@msgpack/msgpack')
  } catch (error) {
    if (error.code !== 'ERR_MODULE_NOT_FOUND') throw error
    throw new Error('MessagePack is not installed: npm install @msgpack/msgpack', { cause: error })
  }
}

// The value as JSON has it: a Date becomes a text, and what JSON leaves out is left out.
function asJson(value) {
  return JSON.parse(JSON.stringify(value, refuseLosses))
}

// Half a surrogate pair has no form in UTF-8. JSON.stringify would escape it, which workers refuse; MessagePack's writer would put another
// character in its place.
export function isWellFormed(text) {
  return !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text)
}
