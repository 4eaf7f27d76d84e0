// OpenAI's client for Node.js against a gateway: `embed URL MODEL` checks results, `many URL MODEL` those of as many texts as OpenAI's API
// takes, `error URL ASKED` prints what it makes of an error (ASKED is a model, `typed:MODEL` for a body that claims to be a text, `job:MODEL`,
// `file:ID`, or `upload:BYTES`), `oversized URL MODEL` sends more than the gateway takes, and `upload URL NAME` stores, reads and removes a file
// of this name. A key may follow. `serve` reads such commands, each a line with an array, and prints a line for each.

import assert from "node:assert/strict";
import { createInterface } from "node:readline";

import OpenAI, { toFile } from "openai";

async function embed(client, model) {
  const input = ["A man is eating food.", "Someone has a meal."];
  // The client asks for base64 by itself, and decodes it.
  const byDefault = await client.embeddings.create({ model, input });
  const numbers = await client.embeddings.create({ model, input, encoding_format: "float" });
  const encoded = await client.embeddings.create({ model, input, encoding_format: "base64" });
  assert.deepEqual(byDefault.data.map(({ index }) => index), [0, 1]);
  for (const [at, { embedding }] of byDefault.data.entries()) {
    assert.equal(embedding.length, 384);
    for (const [n, value] of embedding.entries()) {
      assert.ok(Math.abs(value - numbers.data[at].embedding[n]) < 1e-6);
    }
    assert.equal(Buffer.from(encoded.data[at].embedding, "base64").length, 384 * 4);
  }
  const listed = [];
  for await (const { id } of client.models.list()) listed.push(id);
  assert.ok(listed.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function many(client, model) {
  const input = Array.from({ length: 2048 }, (_, n) => `text ${n}`);
  const { data } = await client.embeddings.create({ model, input });
  assert.deepEqual(data.map(({ index }) => index), Array.from({ length: 2048 }, (_, n) => n));
  assert.equal(new Set(data.map(({ embedding }) => embedding.slice(0, 8).join())).size, 2048);
}

async function ask(client, asked) {
  const at = asked.lastIndexOf(":");
  const [kind, rest] = [asked.slice(0, Math.max(at, 0)), asked.slice(at + 1)];
  if (kind === "job") return client.post("/jobs", { body: { model: rest, inputs: ["x"] } });
  if (kind === "file") return client.files.retrieve(rest);
  if (kind === "upload") {
    return client.files.create({ file: await toFile(Buffer.alloc(Number(rest)), "zeros"), purpose: "user_data" });
  }
  const headers = kind === "typed" ? { "content-type": "text/plain" } : {};
  return client.embeddings.create({ model: rest, input: "x" }, { headers });
}

async function error(client, asked) {
  try {
    await ask(client, asked);
  } catch (error) {
    assert.ok(error instanceof OpenAI.APIError && error.requestID && error.message, error);
    return { class: error.constructor.name, status: error.status, code: error.code };
  }
  throw new Error("no error");
}

async function oversized(client, model) {
  const input = "x".repeat(20 << 20);
  for (let times = 0; times < 5; times += 1) {
    await assert.rejects(client.embeddings.create({ model, input }), (error) => error.status === 413);
  }
}

async function upload(client, name) {
  const content = "what was uploaded";
  // Unlike the client for Python, this one sends the purpose behind the file.
  const stored = await client.files.create({ file: await toFile(Buffer.from(content), name), purpose: "user_data" });
  assert.deepEqual([stored.object, stored.bytes, stored.filename], ["file", content.length, name]);
  assert.equal((await client.files.waitForProcessing(stored.id)).id, stored.id);
  assert.equal(await (await client.files.content(stored.id)).text(), content);
  const part = await client.files.content(stored.id, { headers: { range: "bytes=5-7" } });
  assert.deepEqual([part.status, await part.text()], [206, content.slice(5, 8)]);
  assert.ok((await client.files.delete(stored.id)).deleted);
  await assert.rejects(client.files.retrieve(stored.id), (error) => error instanceof OpenAI.NotFoundError);
}

async function run([command, url, what, key]) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key || "none", maxRetries: 2 });
  const made = await { embed, many, error, oversized, upload }[command](client, what);
  console.log(JSON.stringify(made ?? null));
}

if (process.argv[2] === "serve") {
  for await (const line of createInterface({ input: process.stdin })) await run(JSON.parse(line));
} else {
  await run(process.argv.slice(2));
}
