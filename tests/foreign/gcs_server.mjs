// The protocol of Google Cloud Storage (its XML API) for tests, as far as workers and gateways use it: one bucket, in memory, on a port of
// its own, which it prints. Ends with its input.
//
//   node gcs_server.mjs BUCKET FILE
//
// Writes the JSON of a service account to FILE. Every request must have a token that this account has signed, and that is valid now.
import { createHash, createVerify, generateKeyPairSync, randomUUID } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { createServer } from 'node:http';

const [bucket, file] = process.argv.slice(2);
const EMAIL = 'worker@vramq-test.iam.gserviceaccount.com';
const SCOPE = 'https://www.googleapis.com/auth/cloud-platform';
const { publicKey, privateKey } = generateKeyPairSync('rsa', { modulusLength: 2048 });
const account = {
  type: 'service_account',
  client_email: EMAIL,
  private_key_id: 'key-1',
  private_key: privateKey.export({ type: 'pkcs8', format: 'pem' }),
};
writeFileSync(file, JSON.stringify(account));

const objects = new Map();
const uploads = new Map();

// https://google.aip.dev/auth/4111
function isSigned(header) {
  const [, head, claims, signature] = (header ?? '').match(/^Bearer ([\w-]+)\.([\w-]+)\.([\w-]+)$/) ?? [];
  if (!signature) return false;
  const signed = createVerify('RSA-SHA256').update(`${head}.${claims}`);
  if (!signed.verify(publicKey, signature, 'base64url')) return false;
  const { iss, sub, scope, iat, exp } = JSON.parse(Buffer.from(claims, 'base64url'));
  const now = Date.now() / 1000;
  return iss === EMAIL && sub === EMAIL && scope === SCOPE && iat <= now + 5 && now < exp;
}

const escaped = (text) => text.replace(/[&<>]/g, (found) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;' })[found]);

function put(key, body, type) {
  const etag = `"${createHash('md5').update(body).digest('hex')}"`;
  objects.set(key, { body, etag, type, modified: new Date(), generation: `${Date.now()}` });
  return objects.get(key);
}

const heads = ({ body, etag, type, modified, generation }) => ({
  etag,
  'content-type': type,
  'content-length': body.length,
  'last-modified': modified.toUTCString(),
  'x-goog-generation': generation,
});

function list(query) {
  const prefix = query.get('prefix') ?? '';
  const found = [...objects].filter(([key]) => key.startsWith(prefix)).sort();
  const contents = found.map(
    ([key, { body, etag, modified }]) =>
      `<Contents><Key>${escaped(key)}</Key><Size>${body.length}</Size><ETag>${etag}</ETag>` +
      `<LastModified>${modified.toISOString()}</LastModified></Contents>`,
  );
  return `<ListBucketResult>${contents.join('')}</ListBucketResult>`;
}

// The answer: status, headers, body.
function answer({ method, headers }, key, query, body) {
  const upload = uploads.get(query.get('uploadId'));
  if (query.has('uploadId') && !upload) return [404];
  switch (method) {
    case 'GET':
    case 'HEAD': {
      if (!key) return [200, {}, list(query)];
      const object = objects.get(key);
      return object ? [200, heads(object), object.body] : [404, {}, '<Error><Code>NoSuchKey</Code></Error>'];
    }
    case 'PUT': {
      if (!upload) {
        // Zero: only if there is no such object yet.
        if (headers['x-goog-if-generation-match'] === '0' && objects.has(key)) return [412];
        const { etag, generation } = put(key, body, headers['content-type']);
        return [200, { etag, 'x-goog-generation': generation }];
      }
      upload.parts.set(Number(query.get('partNumber')), body);
      return [200, { etag: `"part-${query.get('partNumber')}"` }];
    }
    case 'POST': {
      if (!upload) {
        const id = randomUUID();
        uploads.set(id, { parts: new Map(), type: headers['content-type'] });
        return [200, {}, `<InitiateMultipartUploadResult><UploadId>${id}</UploadId></InitiateMultipartUploadResult>`];
      }
      const named = [...`${body}`.matchAll(/<PartNumber>(\d+)<\/PartNumber>/g)].map(([, number]) => Number(number));
      const { etag, generation } = put(key, Buffer.concat(named.map((number) => upload.parts.get(number))), upload.type);
      uploads.delete(query.get('uploadId'));
      const result = `<CompleteMultipartUploadResult><ETag>${etag}</ETag></CompleteMultipartUploadResult>`;
      return [200, { 'x-goog-generation': generation }, result];
    }
    case 'DELETE':
      if (upload) return [uploads.delete(query.get('uploadId')) ? 204 : 404];
      return [objects.delete(key) ? 204 : 404];
    default:
      return [405];
  }
}

const server = createServer(async (request, response) => {
  const pieces = [];
  for await (const piece of request) pieces.push(piece);
  const { pathname, searchParams } = new URL(request.url, 'http://server');
  const [, named, ...key] = pathname.split('/').map(decodeURIComponent);
  const [status, headers = {}, body = ''] = !isSigned(request.headers.authorization)
    ? [401, {}, '<Error><Code>AuthenticationRequired</Code></Error>']
    : named !== bucket
      ? [404, {}, '<Error><Code>NoSuchBucket</Code></Error>']
      : answer(request, key.join('/'), searchParams, Buffer.concat(pieces));
  response.writeHead(status, headers).end(request.method === 'HEAD' ? undefined : body);
});
server.listen(0, '127.0.0.1', () => console.log(server.address().port));
process.stdin.resume().on('end', () => process.exit(0));
