// The operators' page: shows what the gateway knows, and tries models.

import { bytes, timeline } from "./chart.js";
import { KEY, ask, element, find } from "./common.js";
import { begin as beginDeadLetters } from "./dead.js";

const REFRESH_MS = 2000;
const SHOWN_CHARS_MAX = 20000;
const SAVED_AFTER_MS = 60000;

function trouble(text) {
  const shown = find("trouble");
  shown.hidden = text === "";
  if (shown.textContent !== text) shown.textContent = text;
}

// ---- what there is ----

const seconds = (s) => (s === null || s === undefined ? "unknown" : s < 10 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

function showModels(models) {
  const rows = Object.entries(models).map(([name, model]) => {
    const { workers, queue } = model;
    const state = workers.consuming > 0 ? "good" : "bad";
    return element("tr", {},
      element("th", { scope: "row" }, name),
      element("td", { class: state }, `${workers.consuming} of ${workers.workers} take jobs`),
      element("td", { class: "number" }, queue ? queue.ready : "?"),
      element("td", { class: "number" }, workers.unacknowledged),
      element("td", { class: "number" }, workers.slots),
      element("td", { class: "number" }, workers.jobs_per_s === null ? "?" : workers.jobs_per_s.toFixed(1)),
      element("td", { class: "number" }, seconds(model.estimated_wait_s)));
  });
  const none = element("tr", {}, element("td", { colspan: 7 }, "No worker serves a model at the moment."));
  find("model-rows").replaceChildren(...(rows.length > 0 ? rows : [none]));
  for (const id of ["dead-model", "try-model"]) choices(find(id), Object.keys(models));
}

/** Keeps what was chosen. */
function choices(select, names) {
  const now = [...select.options].map((option) => option.value);
  if (now.join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

const STATES = { consuming: "good", isolating: "warn", paused: "warn", draining: "warn" };

const cards = new Map();

/** Cards stay, so that a reader's place and a screen reader's do. */
function showWorkers(workers, operator) {
  const area = find("worker-cards");
  const names = new Set(workers.map((worker) => worker.worker));
  for (const [name, card] of cards) {
    if (!names.has(name)) {
      card.root.remove();
      cards.delete(name);
    }
  }
  for (const worker of workers) {
    if (!cards.has(worker.worker)) {
      const card = newCard(worker.worker);
      cards.set(worker.worker, card);
      area.append(card.root);
    }
    fillCard(cards.get(worker.worker), worker);
  }
  let empty = area.querySelector(".hint");
  if (workers.length > 0) {
    empty?.remove();
  } else if (!empty) {
    const text = operator ? "No worker was heard of yet." : "Workers are shown to operators: use an operator's key.";
    area.append(element("p", { class: "hint" }, text));
  }
}

function newCard(name) {
  const state = element("span", { class: "pill" });
  const canvas = element("canvas", { role: "img" });
  const facts = element("dl");
  // The picture's label says all of this in words.
  const legend = element("ul", { class: "legend", "aria-hidden": "true" });
  const root = element("article", { class: "card", "aria-label": `Worker ${name}` },
    element("header", {}, element("h3", {}, name), state), canvas, legend, facts);
  return { root, state, canvas, legend, facts };
}

/** What the picture's colours mean, with the last values. */
function legend(samples) {
  const last = samples.at(-1);
  const entries = [
    ["used", "memory used", last && bytes(last.used)],
    ["held", "held by passes", last && bytes(last.held)],
    ["slots", "slots", last?.slots],
    ["jobs", "unacknowledged jobs", last?.unacknowledged],
    ["oom", "out of memory"],
  ];
  return entries.map(([name, text, value]) =>
    element("li", { class: name }, text, ...(value === undefined ? [] : [" ", element("b", {}, value)])));
}

function fillCard(card, worker) {
  const state = worker.alive ? worker.state : "silent";
  card.state.textContent = state;
  card.state.className = `pill ${STATES[state] ?? "bad"}`;
  timeline(card.canvas, worker.timeline);
  card.legend.replaceChildren(...legend(worker.timeline));
  const facts = [];
  const fact = (name, value) => facts.push(element("dt", {}, name), element("dd", {}, value));
  if (worker.reason) fact("why", worker.reason);
  fact("host", `${worker.host} · ${worker.version}`);
  for (const device of worker.devices) {
    fact(device.device, `${bytes(device.free)} free of ${bytes(device.total)}`);
    if (device.foreign > 0) fact("other processes", bytes(device.foreign));
    if (device.temperature_celsius !== undefined) fact("temperature", `${device.temperature_celsius} °C`);
  }
  for (const model of worker.models) {
    fact(model.model, `${model.in_hand} of ${model.slots} slots · ${model.counters.answered} answered`);
    const ran_out = model.counters.out_of_memory_alone + model.counters.out_of_memory_shared;
    if (ran_out > 0) fact("out of memory", `${ran_out} ${ran_out === 1 ? "pass" : "passes"}`);
  }
  for (const limit of worker.learned_limits) {
    fact("learned limit", `${bytes(limit.limit)} for items up to ${limit.longest_max}`);
  }
  card.facts.replaceChildren(...facts);
}

async function refresh() {
  try {
    const status = await (await ask("/v1/status")).json();
    const pill = find("connection");
    const text = status.connected ? `broker connected · ${status.caller.name}` : "no broker";
    if (pill.textContent !== text) pill.textContent = text;
    pill.className = `pill ${status.connected ? "good" : "bad"}`;
    showModels(status.models);
    showWorkers(status.workers, status.caller.operator);
    trouble("");
  } catch (error) {
    find("connection").className = "pill bad";
    find("connection").textContent = "no state";
    trouble(error.message);
  }
  setTimeout(refresh, document.hidden ? 5 * REFRESH_MS : REFRESH_MS);
}

// ---- try a model ----

let running = null;

async function inputs() {
  const file = find("try-file").files[0];
  if (!file) return find("try-text").value.split("\n").filter((line) => line !== "");
  const form = new FormData();
  form.append("file", file);
  const stored = await (await ask("/v1/files", { method: "POST", body: form })).json();
  return [{ uri: stored.id }];
}

async function run(event) {
  event.preventDefault();
  const events = find("try-events");
  events.replaceChildren();
  find("try-result").hidden = true;
  find("try-said").textContent = "";
  showFiles([]);
  try {
    const body = JSON.stringify({ model: find("try-model").value, inputs: await inputs(), params: { progress: true } });
    const options = { method: "POST", body, headers: { "content-type": "application/json" } };
    const job = await (await ask("/v1/jobs", options)).json();
    running = job.id;
    find("try-withdraw").disabled = false;
    await follow(job);
    const done = await (await ask(`/v1/jobs/${job.id}`)).json();
    const shown = find("try-result");
    shown.textContent = JSON.stringify(done, null, 1).slice(0, SHOWN_CHARS_MAX);
    shown.hidden = false;
    showFiles(done.output_files ?? []);
  } catch (error) {
    events.append(element("li", { class: "bad" }, error.message));
  } finally {
    running = null;
    find("try-withdraw").disabled = true;
  }
}

/** Reads a job's events to their end. EventSource cannot send a key. */
async function follow(job) {
  const progress = find("try-progress");
  progress.max = job.items;
  progress.value = 0;
  progress.hidden = false;
  const response = await ask(`/v1/jobs/${job.id}/events`);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) show(block, progress);
  }
}

function show(block, progress) {
  const fields = new Map(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  if (!fields.has("event")) return;
  const name = fields.get("event");
  const { id, ...data } = JSON.parse(fields.get("data"));
  advance(name, data, progress);
  const said = Object.entries(data).filter(([, value]) => value !== null).map(([key, value]) => `${key} ${value}`);
  const item = element("li", {}, `${name}: ${said.join(", ")}`);
  const events = find("try-events");
  // Of reports in a row the newest says all.
  if (name === "progress" && events.lastElementChild?.textContent.startsWith("progress:")) events.lastElementChild.replaceWith(item);
  else events.append(item);
}

/** Moves the bar: to the items that are answered, or to what the model reports of the item that it is at. */
function advance(name, { items_done: done, item, fraction, note }, progress) {
  if (done !== undefined) progress.value = done;
  if (name === "done") progress.value = progress.max;
  if (["done", "failed", "withdrawn"].includes(name)) find("try-said").textContent = "";
  if (fraction === undefined) return;
  // A model answers its items in their order.
  progress.value = Math.max(progress.value, item + fraction);
  const at = `item ${item + 1} of ${progress.max}: ${Math.round(100 * fraction)} %`;
  find("try-said").textContent = note ? `${at}, ${note}` : at;
}

/** A button for each output in a store. */
function showFiles(files) {
  const list = find("try-files");
  list.replaceChildren(...files.map(({ index, id, href }) => {
    const said = element("span", { role: "status", class: "hint" });
    const button = element("button", { type: "button" }, `Download output ${index}`);
    button.addEventListener("click", () => download(id, href, said));
    return element("li", { class: "row" }, button, said);
  }));
  list.hidden = files.length === 0;
}

/** Saves an output as a file. A link could not send the key, so the page fetches the bytes. */
async function download(id, href, said) {
  said.textContent = "";
  said.className = "hint";
  try {
    const content = await (await ask(href)).blob();
    const link = element("a", { href: URL.createObjectURL(content), download: id });
    link.click();
    // By then the browser has begun to save it.
    setTimeout(() => URL.revokeObjectURL(link.href), SAVED_AFTER_MS);
    said.textContent = `saved: ${content.size.toLocaleString()} bytes, ${content.type}`;
  } catch (error) {
    said.className = "bad";
    said.textContent = error.message;
  }
}

async function withdraw() {
  if (running === null) return;
  try {
    await ask(`/v1/jobs/${running}`, { method: "DELETE" });
  } catch (error) {
    trouble(error.message);
  }
}

// ---- start ----

find("key").value = sessionStorage.getItem(KEY) ?? "";
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value.trim());
  trouble("");
});
beginDeadLetters();
find("try-form").addEventListener("submit", run);
find("try-withdraw").addEventListener("click", withdraw);
refresh();
