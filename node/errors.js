// The errors of the client. `retryable` says whether the same call can succeed later, unchanged; after Disconnected with a new client.

export class VramqError extends Error {
  retryable = false

  constructor(message) {
    super(message)
    this.name = new.target.name
  }
}

export class ConnectError extends VramqError {
  constructor(message, retryable) {
    super(message)
    this.retryable = retryable
  }
}

export class ClientClosed extends VramqError {}

export class PublishError extends VramqError {}
export class InvalidJob extends PublishError {}
export class DuplicateId extends PublishError {}
export class PublishRefused extends PublishError {}
export class Unroutable extends PublishError {
  retryable = true
}
export class QueueFull extends PublishError {
  retryable = true
}
export class PublishTimeout extends PublishError {
  retryable = true
}
// The client has ended, and each further call of it rejects with this at once.
export class Disconnected extends VramqError {
  constructor(message, retryable) {
    super(message)
    this.retryable = retryable
  }
}

export class JobError extends VramqError {}
export class ReplyQueueLost extends JobError {}
export class Withdrawn extends JobError {}
export class Forgotten extends JobError {}
export class InvalidReply extends JobError {}

export class JobFailed extends JobError {
  constructor(reason, error, outputs) {
    super(`${reason}: ${error}`)
    this.reason = reason
    this.error = error
    this.outputs = outputs
  }
}

export class JobTimeout extends JobError {
  constructor(ms, itemsDone, items) {
    super(`no complete reply within ${ms} ms: ${itemsDone} of ${items} items are answered`)
    this.itemsDone = itemsDone
    this.items = items
  }
}
