/** Publishes inference jobs to vramq workers over RabbitMQ, and awaits their results. */

export type Input = string | Uint8Array | { uri: string } | { json: unknown }

interface Kinds {
  embedding: { embedding: Float32Array; dtype: 'f32' | 'f16' }
  json: { json: unknown }
  bytes: { bytes: Uint8Array; mediaType: string }
  uri: { uri: string }
  /** The elements of a sparse vector that are not zero: ascending indices, and a value for each. */
  sparse: { sparse: { indices: Uint32Array; values: Float32Array } }
}
type KeyOf<T> = T extends unknown ? keyof T : never
/** An output of one kind. The fields of the others may be asked for, and are undefined. */
type Only<T> = T & { [key in Exclude<KeyOf<Kinds[keyof Kinds]>, keyof T>]?: undefined }

export type Output = { [kind in keyof Kinds]: Only<Kinds[kind]> }[keyof Kinds]

export interface ConnectOptions {
  /** From `submit` to the last reply; Infinity for no limit. A job whose time is up is withdrawn. Default: an hour. */
  timeoutMs?: number
  /** How long one host of the broker may take until the client is connected. Default: ten seconds. */
  connectTimeoutMs?: number
  /** How long a lost connection is tried before everything in flight fails. Default: for ever. */
  reconnectForMs?: number
  /** How long the broker keeps the replies while this client is away. Default: ten minutes. */
  replyQueueExpiresMs?: number
  /** The most jobs in flight; `submit` waits until there are fewer. Default: 1024. */
  jobsInFlight?: number
  /** Shown in the broker's list of connections. */
  name?: string
  /**
   * Leaves the URL's user out of the jobs. Otherwise they name it, and workers share passes between users. The broker refuses it where it
   * knows the connection by another name, as with OAuth 2.
   */
  anonymous?: boolean
  /** How jobs and replies are written. 'msgpack' carries bytes and vectors as they are, and needs the package `@msgpack/msgpack`. Default: 'json'. */
  encoding?: 'json' | 'msgpack'
  /** Options of Node's `tls.connect`, such as `ca`, `cert` and `key`, for amqps://. */
  tls?: object
}

export interface PublishOptions {
  /** The job id, 1 to 255 bytes without U+FFFD; a random UUID by default. */
  id?: string
  /** Routing key of the job, where the model's workers set a `key`; the model's name by default. */
  key?: string
  params?: Record<string, unknown>
  timeoutMs?: number
  /** 0 to 255; workers' queues have 0 to 9. */
  priority?: number
  /** How long the job may wait in its queue; then it is expired, not run. */
  expirationMs?: number
  /** The most items that may share a pass with this job, at least 1. */
  batchHint?: number
  /** W3C Trace Context; `tracestate` is a header. */
  traceparent?: string
  /** The application that publishes the job, as replies and dead letters repeat it; at most 255 bytes. */
  appId?: string
  /**
   * At most 64 KiB. A value is null, a boolean, a finite number, a string, a Buffer, an array or an object of these; or it names a type of AMQP, as
   * in amqplib: `{ '!': 'timestamp', value: 1790000000 }`. Whole numbers beyond 2^53 and the type `uint8` need amqplib 2.
   */
  headers?: Record<string, unknown>
  /** Withdraws the job, as `withdraw` does, and rejects with the signal's reason. A job of `publish` is not withdrawn. */
  signal?: AbortSignal
}

export interface SubmitOptions extends PublishOptions {
  /** Called while a model reports how far an item is, from 0 to 1; reports may be missing. What it throws is a warning of the process (`VramqWarning`). */
  onProgress?: (report: { item: number; fraction: number; note: string }) => void
}

export interface Result {
  id: string
  model: string
  /** In the order of the inputs. */
  outputs: Output[]
  /** The revisions of the model that computed them: several if workers with other revisions continued the job, none if the model has none. */
  modelRevisions: string[]
  /** The rest is of the last reply. */
  worker: string
  attempt: number
  queuedMs: number
  ranMs: number
}

/** A job that the broker has. */
export declare class Job {
  readonly id: string
  readonly model: string
  readonly itemsDone: number
  /** Rejects with JobFailed, JobTimeout, ReplyQueueLost, InvalidReply, Withdrawn, Forgotten, Disconnected or ClientClosed. */
  result(): Promise<Result>
  /** When parts have come, until the job has ended. */
  progress(): AsyncGenerator<{ itemsDone: number; items: number }>
  /** Takes the job back, unless it has ended: workers start no further pass for it, and it leaves no dead letter. */
  withdraw(): void
  /** Stops waiting for the job: its replies are dropped. The job itself still runs. */
  forget(): void
}

export declare class Client {
  /** Connects once, or throws ConnectError; afterwards the client reconnects by itself. */
  static connect(url: string, options?: ConnectOptions): Promise<Client>
  private constructor()
  readonly replyQueue: string
  /** How often the connection was lost and opened again. */
  readonly reconnects: number
  /** Replies to jobs that no caller awaits. */
  readonly strays: number
  /** Publishes a job; resolves once the broker has confirmed it. */
  submit(model: string, inputs: readonly Input[], options?: SubmitOptions): Promise<Job>
  /** `submit`, and the result. */
  run(model: string, inputs: readonly Input[], options?: SubmitOptions): Promise<Result>
  /** Publishes a job whose replies go elsewhere: to `replyTo`, or to the model's own `vramq.replies.MODEL`. */
  publish(model: string, inputs: readonly Input[], options?: PublishOptions & { replyTo?: string }): Promise<string>
  /**
   * Withdraws the jobs in flight, which fail with ClientClosed, deletes the reply queue and closes the connections. It takes a
   * second if workers do not say at once what became of the withdrawn jobs, and some three seconds if the broker does not answer. Without a
   * connection no job is withdrawn.
   */
  close(): Promise<void>
}

export declare class VramqError extends Error {
  /** Whether the same call can succeed later, unchanged; after Disconnected with a new client. */
  readonly retryable: boolean
}
export declare class ConnectError extends VramqError {}
export declare class ClientClosed extends VramqError {}
/**
 * The connection was lost for longer than `reconnectForMs`. The client has ended, and each further call of it rejects with this at once. If it is
 * `retryable`, a new client may succeed. It is not if the broker refused the last attempt to reconnect.
 */
export declare class Disconnected extends VramqError {}
export declare class PublishError extends VramqError {}
export declare class InvalidJob extends PublishError {}
export declare class DuplicateId extends PublishError {}
export declare class Unroutable extends PublishError {}
export declare class QueueFull extends PublishError {}
export declare class PublishRefused extends PublishError {}
export declare class PublishTimeout extends PublishError {}
export declare class JobError extends VramqError {}
export declare class ReplyQueueLost extends JobError {}
/** The caller took the job back with `withdraw`. */
export declare class Withdrawn extends JobError {}
/** The caller stopped waiting for the job with `forget`. */
export declare class Forgotten extends JobError {}
export declare class InvalidReply extends JobError {}
export declare class JobFailed extends JobError {
  /** The word of the wire contract, such as "out-of-memory". */
  readonly reason: string
  readonly error: string
  /** One entry for every input; null where there is no result. */
  readonly outputs: (Output | null)[]
}
export declare class JobTimeout extends JobError {
  readonly itemsDone: number
  readonly items: number
}

export {}
