// Uses the installed package against a real worker, as the tests of the workspace start it.
//
//   node scenarios.mjs SCENARIO URL …      (from a folder with the package in node_modules)
//
// Exits with 0 if all is as the package's README says. tests/tests/client/node.rs has the workers.

import assert from 'node:assert/strict'
import { spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { copyFileSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import net from 'node:net'
import { tmpdir } from 'node:os'
import { setTimeout as sleep } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import amqp from 'amqplib'
import * as vramq from 'vramq'

const MODEL = 'echo'
// How often the connections of `forced` are closed.
const FORCED = 5

// Answers the jobs for `key` as a worker does: `answer` gives the replies of a job, as lists of headers and outputs.
async function answering(url, key, answer, moreKeys = []) {
  const connection = await amqp.connect(url)
  const channel = await connection.createChannel()
  await channel.assertExchange('vramq.jobs', 'direct', { durable: true })
  const { queue } = await channel.assertQueue('', { exclusive: true })
  for (const one of [key, ...moreKeys]) await channel.bindQueue(queue, 'vramq.jobs', one)
  const consume = ({ properties, content }) => {
    const { replyTo, correlationId, headers } = properties
    const { inputs } = JSON.parse(content)
    for (const [more, outputs] of answer(inputs, headers, properties)) {
      const { offset = 0 } = more
      const all = { offset, items: outputs.length, 'items-total': inputs.length, ...more }
      const type = offset + outputs.length === inputs.length ? 'done' : 'part'
      channel.sendToQueue(replyTo, Buffer.from(JSON.stringify({ model: key, outputs })), { type, correlationId, headers: all })
    }
  }
  await channel.consume(queue, consume, { noAck: true })
  return connection
}

// A broker that says nothing any more once a client opens a channel.
async function brokerThatHangs({ hostname, port }) {
  const server = net.createServer((client) => {
    const broker = net.connect(Number(port), hostname)
    let hangs = false
    client.on('data', (data) => {
      hangs ||= data.includes(CHANNEL_OPEN)
      broker.write(data)
    })
    broker.on('data', (data) => hangs || client.write(data))
    for (const [one, other] of [[client, broker], [broker, client]]) one.on('error', () => {}).on('close', () => other.destroy())
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  return server
}

// A way to the broker that answers a method of the client's itself: by closing the connection or the channel, with this code and text.
async function wayThatCloses(url, method, code = 0, text = '') {
  const { hostname, port, host } = new URL(url)
  const short = (number) => [number >> 8, number & 255]
  const closing = [...short(code), text.length, ...Buffer.from(text), 0, 0, 0, 0]
  const frame = (channel, content) => Buffer.from([1, ...short(channel), 0, 0, ...short(content.length), ...content, 0xce])
  const clients = new Set()
  const way = { method, cut: () => clients.forEach((client) => client.destroy()) }
  const server = net.createServer((client) => {
    const broker = net.connect(Number(port), hostname)
    clients.add(client)
    let hasAnswered = false
    const take = (sent) => {
      const method = sent.subarray(7, 11)
      if (way.method && method.equals(way.method)) {
        hasAnswered = true
        client.write(way.method === QUEUE_DECLARE ? frame(1, [...CHANNEL_CLOSE, ...closing]) : frame(0, [...CLOSE, ...closing]))
      } else if (!hasAnswered) broker.write(sent)
      else if (method.equals(CLOSE)) client.write(frame(0, CLOSE_OK))
    }
    let rest = Buffer.alloc(0)
    client.on('data', (data) => {
      rest = Buffer.concat([rest, data])
      for (;;) {
        // The first 8 bytes are the protocol's, then come frames.
        const size = rest.toString('latin1', 0, 4) === 'AMQP' ? 8 : rest.length < 8 ? Infinity : 8 + rest.readUInt32BE(3)
        if (rest.length < size) return
        take(rest.subarray(0, size))
        rest = rest.subarray(size)
      }
    })
    broker.on('data', (data) => hasAnswered || client.write(data))
    for (const [one, other] of [[client, broker], [broker, client]]) one.on('error', () => {}).on('close', () => other.destroy())
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  way.url = url.replace(host, `127.0.0.1:${server.address().port}`)
  way.close = () => server.close()
  return way
}

// How many listeners signals have from here on. Node.js warns of more than ten of one signal.
function countAbortListeners() {
  let count = 0
  for (const [name, step] of [['addEventListener', 1], ['removeEventListener', -1]]) {
    const original = AbortSignal.prototype[name]
    AbortSignal.prototype[name] = function (...given) {
      count += step
      return original.apply(this, given)
    }
  }
  return () => count
}

// Class and method in AMQP.
const START_OK = Buffer.from([0, 10, 0, 11])
const OPEN = Buffer.from([0, 10, 0, 40])
const CLOSE = Buffer.from([0, 10, 0, 50])
const CLOSE_OK = Buffer.from([0, 10, 0, 51])
const CHANNEL_OPEN = Buffer.from([0, 20, 0, 10])
const CHANNEL_CLOSE = Buffer.from([0, 20, 0, 40])
const QUEUE_DECLARE = Buffer.from([0, 50, 0, 10])
const PUBLISH = Buffer.from([0, 60, 0, 40])

const scenarios = {
  // Outputs of every kind, in order; progress; many at once.
  async results(url) {
    const client = await vramq.Client.connect(url)
    const bytes = new Uint8Array([0, 1, 255])
    const result = await client.run(MODEL, ['a', 'ñ, 漢字 \0\n', bytes, { uri: 's3://bucket/key' }])
    assert.deepEqual(result.outputs.slice(0, 2), [{ json: 'a' }, { json: 'ñ, 漢字 \0\n' }])
    assert.deepEqual([...result.outputs[2].bytes], [0, 1, 255])
    assert.deepEqual(result.outputs[3], { uri: 's3://bucket/key' })
    assert.equal(result.worker, 'worker-0')

    const texts = Array.from({ length: 2000 }, (_, n) => `${n}`.repeat(1024))
    const job = await client.submit(MODEL, texts)
    const steps = []
    for await (const { itemsDone } of job.progress()) steps.push(itemsDone)
    assert.ok(steps.length > 1 && steps.at(-1) === 2000, `${steps}`)
    assert.deepEqual((await job.result()).outputs.map(({ json }) => json), texts)

    // They may share a signal.
    const warnings = []
    process.on('warning', (warning) => warnings.push(warning))
    const { signal } = new AbortController()
    const many = await Promise.all(Array.from({ length: 2000 }, (_, n) => client.run(MODEL, [`${n}`], { signal })))
    assert.deepEqual(warnings, [])
    many.forEach(({ outputs }, n) => assert.deepEqual(outputs, [{ json: `${n}` }]))
    await client.close()
    await assert.rejects(client.run(MODEL, ['x']), vramq.ClientClosed)
  },

  // What the model of python/tests/reports.py says of its items. It goes on when the files exist that the items name.
  async progress(url, folder) {
    const files = [`${folder}/first`, `${folder}/second`]
    const reports = []
    const onProgress = (report) => {
      reports.push(report)
      if (report.note) writeFileSync(files[report.item], '')
    }
    const client = await vramq.Client.connect(url)
    assert.deepEqual((await client.run(MODEL, files, { onProgress, timeoutMs: 120_000 })).outputs, [{ json: 'seen' }, { json: 'seen' }])
    await client.close()
    // The first says that the job has begun.
    assert.deepEqual(reports[0], { item: 0, fraction: 0, note: '' })
    const others = reports.slice(1)
    for (const { item, fraction, note } of others) assert.ok(item < 2 && fraction === 0.25 && note === 'a quarter, ñ', JSON.stringify(reports))
    assert.deepEqual([...new Set(others.map(({ item }) => item))], [0, 1])
  },

  // What `onProgress` throws ends neither its job nor the process.
  async callbacks(url) {
    const warnings = []
    process.on('warning', (warning) => warnings.push(warning))
    const client = await vramq.Client.connect(url)
    const failing = [() => { throw new Error('mine') }, async () => { throw new Error('mine') }, () => Promise.reject(undefined)]
    for (const onProgress of failing) {
      warnings.length = 0
      // A report may come after the result.
      while (warnings.length === 0) assert.deepEqual((await client.run(MODEL, ['a'], { onProgress })).outputs, [{ json: 'a' }])
      assert.ok(warnings[0].name === 'VramqWarning' && /onProgress/.test(warnings[0].message), `${warnings}`)
    }
    await client.close()
  },

  // A job of an application, within a trace; the test reads its reply.
  async published(url) {
    const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'
    const client = await vramq.Client.connect(url)
    const options = { id: 'node', replyTo: 'replies', appId: 'shop, ñ', traceparent, headers: { tracestate: 'vendor=value' } }
    await client.publish(MODEL, ['a'], options)
    assert.deepEqual((await client.run(MODEL, ['a'], { appId: 'shop' })).outputs, [{ json: 'a' }])
    await client.close()
  },

  // A broker whose authority only `folder` has. After the line that is printed, the test looks for the client's certificate.
  async tls(url, folder) {
    const [ca, cert, key] = ['ca.pem', 'client.pem', 'client.key'].map((name) => readFileSync(`${folder}/${name}`))
    const stranger = await vramq.Client.connect(url).catch((error) => error)
    assert.ok(stranger instanceof vramq.ConnectError && /certificate/.test(stranger.message), `${stranger}`)
    const client = await vramq.Client.connect(url, { tls: { ca, cert, key } })
    assert.deepEqual((await client.run(MODEL, ['with a certificate'])).outputs, [{ json: 'with a certificate' }])
    console.log('connected')
    for await (const _ of process.stdin) continue
    await client.close()
  },

  // The same results when jobs and replies are MessagePack, and the same refusals.
  async msgpack(url) {
    const client = await vramq.Client.connect(url, { encoding: 'msgpack' })
    const bytes = new Uint8Array([0, 1, 255])
    const value = { a: [1, -2.5, null, 2 ** 40], at: new Date(0), left: undefined }
    const { outputs } = await client.run(MODEL, ['a', 'ñ, 漢字 \0\n', bytes, Buffer.alloc(0), { uri: 's3://bucket/key' }, { json: value }])
    assert.deepEqual(outputs.slice(0, 2), [{ json: 'a' }, { json: 'ñ, 漢字 \0\n' }])
    assert.deepEqual(outputs.slice(2, 4).map((output) => [...output.bytes]), [[0, 1, 255], []])
    assert.deepEqual(outputs[4], { uri: 's3://bucket/key' })
    assert.equal(outputs[5].mediaType, 'application/json')
    assert.deepEqual(JSON.parse(outputs[5].bytes.toString()), JSON.parse(JSON.stringify(value)))
    const blob = Buffer.from(Array.from({ length: 1024 }, (_, n) => n % 256))
    const many = await client.run(MODEL, new Array(6000).fill(blob), { timeoutMs: 120_000 })
    assert.equal(many.outputs.length, 6000)
    for (const output of many.outputs) assert.ok(blob.equals(output.bytes))
    const failed = await client.run(MODEL, ['a'], { params: { unknown: 1 } }).catch((error) => error)
    assert.ok(failed instanceof vramq.JobFailed && failed.reason === 'invalid-input' && failed.message.includes('unknown'), `${failed}`)
    const itself = {}
    itself.itself = itself
    const none = [{ json: 1n }, { json: NaN }, { json: itself }, { json: '\ud800' }, { json: { '\udc00': 1 } }, { json: () => {} }, { json: [new Headers()] }, '\ud800', 1]
    for (const wrong of [...none.map((input) => [input]), ['x'.repeat(16 << 20)]]) {
      await assert.rejects(client.run(MODEL, wrong), vramq.InvalidJob)
    }
    await assert.rejects(client.run(MODEL, ['a'], { params: itself }), vramq.InvalidJob)
    await client.close()
    for (const encoding of ['pickle', null, 7]) await assert.rejects(vramq.Client.connect(url, { encoding }), RangeError)
  },

  // A fleet was upgraded while it ran the job: workers with two revisions of the model computed the outputs. The last part was answered
  // before, so that its revision made none of them.
  async revisions(url) {
    const part = (offset, revision, texts) => [
      { offset, ...(revision && { 'vramq-model-revision': revision }) }, texts.map((json) => ({ json })),
    ]
    const replies = {
      none: (inputs) => [part(0, undefined, inputs)],
      several: () => [
        part(2, 'new', ['c']), part(0, 'old', ['a']), part(1, 'new', ['b']), part(2, 'other', ['x']), part(3, Buffer.from('old'), ['d']),
      ],
    }
    const worker = await answering(url, 'revised', (inputs) => replies[inputs.length === 4 ? 'several' : 'none'](inputs))
    const client = await vramq.Client.connect(url)
    const { outputs, modelRevisions } = await client.run('revised', ['a', 'b', 'c', 'd'])
    assert.deepEqual(outputs.map(({ json }) => json), ['a', 'b', 'c', 'd'])
    assert.deepEqual(modelRevisions, ['new', 'old'])
    assert.deepEqual((await client.run('revised', ['a'])).modelRevisions, [])
    await client.close()
    await worker.close()
  },

  // Headers with all that AMQP has arrive, and what it has not is refused: by name, and before amqplib counts a publish that it cannot send.
  async headers(url) {
    const seen = []
    const worker = await answering(url, 'headed', (inputs, headers) => {
      seen.push(headers)
      return [[{}, inputs.map((json) => ({ json }))]]
    })
    const client = await vramq.Client.connect(url)
    const typed = (type, value) => ({ '!': type, value })
    const wrongs = [
      [typed('nonsense', 1), /headers\.x\[0\]\.y.*"nonsense".*there are string, .*timestamp/],
      [typed('byte', 128), /headers\.x\[0\]\.y is 128.*byte takes a whole number from -128 to 127/],
      [typed('timestamp', -1), /timestamp takes a whole number from 0/],
      [typed('long', 2n ** 63n), /long takes a whole number from -9223372036854775808 to 9223372036854775807/],
      [typed('decimal', 7), /decimal takes \{ places, digits \}/],
      [typed('string', 7), /its type says string/],
      [typed('toString', 7), /"toString".*AMQP has not/],
      [{ '!': 7 }, /the type 7/],
      [{ '!': 'double' }, /is undefined.*double takes a finite number/], [typed('double', NaN), /is NaN.*double takes a finite number/],
      [typed('float', 1e300), /is 1e\+300.*float takes a finite number of 32 bits/], [typed('float', 1n), /is 1.*float takes a finite number/],
    ]
    const text = { toString: 'a', hasOwnProperty: 'b', __proto__: null, '!!': 1 }
    const rights = { x: -1e300, y: 2 ** 50 + 0.5, z: Object.assign(Object.create(null), text), t: typed('timestamp', '1790000000') }
    for (let n = 0; n < 20; n += 1) {
      for (const [value, why] of wrongs) {
        const error = await client.run('headed', ['a'], { headers: { x: [{ y: value }] } }).catch((error) => error)
        assert.ok(error instanceof vramq.InvalidJob && why.test(error.message), `${error}`)
      }
      // The confirms are those of the jobs that were sent.
      const jobs = [`${n}`, 'b'].map((input) => client.run('headed', [input], { headers: rights, timeoutMs: 30_000 }))
      assert.deepEqual((await Promise.all(jobs)).map(({ outputs }) => outputs[0].json), [`${n}`, 'b'])
      await assert.rejects(client.publish('nobody-has-this', ['a']), vramq.Unroutable)
    }
    const [{ x, y, z, t }] = seen
    assert.deepEqual({ x, y, z: { ...z }, t }, { x: -1e300, y: 2 ** 50 + 0.5, z: { ...text }, t: typed('timestamp', 1790000000) })
    // What no check knows ends with its own job, and the next has its own confirm.
    const { limits } = await import('./node_modules/vramq/message.js')
    const { headerBytes } = limits
    for (let n = 0; n < 20; n += 1) {
      limits.headerBytes = Infinity
      await assert.rejects(client.run('headed', ['a'], { headers: { x: 'y'.repeat(200_000) } }), vramq.InvalidJob)
      limits.headerBytes = headerBytes
      const [unroutable, sent] = await Promise.allSettled([client.publish('nobody-has-this', ['a']), client.run('headed', ['a'])])
      assert.ok(unroutable.reason instanceof vramq.Unroutable && sent.status === 'fulfilled', `${unroutable.reason} ${sent.reason}`)
    }
    assert.equal(client.reconnects, 0)
    await client.close()
    await worker.close()
  },

  // Ids of the caller: those that workers take arrive as they are, others are refused.
  async given_ids(url) {
    const seen = []
    const worker = await answering(url, 'named', (inputs, headers, { messageId }) => {
      seen.push(messageId)
      return [[{}, inputs.map((json) => ({ json }))]]
    })
    const client = await vramq.Client.connect(url)
    const rights = ['a', `${'é'.repeat(127)}x`, '漢字, \0\n😀', '0190c7a8-0000-7000-8000-000000000000']
    for (const id of rights) assert.equal((await client.run('named', ['a'], { id })).id, id)
    assert.deepEqual(seen, rights)
    const wrongs = [7, 7n, true, Buffer.from('a'), ['a'], {}, new Date(), null, '', 'x'.repeat(256), 'é'.repeat(128), 'a\ufffd', '\ud800']
    for (const id of wrongs) {
      for (const call of ['submit', 'publish']) {
        const error = await client[call]('named', ['a'], { id }).catch((error) => error)
        assert.ok(error instanceof vramq.InvalidJob && /^id /.test(error.message), `${error}`)
      }
    }
    // These are only repeated, and workers take them so.
    assert.deepEqual((await client.run('named', ['a'], { appId: 'a\ufffd', traceparent: 'a\ufffd' })).outputs, [{ json: 'a' }])
    await client.close()
    await worker.close()
  },

  async failures(url) {
    const client = await vramq.Client.connect(url)
    const failed = await client.run(MODEL, ['a', 'b'], { params: { unknown: 1 } }).catch((error) => error)
    assert.ok(failed instanceof vramq.JobFailed && failed.reason === 'invalid-input', `${failed}`)
    assert.deepEqual(failed.outputs, [null, null])
    const missing = await client.run('nobody', ['a']).catch((error) => error)
    assert.ok(missing instanceof vramq.Unroutable && missing.retryable, `${missing}`)
    // The key alone says where a job goes.
    await assert.rejects(client.run(MODEL, ['a'], { key: 'nobody' }), (error) => error instanceof vramq.Unroutable && error.message.includes(`model ${MODEL} with key nobody:`))
    assert.deepEqual((await client.run(MODEL, ['a'], { key: MODEL })).outputs, [{ json: 'a' }])
    const itself = {}
    itself.itself = itself
    const none = [
      { json: 1n }, { json: () => {} }, { json: itself }, { json: NaN }, { json: { x: [() => {}] } }, { json: [-Infinity] },
      { json: '\ud800' }, { json: [{ x: 'a\udc00' }] }, { json: { '\ud800': 1 } }, { uri: 's3://\ud800' }, { json: { toJSON() {} } },
    ]
    // JSON.stringify writes something else for these: {}, null, or what the fields of an object would be. Or it leaves them out.
    const lossy = [
      new Map([['a', 1]]), new Set([1]), new WeakMap(), new Uint8Array(2), Buffer.from('a'), new Float32Array(1), new ArrayBuffer(1), /a/, new Error('a'),
      Promise.resolve(1), new Date(NaN), new Number(NaN), Object(Symbol('a')), new String('\ud800'), { toJSON() {} }, { toJSON: () => NaN }, { toJSON: () => new Map() },
    ]
    for (const value of [...lossy, NaN, '\ud800', 1n, Symbol('a'), () => {}, itself]) {
      for (const inner of [{ x: value }, [value], { x: [{ y: value }] }]) {
        const input = await client.run(MODEL, ['a', { json: inner }]).catch((error) => error)
        assert.ok(input instanceof vramq.InvalidJob && /^inputs\[1\] has no form in application\/json: /.test(input.message), `${input}`)
        const params = await client.run(MODEL, ['a'], { params: { inner } }).catch((error) => error)
        assert.ok(params instanceof vramq.InvalidJob && /^params has no form in application\/json: /.test(params.message), `${params}`)
      }
    }
    for (const value of lossy) none.push({ json: value })
    // Their content is not in fields.
    class Hidden { #n = 1 }
    const emptied = {
      Headers: new Headers([['a', 'b']]), Blob: new Blob(['a']), Response: new Response('a'), URLSearchParams: new URLSearchParams('a=b'), Set: new Set([1]),
      Map: new Proxy(new Map([['a', 1]]), {}), Hidden: new Hidden(), Object: Object.create({ a: 1 }),
    }
    for (const [name, value] of Object.entries(emptied)) {
      const refused = [
        [[{ json: { x: value } }], undefined, 'inputs[0] has no form in application/json: "x"'], [['a', { json: value }], undefined, 'inputs[1] has no form in application/json: it'],
        [[value], undefined, 'inputs[0]: it'], [['a'], { x: [{ y: value }] }, 'params has no form in application/json: "y"'], [['a'], value, 'params'],
      ]
      for (const [inputs, params, place] of refused) {
        const error = await client.run(MODEL, inputs, { params }).catch((error) => error)
        assert.ok(error instanceof vramq.InvalidJob && error.message.startsWith(place) && error.message.includes(` is of the type ${name}`), `${error}`)
      }
    }
    class Counted { n = 1 }
    const lossless = { a: new Date(0), b: new Number(1), c: new String('x'), d: new Counted(), e: { toJSON: () => [1] }, f: undefined, g: new URL('http://a/'), h: Object.create(null) }
    const [written] = (await client.run(MODEL, [{ json: lossless }])).outputs
    assert.deepEqual(JSON.parse(written.bytes.toString()), { a: '1970-01-01T00:00:00.000Z', b: 1, c: 'x', d: { n: 1 }, e: [1], g: 'http://a/', h: {} })
    await assert.rejects(client.run(MODEL, ['a'], { key: '~bulk.x' }), /^InvalidJob: key is "~bulk\.x"/)
    for (const wrong of [[], ['x'.repeat(16 << 20)], new Array(65_537).fill('x'), [1], [null], ['\ud800'], ...none.map((input) => [input])]) {
      await assert.rejects(client.run(MODEL, wrong), vramq.InvalidJob)
    }
    // Not split into characters.
    for (const single of ['text', new Uint8Array(3), Buffer.from('bytes'), new ArrayBuffer(3), { uri: 's3://bucket/key' }, 7, null, undefined]) {
      for (const call of ['run', 'submit', 'publish']) {
        await assert.rejects(client[call](MODEL, single), (error) => error instanceof vramq.InvalidJob && error.message.includes('an array'))
      }
    }
    assert.deepEqual((await client.run(MODEL, new Set(['a', 'b']))).outputs, [{ json: 'a' }, { json: 'b' }])
    for (const model of ['no such name', '', 7, undefined]) await assert.rejects(client.run(model, ['a']), vramq.InvalidJob)
    const wrongs = {
      id: ['', 'x'.repeat(256), '\ud800', 'a\ufffd', 7, null],
      key: ['', 'no such name', '~bulk.x', 7, null],
      batchHint: [0, -1, 2 ** 32, '4', 1.5, NaN],
      priority: [300, -1, 'high', 2.5, NaN],
      expirationMs: [-1, 1.5, NaN, Infinity, 2 ** 32, 'soon'],
      timeoutMs: [-1, NaN, '1000'],
      traceparent: [7, '\ud800'],
      appId: [7, '', 'x'.repeat(256), '\ud800', null],
      params: [
        7, 'ab', [], new Map([['dtype', 'f16']]), { x: 1n }, { x: '\ud800' }, { '\udc00': 1 }, itself, { x: NaN }, { x: [Infinity] }, { x: () => {} }, { x: Symbol('y') },
        { x: [undefined] },
      ],
      headers: [
        7, 'ab', ['a'], { '': 'a' }, { ['x'.repeat(129)]: 'a' }, { x: NaN }, { x: Infinity }, { x: 1n }, { x: () => {} }, { x: Symbol('y') },
        { x: '\ud800' }, { x: new Date() }, { x: new Uint8Array(3) }, { x: 'y'.repeat(65 << 10) }, { x: [[{ y: 1n }]] }, { x: [undefined] }, itself,
        { 'vramq-model-revision': 'é'.repeat(1024) + 'x' }, { 'vramq-model-revision': Buffer.alloc(2049) },
      ],
    }
    for (const [name, values] of Object.entries(wrongs)) {
      for (const value of values) {
        for (const call of ['run', 'publish']) {
          const error = await client[call](MODEL, ['a'], { [name]: value }).catch((error) => error)
          assert.ok(error instanceof vramq.InvalidJob, `${name}: ${error}`)
        }
      }
    }
    for (const replyTo of ['', 'x'.repeat(256), 7]) await assert.rejects(client.publish(MODEL, ['a'], { replyTo }), vramq.InvalidJob)
    await assert.rejects(client.submit(MODEL, ['a'], { onProgress: 7 }), vramq.InvalidJob)
    // A whole pair is Unicode.
    assert.deepEqual(JSON.parse((await client.run(MODEL, [{ json: { '😀': '\ud83d\ude00' } }])).outputs[0].bytes.toString()), { '😀': '😀' })
    for (const half of ['a\ud800', { json: 'a\ud800' }, { uri: 'a\ud800' }]) {
      const error = await client.run(MODEL, [half]).catch((error) => error)
      assert.ok(error instanceof vramq.InvalidJob && /half a surrogate pair/.test(error.message), `${error}`)
    }
    const right = { priority: 255, expirationMs: 60_000, batchHint: 1, timeoutMs: 2 ** 40, headers: { x: ['y', { z: null }], ñ: 1.5, left: undefined } }
    await client.run(MODEL, ['a'], right)
    await client.run(MODEL, ['a'], { timeoutMs: Infinity })
    assert.deepEqual((await client.run(MODEL, ['still here'])).outputs, [{ json: 'still here' }])
    assert.equal(client.reconnects, 0, 'what cannot be published has cost a connection')
    await client.close()
    for (const [address, retryable] of [[url.replace('guest:guest', 'guest:hunter2'), false], ['amqp://guest:hunter2@127.0.0.1:1/%2f', true]]) {
      const refused = await vramq.Client.connect(address).catch((error) => error)
      assert.ok(refused instanceof vramq.ConnectError && refused.retryable === retryable, `${refused}`)
      assert.ok(!refused.message.includes('hunter2'), refused.message)
    }
    for (const address of ['hunter2', 'amqp://%zz:guest@localhost', undefined]) await assert.rejects(vramq.Client.connect(address), vramq.ConnectError)
    const hanging = await brokerThatHangs(new URL(url))
    const silent = await vramq.Client.connect(`amqp://guest:guest@127.0.0.1:${hanging.address().port}/`, { connectTimeoutMs: 500 }).catch((error) => error)
    assert.ok(silent instanceof vramq.ConnectError && silent.retryable && /within 500 ms/.test(silent.message), `${silent}`)
    hanging.close()
    // As if it were not there.
    await (await vramq.Client.connect(url, { connectTimeoutMs: undefined, timeoutMs: undefined, jobsInFlight: undefined })).close()
    // Behind the last slash is the virtual host. The broker says what it is.
    const host = await vramq.Client.connect(url.replace(/[^/]*$/, 'no-such-host')).catch((error) => error)
    // amqplib does not repeat why: it may be down.
    assert.ok(host instanceof vramq.ConnectError && host.retryable && /vhost no-such-host.*or it is down/.test(host.message), `${host}`)
  },

  // When the broker closes a connection, its code says whether it refuses the client, or goes away or is down in part.
  async refusals(url) {
    const refuses = [403, 'ACCESS_REFUSED - why']
    const goesAway = [320, 'CONNECTION_FORCED - why']
    const isDown = [541, "INTERNAL_ERROR - access to vhost '/' refused for user 'guest': vhost '/' is down"]
    for (const [method, answer, retryable] of [
      [START_OK, refuses, false], [START_OK, [530, 'NOT_ALLOWED - why'], false], [START_OK, goesAway, true], [OPEN, isDown, true], [OPEN, goesAway, true],
      [CHANNEL_OPEN, isDown, true], [CHANNEL_OPEN, goesAway, true], [QUEUE_DECLARE, refuses, false],
      // The reply queue's node is down.
      [QUEUE_DECLARE, [404, 'NOT_FOUND - why'], true],
    ]) {
      const way = await wayThatCloses(url, method, ...answer)
      const error = await vramq.Client.connect(way.url).catch((error) => error)
      assert.ok(error instanceof vramq.ConnectError && error.retryable === retryable, `${error}`)
      assert.equal(/^the broker at [^ ]* refuses/.test(error.message), !retryable, error.message)
      // amqplib does not repeat what ends an open connection, or one that is opened.
      assert.ok([OPEN, CHANNEL_OPEN].includes(method) || error.message.includes(answer[1]), error.message)
      way.close()
    }
    // A client that has ended says whether another one may succeed.
    for (const answer of [refuses, goesAway]) {
      const way = await wayThatCloses(url, undefined, ...answer)
      const client = await vramq.Client.connect(way.url, { reconnectForMs: 500 })
      way.method = START_OK
      way.cut()
      for (let n = 0; n < 2; n += 1) {
        const error = await client.submit(MODEL, ['a']).catch((error) => error)
        assert.ok(error instanceof vramq.Disconnected && error.retryable === (answer === goesAway), `${error}`)
        assert.ok(error.message.includes(answer[1]), error.message)
      }
      await client.close()
      way.close()
    }
    // Neither an operator nor a refused channel is the fault of the jobs in flight: none goes alone for that. And those that wait for their
    // turn, however many, go on with the next session.
    const worker = await answering(url, 'served', () => [])
    const { connect } = amqp
    let alone = 0
    amqp.connect = (url, options) => {
      if (options.clientProperties.connection_name.endsWith('(one job)')) alone += 1
      return connect(url, options)
    }
    for (const [answer, length] of [[goesAway, 5000], [[530, 'NOT_ALLOWED - number of channels'], 1]]) {
      const way = await wayThatCloses(url, undefined, ...answer)
      const client = await vramq.Client.connect(way.url, { jobsInFlight: length })
      way.method = PUBLISH
      const jobs = Promise.all(Array.from({ length }, () => client.publish('served', ['a'], { timeoutMs: 60_000 })))
      jobs.catch(() => {})
      while (client.reconnects < 3) {
        assert.equal(alone, 0)
        await Promise.race([jobs, sleep(50)])
      }
      way.method = undefined
      await jobs
      assert.equal(alone, 0)
      await client.close()
      way.close()
    }
    amqp.connect = connect
    await worker.close()
  },

  // Jobs over which the broker ends a connection or a channel, as far as the checks before do not know them: each fails, with what the
  // broker says, and no other job of the client does.
  async refused(url) {
    const { limits } = await import('./node_modules/vramq/message.js')
    const client = await vramq.Client.connect(url)
    const checked = { ...limits }
    let goesOn = true
    let answered = 0
    const lane = async () => {
      for (; goesOn; answered += 1) assert.deepEqual((await client.run(MODEL, ['a'], { timeoutMs: 60_000 })).outputs, [{ json: 'a' }])
    }
    const lanes = Promise.all(Array.from({ length: 8 }, lane))
    // A time that ends the channel.
    Object.assign(limits, { headerBytes: Infinity, expirationMs: Infinity })
    const wrong = { timeoutMs: 60_000, expirationMs: 2 ** 40 }
    await assert.rejects(client.run(MODEL, ['a'], wrong), vramq.PublishRefused)
    assert.ok(client.reconnects <= 2, `${client.reconnects}`)
    const two = Array.from({ length: 2 }, () => client.run(MODEL, ['a'], wrong).catch((error) => error.name))
    assert.deepEqual(await Promise.all(two), ['PublishRefused', 'PublishRefused'])
    for (const seen = answered; answered < seen + 100; ) await Promise.race([lanes, sleep(10)])
    // What amqplib cannot encode ends with its own job, too.
    const reconnects = client.reconnects
    await assert.rejects(client.run(MODEL, ['a'], { headers: { x: 'y'.repeat(200_000) } }), vramq.InvalidJob)
    assert.equal(client.reconnects, reconnects)
    Object.assign(limits, checked)
    goesOn = false
    await lanes
    await client.close()
  },

  // The broker is short of memory, and an operator closes its connections again and again: no job is to blame, and none is lost. The
  // test does so after each line that is printed; after the last it ends the shortage.
  async forced(url) {
    const client = await vramq.Client.connect(url)
    assert.deepEqual((await client.run(MODEL, ['before'])).outputs, [{ json: 'before' }])
    console.log('connected')
    await once(process.stdin, 'data')
    process.stdin.destroy()
    const texts = Array.from({ length: 20 }, (_, n) => `${n}`)
    const jobs = Promise.all(texts.map((text) => client.run(MODEL, [text], { timeoutMs: 240_000 })))
    jobs.catch(() => {})
    for (let times = 0; times < FORCED; times += 1) {
      // Also jobs that are published alone, after a second, wait for their confirm then.
      await sleep(3000)
      console.log('waiting')
      while (client.reconnects <= times) await sleep(100)
    }
    console.log('enough')
    assert.deepEqual((await jobs).map(({ outputs }) => outputs), texts.map((json) => [{ json }]))
    await client.close()
  },

  // Who stops waiting gives the job's slot back; and the time limit holds while a job waits for its slot. Nobody serves "slow".
  async slots(url) {
    const client = await vramq.Client.connect(url, { jobsInFlight: 2 })
    const [stop, stopWaiting, stopPublishing, stopWithoutReason] = Array.from({ length: 4 }, () => new AbortController())
    const running = client.run('slow', ['a'], { signal: stop.signal })
    const first = await client.submit('slow', ['a'])
    const late = await client.submit('slow', ['a'], { timeoutMs: 300 }).catch((error) => error)
    assert.ok(late instanceof vramq.PublishTimeout && late.message.includes('2 jobs are in flight, and this one had no slot'), `${late}`)
    await assert.rejects(client.publish('slow', ['a'], { timeoutMs: 300 }), vramq.PublishTimeout)
    stop.abort(new Error('enough'))
    await assert.rejects(running, /enough/)
    await assert.rejects(client.submit('slow', ['a'], { signal: stop.signal }), /enough/)
    const second = await client.submit('slow', ['a'])
    // One that is aborted while it waits leaves its turn to the next.
    const waiting = [stopWaiting.signal, undefined, undefined].map((signal) => client.submit('slow', ['a'], { signal }))
    const published = client.publish('slow', ['a'], { signal: stopPublishing.signal })
    stopPublishing.abort(new Error('no more'))
    await assert.rejects(published, /no more/)
    const publishing = client.publish('slow', ['a'], { signal: stopWithoutReason.signal }).then(() => 'published', (reason) => reason)
    stopWithoutReason.abort(null)
    assert.equal(await publishing, null)
    stopWaiting.abort(new Error('enough'))
    await assert.rejects(waiting[0], /enough/)
    first.forget()
    await assert.rejects(first.result(), vramq.Forgotten)
    const third = await waiting[1]
    second.forget()
    const fourth = await waiting[2]
    const last = client.submit('slow', ['a'])
    last.catch(() => {})
    await client.close()
    for (const ended of [third.result(), fourth.result(), last, client.submit('slow', ['a']), client.publish('slow', ['a'])]) {
      await assert.rejects(ended, vramq.ClientClosed)
    }
    await assert.rejects(vramq.Client.connect(url, { jobsInFlight: 0 }), RangeError)
  },

  // The queue of "slow" confirms nothing, until the line is printed: jobs for other models go on. Of 901 jobs for it 899 are sent.
  async silent(url) {
    const client = await vramq.Client.connect(url)
    const stop = new AbortController()
    let ended = 0
    const submitted = Array.from({ length: 900 }, (_, n) => client.submit('slow', ['a'], [0, 899].includes(n) ? { signal: stop.signal } : {}))
    for (const job of submitted) job.catch(() => {}).then(() => (ended += 1))
    // The client has sent all that it sends while this goes on: more would block its connection.
    for (let n = 0; n < 50; n += 1) assert.deepEqual((await client.run(MODEL, [`${n}`], { timeoutMs: 30_000 })).outputs, [{ json: `${n}` }])
    assert.equal(ended, 0)
    // Jobs whose turn has not come are not sent any more.
    await assert.rejects(client.submit('slow', ['a'], { timeoutMs: 100 }), vramq.PublishTimeout)
    stop.abort(new Error('enough'))
    await Promise.all([0, 899].map((n) => assert.rejects(submitted[n], /enough/)))
    assert.equal(ended, 2)
    console.log('answered')
    await Promise.all(submitted.slice(1, -1))
    assert.equal(client.reconnects, 0)
    await client.close()
  },

  // More models than a client has channels; `limited` is the URL of a user who may have four channels, `without` that of one who may have
  // one, which leaves none for jobs.
  async many_models(url, limited, without) {
    const models = Array.from({ length: 70 }, (_, n) => `model-${n}`)
    const worker = await answering(url, models[0], (inputs) => [[{}, inputs.map((json) => ({ json }))]], models.slice(1))
    const all = await vramq.Client.connect(url)
    for (let times = 0; times < 2; times += 1) {
      const wanted = models.flatMap((model) => new Array(10).fill(model))
      const results = await Promise.all(wanted.map((model) => all.run(model, [model], { timeoutMs: 60_000 })))
      assert.deepEqual(results.map(({ outputs }) => outputs[0].json), wanted)
    }
    assert.equal(all.reconnects, 0)
    await all.close()
    const way = await wayThatCloses(limited)
    const few = await vramq.Client.connect(way.url)
    const runs = async (times) => {
      const wanted = new Array(times).fill(models.slice(0, 12)).flat()
      for (const model of wanted) assert.deepEqual((await few.run(model, [model], { timeoutMs: 60_000 })).outputs, [{ json: model }])
    }
    await runs(3)
    // Each time the broker refuses a channel, half as many have to be enough.
    assert.ok(few.reconnects <= 6, `${few.reconnects}`)
    // For ten minutes: then the client asks for more again, with its next session.
    const before = few.reconnects
    const { now } = Date
    Date.now = () => now() + 600_000
    way.cut()
    await runs(1)
    Date.now = now
    assert.ok(few.reconnects > before + 1, `${few.reconnects}, ${before}`)
    await few.close()
    way.close()
    const refused = await vramq.Client.connect(without).catch((error) => error)
    assert.ok(refused instanceof vramq.ConnectError && !refused.retryable && /number of channels/.test(refused.message), `${refused}`)
    await worker.close()
  },

  // An id names one job: that of a forgotten one is free when its reply has come, that of a withdrawn one at once.
  async ids(url) {
    const client = await vramq.Client.connect(url)
    const withdrawn = await client.submit('slow', ['earlier'], { id: 'withdrawn' })
    withdrawn.withdraw()
    const again = await client.submit('slow', ['later'], { id: 'withdrawn' })
    again.forget()
    await assert.rejects(client.submit('slow', ['third'], { id: 'withdrawn' }), vramq.DuplicateId)
    // Until its time is over.
    ;(await client.submit('slow', ['a'], { id: 'late', timeoutMs: 10_000 })).forget()
    await assert.rejects(client.submit('slow', ['a'], { id: 'late' }), vramq.DuplicateId)
    let late
    for (let tries = 0; !late; tries++) {
      assert.ok(tries < 600, 'the id is not free after a minute')
      try {
        late = await client.submit('slow', ['a'], { id: 'late' })
      } catch (error) {
        assert.ok(error instanceof vramq.DuplicateId, `${error}`)
        await sleep(100)
      }
    }
    late.withdraw()
    // Or its reply has come.
    ;(await client.submit(MODEL, new Array(500).fill('earlier'), { id: 'forgotten' })).forget()
    let result
    while (!result) {
      try {
        result = await client.run(MODEL, new Array(500).fill('later'), { id: 'forgotten' })
      } catch (error) {
        assert.ok(error instanceof vramq.DuplicateId, `${error}`)
        await sleep(10)
      }
    }
    assert.deepEqual(result.outputs[0], { json: 'later' })
    await client.close()
  },

  // Callers that give up: jobs without an answer are withdrawn. The worker answers the first job, and holds the others.
  async withdrawn(url) {
    const client = await vramq.Client.connect(url)
    assert.deepEqual((await client.run(MODEL, ['answered'])).outputs, [{ json: 'answered' }])
    let begun
    const begins = new Promise((resolve) => (begun = resolve))
    const unanswered = await client.submit(MODEL, ['closed'], { onProgress: begun })
    // From here on its pass holds the device.
    assert.deepEqual(await begins, { item: 0, fraction: 0, note: '' })
    const stop = new AbortController()
    const aborted = await client.submit(MODEL, ['aborted'], { signal: stop.signal })
    const takenBack = await client.submit(MODEL, ['taken back'])
    const late = await client.run(MODEL, ['late'], { timeoutMs: 2000 }).catch((error) => error)
    assert.ok(late instanceof vramq.JobTimeout || late instanceof vramq.PublishTimeout, `${late}`)
    stop.abort(new Error('enough'))
    await assert.rejects(aborted.result(), /enough/)
    takenBack.withdraw()
    await assert.rejects(takenBack.result(), vramq.Withdrawn)
    takenBack.withdraw()
    await client.close()
    await assert.rejects(unanswered.result(), vramq.ClientClosed)
  },

  // The broker refuses the withdrawal, until it does not. The worker answers the first job, and holds the others.
  async withdrawn_once_permitted(url) {
    const warnings = []
    process.on('warning', (warning) => warnings.push(warning))
    const client = await vramq.Client.connect(url)
    assert.deepEqual((await client.run(MODEL, ['answered'])).outputs, [{ json: 'answered' }])
    let begun
    const begins = new Promise((resolve) => (begun = resolve))
    const runs = await client.submit(MODEL, ['runs'], { onProgress: begun })
    assert.deepEqual(await begins, { item: 0, fraction: 0, note: '' })
    const waits = await client.submit(MODEL, ['next'])
    ;(await client.submit(MODEL, ['withdrawn'])).withdraw()
    assert.deepEqual((await runs.result()).outputs, [{ json: 'runs' }])
    assert.deepEqual((await waits.result()).outputs, [{ json: 'next' }])
    await client.close()
    assert.equal(client.reconnects, 0)
    assert.equal(warnings.length, 1, `${warnings}`)
    assert.match(warnings[0].message, /vramq\.withdrawals.*ACCESS[_-]REFUSED/)
  },

  // No worker was ever started: there is no exchange for jobs.
  async nothing_declared(url) {
    const client = await vramq.Client.connect(url)
    for (let n = 0; n < 2; n += 1) {
      const missing = await client.run(MODEL, ['a']).catch((error) => error)
      assert.ok(missing instanceof vramq.Unroutable && missing.message.includes('vramq.jobs'), `${missing}`)
    }
    await client.close()
  },

  // Nobody consumes, and the queue takes three jobs.
  async unanswered(url) {
    const client = await vramq.Client.connect(url)
    const late = await client.run(MODEL, ['a', 'b'], { timeoutMs: 20_000 }).catch((error) => error)
    assert.ok(late instanceof vramq.JobTimeout && late.itemsDone === 0 && late.items === 2, `${late}`)
    // No time, and not all the time.
    const none = await client.run(MODEL, ['a'], { timeoutMs: 0 }).catch((error) => error)
    assert.ok(none instanceof vramq.JobTimeout || none instanceof vramq.PublishTimeout, `${none}`)
    const waiting = await client.submit(MODEL, ['a'], { id: 'one' })
    await assert.rejects(client.submit(MODEL, ['a'], { id: 'one' }), vramq.DuplicateId)
    const fill = async () => {
      // A quorum queue notices its limit late.
      for (let n = 0; n < 1000; n += 1) await client.publish(MODEL, ['a'])
    }
    await assert.rejects(fill(), vramq.QueueFull)
    await assert.rejects(client.submit(MODEL, ['a']), vramq.QueueFull)
    await client.close()
    await assert.rejects(waiting.result(), vramq.ClientClosed)
  },

  // Jobs go on being published and answered while a proxy cuts the connections, after each line that is printed.
  async reconnect(url) {
    const listeners = countAbortListeners()
    const client = await vramq.Client.connect(url)
    let done = 0
    const lane = async () => {
      while (client.reconnects < 5) {
        const text = `${(done += 1)}`
        assert.deepEqual((await client.run(MODEL, [text, 'x'])).outputs, [{ json: text }, { json: 'x' }])
        if (done % 50 === 0) console.log(done, 'jobs')
      }
    }
    await Promise.all(Array.from({ length: 32 }, lane))
    assert.ok(listeners() <= 1, `${listeners()} listeners after ${client.reconnects} reconnects`)
    await client.close()
  },

  // A deleted reply queue fails the jobs whose replies were in it, and comes back for the next.
  async reply_queue_lost(url) {
    const client = await vramq.Client.connect(url)
    const job = await client.submit('slow', ['a'])
    const connection = await amqp.connect(url)
    await (await connection.createChannel()).deleteQueue(client.replyQueue)
    await connection.close()
    await assert.rejects(job.result(), vramq.ReplyQueueLost)
    assert.deepEqual((await client.run(MODEL, ['after'])).outputs, [{ json: 'after' }])
    await client.close()
  },

  // With a limit for reconnecting, what is in flight fails when it has passed. The broker goes away after the printed line.
  async gives_up(url) {
    const client = await vramq.Client.connect(url, { reconnectForMs: 500 })
    const job = await client.submit('slow', ['a'])
    console.log('submitted')
    for (const work of [() => job.result(), () => client.submit(MODEL, ['a'])]) {
      await assert.rejects(work, (error) => error instanceof vramq.Disconnected && error.retryable)
    }
    await client.close()
  },

  // What waits for a broker that is away ends when the client is closed, and so does the process. The broker goes away after the printed
  // line.
  async closed_while_away(url) {
    const client = await vramq.Client.connect(url)
    const job = await client.submit('slow', ['a'])
    console.log('submitted')
    const cutOff = async () => {
      for (;;) await client.publish('slow', ['a'], { timeoutMs: 1000 })
    }
    await assert.rejects(cutOff(), vramq.PublishTimeout)
    const waiting = [client.submit('slow', ['a']), client.publish('slow', ['a'])]
    for (const ended of waiting) ended.catch(() => {})
    await client.close()
    for (const ended of [job.result(), ...waiting]) await assert.rejects(ended, vramq.ClientClosed)
  },

  // Reads and writes the frozen bodies of the contract; takes no reply that contradicts its job.
  async golden(folder) {
    const { Assembly, decodeReply, encodeJob } = await import('./node_modules/vramq/wire.js')
    const { encodingOf } = await import('./node_modules/vramq/encodings.js')
    const msgpack = await encodingOf('msgpack')
    const frozen = (name) => readFileSync(`${folder}/${name}`)
    const jobs = {
      'job-text': ['a text', '', 'ñ, 漢字, "quoted", \u{1f468}\u200d\u{1f680}, \0\n'],
      'job-bytes': [new Uint8Array([0, 1, 2, 0xfe, 0xff]), new Uint8Array()],
      'job-uri': [{ uri: 's3://bucket/key' }],
    }
    for (const [name, inputs] of Object.entries(jobs)) {
      assert.deepEqual({ params: {}, ...JSON.parse(encodeJob('minilm', inputs)) }, JSON.parse(frozen(`${name}.json`)), name)
      const packed = encodeJob('minilm', inputs, {}, msgpack)
      const withoutParams = encodeJob('minilm', inputs, undefined, msgpack)
      assert.deepEqual(packed, frozen(`${name}.msgpack`), name)
      assert.deepEqual([withoutParams[0], withoutParams.subarray(1)], [0x82, packed.subarray(1, -8)], name)
    }
    // A report that cannot be read is no reason to give its job up.
    for (const body of ['{"item": null, "fraction": 0.5}', '{"item": 0, "fraction": "half"}', '[', '7']) {
      assert.equal(decodeReply({ type: 'progress' }, Buffer.from(body)), undefined, body)
    }
    const headers = { offset: 2, items: 8, 'items-total': 10 }
    const read = (type, more, body) => decodeReply({ type, headers: { ...headers, ...more } }, body)
    for (const [extension, contentType] of [['json', 'application/json'], ['msgpack', 'application/msgpack']]) {
      const replyOf = (type, more, body) => decodeReply({ type, contentType, headers: { ...headers, ...more } }, body, msgpack)
      const { outputs } = replyOf('part', {}, frozen(`outputs.${extension}`))
      assert.deepEqual(outputs[0], outputs[1])
      assert.deepEqual([...outputs[0].embedding.slice(0, 2)], [0, -1.5])
      assert.deepEqual(outputs[2], outputs[3])
      assert.equal(outputs[3].embedding.at(-1), 65504)
      assert.deepEqual(outputs[5], { json: { label: 'x', scores: [0.25, null, 'y', {}] } })
      assert.deepEqual([[...outputs[6].bytes], outputs[6].mediaType], [[0x89, 0x50, 0x4e, 0x47, 0xff], 'image/png'])
      assert.deepEqual(outputs[7], { uri: 's3://bucket/key' })
      const [some, empty] = replyOf('done', { items: 2 }, frozen(`sparse.${extension}`)).outputs
      assert.deepEqual([...some.sparse.indices], [0, 7, 300, 70000])
      assert.deepEqual([...some.sparse.values.slice(0, 2)], [0.5, 1.25])
      assert.deepEqual([empty.sparse.indices.length, empty.sparse.values.length], [0, 0])
      assert.equal(replyOf('failed', {}, frozen(`failure.${extension}`)).failed.reason, 'out-of-memory')
    }

    assert.deepEqual(read('progress', {}, '{"item": 7, "fraction": 0.25, "note": "x"}').progress, { item: 7, fraction: 0.25, note: 'x' })
    assert.equal(read('a later type', {}, 'anything'), undefined)
    assert.deepEqual(JSON.parse(encodeJob('m', [{ json: { a: [1, null] } }])).inputs, [{ json: { a: [1, null] } }])

    // Parts come in any order, overlap, and come twice; the first answer stands.
    const of = (offset, outputs, itemsTotal = 5) => ({ offset, outputs, itemsTotal })
    const assembly = new Assembly(5)
    for (const part of [of(3, ['d', 'e']), of(3, ['x', 'x']), of(0, ['a'])]) assembly.add(part)
    assert.deepEqual(assembly.outputs, ['a', null, null, 'd', 'e'])
    for (const forged of [of(5, ['x']), of(2 ** 40, ['x']), of(0, ['x'], 6), of(4, ['x', 'x'])]) {
      assert.throws(() => assembly.add(forged))
    }
    assembly.add(of(0, ['x', 'b', 'c', 'x']))
    assert.deepEqual([assembly.outputs, assembly.done], [['a', 'b', 'c', 'd', 'e'], 5])
    for (const [type, more, body] of [
      ['part', { items: 1 }, frozen('outputs.json')],
      ['part', { offset: -1 }, frozen('outputs.json')],
      ['part', { offset: '0' }, frozen('outputs.json')],
      ['part', {}, '[]'],
      ['part', { items: 1 }, '{"outputs": [{"embedding": "AAA=", "dtype": "f32"}]}'],
      ['part', { items: 1 }, '{"outputs": [{"embedding": "AA==", "dtype": "f64"}]}'],
      ['part', { items: 1 }, '{"outputs": [7]}'],
      ['part', {}, 'no JSON'],
      ...['{"bytes": {"length": 9000000000}}', '{"bytes": "?"}', '{"bytes": 7}', '{"embedding": {"length": 9000000000}}', '{"embedding": ["1"]}',
        '{"embedding": "AA=?"}', '{"sparse": null}', '{"sparse": {"indices": ["0"], "values": [1]}}', '{"uri": 7}', '{"uri": null}',
      ].map((output) => ['part', { items: 1 }, `{"outputs": [${output}]}`]),
    ]) {
      assert.throws(() => read(type, more, body), `${type} ${JSON.stringify(more)}`)
    }
    const part = { type: 'part', contentType: msgpack.contentType, headers }
    const whole = frozen('outputs.msgpack')
    const broken = [[], whole.subarray(0, -1), [...whole, 0], [0xdd, 0xff, 0xff, 0xff, 0xff], [0xdd, 0x01, 0, 0, 0], [0xc1]]
    for (const body of broken) assert.throws(() => decodeReply(part, Buffer.from(body), msgpack))
    assert.throws(() => decodeReply(part, whole), /content type/)

    // Beside the program, and so without the packages of the one that is installed.
    const elsewhere = mkdtempSync(`${tmpdir()}/vramq-`)
    copyFileSync(new URL('./node_modules/vramq/encodings.js', import.meta.url), `${elsewhere}/encodings.mjs`)
    const alone = await import(`${elsewhere}/encodings.mjs`)
    await assert.rejects(alone.encodingOf('msgpack'), /npm install @msgpack\/msgpack/)
    rmSync(elsewhere, { recursive: true })
  },

  // index.d.ts declares the classes that the package exports, and the methods that they have.
  async types() {
    const text = readFileSync(new URL('./node_modules/vramq/index.d.ts', import.meta.url), 'utf8')
    const declared = new Map([...text.matchAll(/^export declare class (\w+)[^{]*\{([^]*?)\}$/gm)].map(([, name, body]) => [name, body]))
    assert.deepEqual([...declared.keys()].sort(), Object.keys(vramq).sort())
    for (const [name, body] of declared) {
      const methods = [...body.matchAll(/^ {2}(static )?(\w+)\(/gm)].filter(([, , method]) => method !== 'constructor')
      for (const [, isStatic, method] of methods) {
        const owner = isStatic ? vramq[name] : vramq[name].prototype
        assert.equal(typeof owner[method], 'function', `${name}.${method}`)
      }
      const written = Object.getOwnPropertyNames(vramq[name].prototype).filter((method) => method !== 'constructor')
      for (const method of written) assert.ok(body.includes(method), `${name}.${method} is not in index.d.ts`)
    }
  },

  // TypeScript takes a program that uses the package as it is meant to be used, and refuses what is marked in it.
  async typescript(program) {
    const folder = fileURLToPath(new URL('.', import.meta.url))
    copyFileSync(program, `${folder}/typed.ts`)
    writeFileSync(`${folder}/package.json`, '{"type": "module"}')
    const options = ['--strict', '--noEmit', '--module', 'nodenext', '--target', 'es2022', '--types', 'node']
    const ended = spawnSync(process.execPath, ['node_modules/typescript/bin/tsc', ...options, 'typed.ts'], { cwd: folder, encoding: 'utf8' })
    assert.equal(ended.status, 0, `${ended.stdout}${ended.stderr}`)
  },

  // Vectors as numbers and in both kinds of base64.
  async embed(url) {
    const client = await vramq.Client.connect(url)
    const texts = ['A man is eating food.', '']
    const [numbers, base64, halves] = await Promise.all(
      [{}, { encoding: 'base64' }, { encoding: 'base64', dtype: 'f16' }].map((params) => client.run('minilm', texts, { params })),
    )
    texts.forEach((_, at) => {
      const { embedding } = numbers.outputs[at]
      assert.ok(embedding instanceof Float32Array && embedding.length === 384)
      assert.deepEqual(base64.outputs[at].embedding, embedding)
      assert.equal(halves.outputs[at].dtype, 'f16')
      halves.outputs[at].embedding.forEach((half, n) => assert.ok(Math.abs(half - embedding[n]) < 1e-3))
    })
    await client.close()
  },
}

const [scenario, ...args] = process.argv.slice(2)
await scenarios[scenario](...args)
