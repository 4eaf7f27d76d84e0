// OpenAI's client for Node.js against a gateway: `embed URL MODEL` checks results, `error URL MODEL` prints what it makes of an error. A key
// may follow.

import assert from "node:assert/strict";

import OpenAI from "openai";

const [command, url, model, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key || "none", maxRetries: 2 });

async function embed() {
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
  const many = await client.embeddings.create({ model, input: Array.from({ length: 256 }, (_, n) => `text ${n}`) });
  assert.equal(new Set(many.data.map(({ embedding }) => embedding.slice(0, 8).join())).size, 256);
  const listed = [];
  for await (const { id } of client.models.list()) listed.push(id);
  assert.ok(listed.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function error() {
  try {
    await client.embeddings.create({ model, input: "x" });
  } catch (error) {
    assert.ok(error instanceof OpenAI.APIError && error.requestID && error.message, error);
    console.log(JSON.stringify({ class: error.constructor.name, status: error.status }));
    return;
  }
  throw new Error("no error");
}

await { embed, error }[command]();
