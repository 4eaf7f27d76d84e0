// Azure's Blob Storage for tests: Azurite with one container, on a port of its own, which it prints. Ends with its input.
//
//   VRAMQ_TEST_STORES=.cache/stores node azure_server.mjs FOLDER CONTAINER
//
// Account and key are those that Azurite documents.
import { spawn } from 'node:child_process';
import { createHmac } from 'node:crypto';

const ACCOUNT = 'devstoreaccount1';
const KEY = 'Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==';
const VERSION = '2021-12-02';

const [folder, container] = process.argv.slice(2);
const program = `${process.env.VRAMQ_TEST_STORES}/node_modules/azurite/dist/src/blob/main.js`;
const server = spawn(process.execPath, [program, '--blobPort', '0', '--location', folder, '--skipApiVersionCheck']);
process.on('exit', () => server.kill('SIGKILL'));
process.stdin.resume().on('end', () => process.exit(0));
server.on('exit', () => process.exit(1));
server.stderr.pipe(process.stderr);

// What it prints later is read, too, and dropped.
const port = await new Promise((resolve) => {
  let printed = '';
  server.stdout.on('data', (piece) => {
    printed += piece;
    const found = printed.match(/successfully listen\w* (?:at|on) http:\/\/127\.0\.0\.1:(\d+)/);
    if (found) resolve(found[1]);
  });
});

// The string to sign has a line for each header that could be there.
const date = new Date().toUTCString();
const path = `/${ACCOUNT}/${container}`;
const signed = `PUT${'\n'.repeat(12)}x-ms-date:${date}\nx-ms-version:${VERSION}\n/${ACCOUNT}${path}\nrestype:container`;
const signature = createHmac('sha256', Buffer.from(KEY, 'base64')).update(signed).digest('base64');
const made = await fetch(`http://127.0.0.1:${port}${path}?restype=container`, {
  method: 'PUT',
  headers: {
    'x-ms-date': date,
    'x-ms-version': VERSION,
    authorization: `SharedKey ${ACCOUNT}:${signature}`,
  },
});
if (made.status !== 201) throw new Error(`make the container: ${made.status} ${await made.text()}`);
console.log(port);
