// A job's headers, checked and in the form in which amqplib encodes them. What it cannot encode must not reach it: before 2.0 it counts
// confirms wrongly from then on, and gives each job the confirm of the job before.

import { Buffer } from 'node:buffer'
import { isWellFormed } from './encodings.js'
import { InvalidJob } from './errors.js'

// The field names of AMQP.
const NAME_BYTES_MAX = 128
// As workers read them.
const DEPTH_MAX = 32
// amqplib takes a number of at least this, that is no whole one, for an integer.
const WHOLE_FROM = 2 ** 50

const ALLOWED = 'null, a boolean, a finite number, a string of Unicode, a Buffer, an array or an object of these'

const whole = (least, most) => ({
  read: (value) => wholeNumber(value, least, most),
  allowed: `a whole number from ${least} to ${most}`,
})
const double = { bytes: 8, read: (value) => (Number.isFinite(value) ? value : undefined), allowed: 'a finite number' }
// One beyond its range would become an infinity.
const float = {
  bytes: 4,
  read: (value) => (Number.isFinite(value) && Number.isFinite(Math.fround(value)) ? value : undefined),
  allowed: 'a finite number of 32 bits',
}
const int8 = { bytes: 1, ...whole(-128, 127) }
const uint8 = { bytes: 1, ...whole(0, 255) }
const int16 = { bytes: 2, ...whole(-32768, 32767) }
const uint16 = { bytes: 2, ...whole(0, 65535) }
const int32 = { bytes: 4, ...whole(-(2 ** 31), 2 ** 31 - 1) }
const uint32 = { bytes: 4, ...whole(0, 2 ** 32 - 1) }
const int64 = { bytes: 8, ...whole(-(2n ** 63n), 2n ** 63n - 1n) }
// The types that amqplib's own notation names: { '!': 'timestamp', value: 1790000000 }.
const TYPES = {
  double, float64: double, float, byte: int8, int8, unsignedbyte: uint8, uint8, short: int16, int16,
  unsignedshort: uint16, uint16, int: int32, int32, unsignedint: uint32, uint32, long: int64, int64,
  timestamp: { bytes: 8, ...whole(0, 2n ** 64n - 1n) },
  decimal: {
    bytes: 5,
    read(value) {
      const [places, digits] = [uint8.read(value?.places), uint32.read(value?.digits)]
      return places === undefined || digits === undefined ? undefined : { places, digits }
    },
    allowed: '{ places, digits }: whole numbers from 0 to 255, and from 0 to 4294967295',
  },
}
// What it calls the types of values that need no notation.
const PLAIN_TYPES = ['string', 'boolean', 'number', 'object']

// The headers as amqplib encodes them, and the bytes that they take in AMQP. Throws InvalidJob, which names the header, for a value that
// has no form there, or another one than its writer meant.
export function encodable(headers) {
  return tableOf(headers, 'headers', 0)
}

export function isPlain(value) {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) return false
  const prototype = Object.getPrototypeOf(value)
  return prototype === Object.prototype || prototype === null
}

export function shown(value) {
  if (typeof value === 'string') return JSON.stringify(value.slice(0, 40))
  return typeof value === 'object' && value !== null ? `a ${value.constructor?.name ?? 'object'}` : String(value)
}

// The parts below give { value, bytes }, each value with its type.
function valueOf(value, name, depth) {
  if (depth > DEPTH_MAX) throw new InvalidJob(`${name} is nested in more than ${DEPTH_MAX} others`)
  if (value === null) return { value, bytes: 1 }
  switch (typeof value) {
    case 'boolean':
      return { value, bytes: 2 }
    case 'number':
      if (Number.isFinite(value)) return { value: numberOf(value), bytes: 9 }
      break
    case 'string':
      if (isWellFormed(value)) return { value, bytes: 5 + Buffer.byteLength(value) }
      break
    case 'object':
      if (Buffer.isBuffer(value)) return { value, bytes: 5 + value.length }
      if (Array.isArray(value)) return arrayOf(value, name, depth)
      if (isPlain(value)) return Object.hasOwn(value, '!') ? typedOf(value, name, depth) : nestedOf(value, name, depth)
  }
  throw new InvalidJob(`${name} is ${shown(value)}: the value of a header is ${ALLOWED}`)
}

// amqplib takes some numbers for integers that are none, or are too large for one.
function numberOf(value) {
  const isInteger = Number.isInteger(value) && value >= -(2 ** 63) && value < 2 ** 63
  return isInteger || Math.abs(value) < WHOLE_FROM ? value : { '!': 'double', value }
}

function arrayOf(array, name, depth) {
  const items = Array.from(array, (item, at) => valueOf(item, `${name}[${at}]`, depth + 1))
  return { value: items.map(({ value }) => value), bytes: items.reduce((sum, { bytes }) => sum + bytes, 5) }
}

// amqplib has its own notation in objects, and before 2.0 it calls `hasOwnProperty` of each.
function nestedOf(table, name, depth) {
  const { value, bytes } = tableOf(table, name, depth)
  const isPlainest = !Object.hasOwn(value, '!') && !Object.hasOwn(value, 'hasOwnProperty')
  return { value: isPlainest ? value : { '!': 'object', value }, bytes }
}

function typedOf({ '!': type, value }, name, depth) {
  if (type === 'object' && isPlain(value)) return nestedOf(value, name, depth)
  if (PLAIN_TYPES.includes(type) && typeof value === type) return valueOf(value, name, depth)
  const known = typeof type === 'string' && Object.hasOwn(TYPES, type) ? TYPES[type] : undefined
  if (known) {
    const read = known.read(value)
    if (read !== undefined) return { value: { '!': type, value: read }, bytes: 1 + known.bytes }
    throw new InvalidJob(`${name} is ${shown(value)}, and its type ${type} takes ${known.allowed}`)
  }
  if (PLAIN_TYPES.includes(type)) throw new InvalidJob(`${name} is ${shown(value)}, and its type says ${type}`)
  const names = [...PLAIN_TYPES, ...Object.keys(TYPES)].join(', ')
  throw new InvalidJob(`${name} has the type ${shown(type)} in '!', which AMQP has not; there are ${names}`)
}

function tableOf(table, name, depth) {
  const value = {}
  let bytes = 5
  for (const [key, given] of Object.entries(table)) {
    // amqplib leaves it out.
    if (given === undefined) continue
    const keyBytes = Buffer.byteLength(key)
    if (keyBytes === 0 || keyBytes > NAME_BYTES_MAX || !isWellFormed(key)) {
      throw new InvalidJob(`the name ${shown(key)} of a header must have 1 to ${NAME_BYTES_MAX} bytes of Unicode`)
    }
    const field = valueOf(given, `${name}.${key}`, depth + 1)
    // Not by assignment, which has another meaning for `__proto__`.
    Object.defineProperty(value, key, { value: field.value, enumerable: true, configurable: true, writable: true })
    bytes += 1 + keyBytes + field.bytes
  }
  return { value, bytes }
}

// A number, or where it is beyond 2^53 a BigInt; undefined if it is no whole number in the range. It may be given as text.
function wholeNumber(value, least, most) {
  const isWhole = Number.isInteger(value) || typeof value === 'bigint' || (typeof value === 'string' && /^-?\d{1,20}$/.test(value))
  if (!isWhole) return undefined
  const exact = BigInt(value)
  if (exact < least || exact > most) return undefined
  return Number.isSafeInteger(Number(exact)) ? Number(exact) : exact
}
