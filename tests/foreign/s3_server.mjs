// An S3 server for tests: s3rver with the buckets that are named, on a port of its own, which it prints. Ends with its input.
//
//   VRAMQ_TEST_NODE_MODULES=.cache/node/node_modules node s3_server.mjs FOLDER BUCKET ...
//
// The key is S3RVER, and so is its secret.
import { createRequire } from 'node:module';

const require = createRequire(`${process.env.VRAMQ_TEST_NODE_MODULES}/`);
const S3rver = require('s3rver');

const [directory, ...buckets] = process.argv.slice(2);
const server = new S3rver({
  address: '127.0.0.1',
  port: 0,
  silent: true,
  directory,
  configureBuckets: buckets.map((name) => ({ name, configs: [] })),
});
const { port } = await server.run();
console.log(port);
process.stdin.resume().on('end', () => process.exit(0));
