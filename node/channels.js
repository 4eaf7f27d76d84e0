// The channels of a session on which jobs are published, one for each routing key.

// Before RabbitMQ publishes the first message of a channel to a quorum queue, it registers the channel with the queue. If the queue has
// lost its majority, RabbitMQ waits for that up to 65 s, and reads nothing else from the channel. So on one channel for all models, a queue
// without its majority would hold up the jobs of every other model.

// Jobs of a channel that wait for their confirms. A queue that confirms nothing blocks a channel that goes on publishing. After 200 to 400
// further messages on that channel RabbitMQ reads nothing from the whole connection. With fewer than 200 this never happens.
const UNCONFIRMED_MAX = 150
// More than most clients have models. A broker allows 2,047 channels on a connection by default.
export const CHANNELS_MAX = 64

// Has jobs sent, each on the channel of its key. A job has its turn on the channel until the broker has confirmed it, even if its caller
// has given up: it is unconfirmed until then.
export class JobChannels {
  #openChannel
  #closeChannel
  #max
  // The key that was used longest ago is the first.
  #byKey = new Map()
  // Channels are opened one after the other, in the order in which their keys got their first jobs.
  #opening = Promise.resolve()
  // A function while a key waits for the channel of another one. Meanwhile no open channel takes a further job, whatever its key, so that one
  // of them is free soon. `#makeRoom`, which waits for it, also sets it to undefined again.
  #freed
  #isLost = false
  // The channel of the first key, until there is one.
  #first

  // `first` is the channel of the first key. `open` opens another one, `close` closes one. Where they fail, they lose the session and throw
  // nothing.
  constructor(first, open, close, max) {
    this.#first = first
    this.#openChannel = open
    this.#closeChannel = close
    this.#max = max
  }

  // How many are open.
  get count() {
    return [...this.#byKey.values()].filter(({ channel }) => channel).length
  }

  // Calls `job.send` with the key's channel, and with what is to be called when the job's turn is over; it returns false if it has not sent
  // the job, and has no turn then. If the session is lost before that, it calls `job.lost`. If the job has ended before that, it calls
  // neither.
  add(key, job) {
    if (this.#isLost) return job.lost()
    const own = this.#byKey.get(key) ?? new KeyChannel(this.#first)
    this.#first = undefined
    // As the last one.
    this.#byKey.delete(key)
    this.#byKey.set(key, own)
    own.waiting.add(job)
    job.atEnd(() => {
      if (own.waiting.delete(job)) this.#goOn(own)
    })
    if (!own.channel && !own.isOpening) this.#open(key, own)
    this.#goOn(own)
  }

  // The session is lost.
  lose() {
    this.#isLost = true
    this.#freed?.()
    for (const { waiting } of this.#byKey.values()) {
      for (const job of waiting) job.lost()
      waiting.clear()
    }
  }

  // Sends jobs that wait, and gives the channel to another key that waits.
  #goOn(own) {
    for (const job of own.waiting) {
      if (!own.channel || this.#freed || own.unconfirmed >= UNCONFIRMED_MAX) break
      own.waiting.delete(job)
      const endTurn = () => {
        own.unconfirmed -= 1
        this.#goOn(own)
      }
      if (job.send(own.channel, endTurn)) own.unconfirmed += 1
    }
    if (own.unconfirmed === 0) this.#freed?.()
  }

  // Opens the channel of a key, unless all jobs of the key have ended until its turn comes.
  #open(key, own) {
    const open = async () => {
      await this.#makeRoom(own)
      if (own.waiting.size === 0) this.#byKey.delete(key)
      else own.channel = await this.#openChannel()
      own.isOpening = false
      this.#goOn(own)
    }
    own.isOpening = true
    this.#opening = this.#opening.then(open)
  }

  // Waits until one more channel may be opened: if need be, until another key's has no unconfirmed job, and is closed.
  async #makeRoom(own) {
    while (this.count >= this.#max && own.waiting.size > 0) {
      const free = [...this.#byKey].find(([, { channel, unconfirmed }]) => channel && unconfirmed === 0)
      if (free) await this.#close(...free)
      else await new Promise((resolve) => (this.#freed = resolve))
    }
    this.#freed = undefined
    for (const other of this.#byKey.values()) this.#goOn(other)
  }

  async #close(key, own) {
    const { channel } = own
    own.channel = undefined
    if (own.waiting.size > 0) this.#open(key, own)
    else this.#byKey.delete(key)
    await this.#closeChannel(channel)
  }
}

// What a key has: its channel, and the jobs for it.
class KeyChannel {
  isOpening = false
  // How many jobs have their turn; and those that wait for it, in order.
  unconfirmed = 0
  waiting = new Set()

  // amqplib's, while it is open.
  constructor(channel) {
    this.channel = channel
  }
}
