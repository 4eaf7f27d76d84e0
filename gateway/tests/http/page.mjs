// The operators' page in Chromium: every view and every action. Usage: page.mjs CHROMIUM STEP URL KEY [MORE]
//
// Each step is a visit of its own; what an action does at the broker is for the caller to check.

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

import { Browser } from "./browser.mjs";

const [chromium, step, url, key, ...more] = process.argv.slice(2);
const browser = new Browser(chromium);

function check(holds, what) {
  if (!holds) throw new Error(what);
}

/** Opens the page with the key, and waits until it shows workers. */
async function visit(page, look = {}) {
  await page.open(url, look);
  await page.fill("#key", key);
  await page.press("Enter", 13);
  await page.until("the state", "document.querySelector('#connection').textContent.startsWith('broker connected')");
  await page.until("models", "document.querySelectorAll('#model-rows th').length > 0");
  await page.until("workers", "document.querySelectorAll('#worker-cards article').length > 0");
  // Until the key was there, a gateway with keys answered 401, and a browser reports that. From here on none is excused.
  if (key) page.faults = page.faults.filter((fault) => !String(fault).includes("401"));
}

/** What a person and a screen reader find wrong, by axe-core's rules. */
async function accessible(page, where) {
  const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
  await page.value(`${axe}; true`);
  const found = await page.value("axe.run(document, { resultTypes: ['violations'] }).then((found) => found.violations"
    + ".map(({ id, impact, nodes }) => ({ id, impact, nodes: nodes.map(({ html }) => html) })))");
  const serious = found.filter(({ impact }) => impact === "serious" || impact === "critical");
  check(serious.length === 0, `${where}: ${JSON.stringify(serious, null, 1)}`);
}

async function lookAtDeadLetters(page, model) {
  await page.until("the model is there", `[...document.querySelectorAll("#dead-model option")].some(({ value }) => value === "${model}")`);
  await page.value(`document.querySelector("#dead-model").value = "${model}"`);
  await page.click("#dead-form button");
  await page.until("the dead letters", "document.querySelector('#dead-groups').childElementCount > 0");
}

async function run(page, model) {
  await page.value(`document.querySelector("#try-model").value = "${model}"`);
  await page.click("#try-form button[type=submit]");
}

/** Waits until the browser has saved a file; its name. Some browsers add the extension of its media type. */
async function saved(folder, id) {
  for (let tries = 0; tries < 600; tries += 1) {
    const name = readdirSync(folder).find((name) => name === id || name === `${id}.json`);
    if (name) return name;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error(`${id} is not saved: ${readdirSync(folder)}`);
}

/** Runs in the page: what the timeline of a worker's card shows. Nothing else has the colour of the marks, and is as high as the picture. */
function chart(card) {
  const canvas = card.querySelector("canvas");
  const { width, height } = canvas;
  const context = canvas.getContext("2d");
  const { data } = context.getImageData(0, 0, width, height);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad").trim();
  const bad = [1, 3, 5].map((at) => parseInt(context.fillStyle.slice(at, at + 2), 16)).concat(255);
  const isBad = (x, y) => bad.every((value, at) => data[4 * (y * width + x) + at] === value);
  const isMark = (x) => Array.from({ length: height }, (_, y) => y).every((y) => isBad(x, y));
  const columns = Array.from({ length: width }, (_, x) => isMark(x));
  return {
    worker: card.getAttribute("aria-label"),
    says: canvas.getAttribute("aria-label"),
    marks: columns.filter((mark, x) => mark && !columns[x - 1]).length,
  };
}

/** Runs in the page: a timeline of four samples, a minute apart. Where it has which colour, one column from each minute. */
async function drawn() {
  const { timeline } = await import("/page/chart.js");
  const canvas = document.createElement("canvas");
  Object.assign(canvas.style, { width: "300px", height: "180px" });
  document.body.append(canvas);
  const sample = (at_ms, used, slots, unacknowledged, out_of_memory) =>
    ({ at_ms, total: 1000, held: 0, used, slots, unacknowledged, out_of_memory });
  timeline(canvas, [sample(0, 100, 8, 0, 0), sample(60e3, 900, 8, 4, 0), sample(120e3, 300, 2, 1, 1), sample(180e3, 300, 4, 1, 0)]);
  const context = canvas.getContext("2d");
  const { data } = context.getImageData(0, 0, 300, 180);
  const rows = (name, x) => {
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const wanted = [1, 3, 5].map((at) => parseInt(context.fillStyle.slice(at, at + 2), 16));
    const found = [...Array(180).keys()].filter((y) => wanted.every((value, at) => data[4 * (y * 300 + x) + at] === value));
    return found.length > 0 ? [found[0], found.at(-1)] : null;
  };
  const columns = (name) => [50, 150, 250].map((x) => rows(name, x));
  return {
    says: canvas.getAttribute("aria-label"), mark: rows("--bad", 201),
    used: columns("--used"), slots: columns("--slots"), jobs: columns("--jobs"),
  };
}

const result = "document.querySelector('#try-result').textContent";
const hasResult = "!document.querySelector('#try-result').hidden";

const steps = {
  /** Models, workers with their devices, dead letters by reason. */
  async views(page, model) {
    await visit(page);
    await lookAtDeadLetters(page, model);
    await page.until("the group is open", "document.querySelector('#dead-groups details[open] tbody tr')");
    return page.value(`({
      models: [...document.querySelectorAll("#model-rows tr")].map((row) => row.innerText),
      workers: [...document.querySelectorAll("#worker-cards article")].map((card) => card.innerText),
      drawn: [...document.querySelectorAll("#worker-cards canvas")].every((canvas) => canvas.width > 0
        && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte > 0)),
      charts: [...document.querySelectorAll("#worker-cards article")].map(${chart}),
      letters: document.querySelector("#dead-groups").innerText,
    })`);
  },

  /** The timeline of samples that are made up. */
  async timeline(page) {
    await visit(page);
    return page.value(`(${drawn})()`);
  },

  /** Texts through a model; the result as it is shown. */
  async text(page, model, text) {
    await visit(page);
    await page.fill("#try-text", text);
    await run(page, model);
    await page.until("the result", hasResult);
    const events = await page.value("[...document.querySelectorAll('#try-events li')].map((item) => item.textContent)");
    check(events[0].startsWith("queued") && events.at(-1).startsWith("done"), events.join("\n"));
    return JSON.parse(await page.value(result));
  },

  /** A model that reports how far it is: what the bar and the text beside it show meanwhile, and the events in the end. */
  async progress(page, model, text) {
    await visit(page);
    await page.until("the model is there", `[...document.querySelectorAll("#try-model option")].some(({ value }) => value === "${model}")`);
    await page.fill("#try-text", text);
    await run(page, model);
    const said = "document.querySelector('#try-said').textContent";
    const bar = "document.querySelector('#try-progress').value";
    const seen = [];
    for (const least of [0, 0.5]) {
      await page.until(`a report above ${least}`, `${bar} > ${least} && ${bar} < 1 && ${said} !== ""`);
      seen.push(await page.value(`({ said: ${said}, bar: ${bar}, over: ${hasResult} })`));
    }
    await page.until("the result", hasResult);
    const events = await page.value("[...document.querySelectorAll('#try-events li')].map((item) => item.textContent)");
    return { seen, events, said: await page.value(said), bar: await page.value(bar), job: JSON.parse(await page.value(result)) };
  },

  /** A job's events as a browser's own EventSource gets them, until it connects no more. */
  async eventSource(page, model) {
    await visit(page);
    await run(page, model);
    await page.until("the result", hasResult);
    const { id } = JSON.parse(await page.value(result));
    return page.value(`new Promise((resolve) => {
      const seen = [];
      const source = new EventSource("/v1/jobs/${id}/events");
      for (const name of ["queued", "started", "part", "done"]) source.addEventListener(name, () => seen.push(name));
      source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) resolve(seen); });
    })`);
  },

  /** A file through a model. */
  async file(page, model, file) {
    await visit(page);
    await page.choose("#try-file", file);
    await run(page, model);
    await page.until("the result", hasResult);
    return JSON.parse(await page.value(result));
  },

  /** An output in a store, saved to a folder by its button; or what the page says instead. */
  async outputs(page, model, text, folder) {
    await browser.send("Browser.setDownloadBehavior", { behavior: "allow", downloadPath: folder });
    await visit(page);
    await page.fill("#try-text", text);
    await run(page, model);
    await page.until("the result", hasResult);
    const [{ id }] = JSON.parse(await page.value(result)).output_files;
    await page.click("#try-files button");
    const status = "document.querySelector('#try-files [role=status]').textContent";
    await page.until("it says what became of it", `${status} !== ""`);
    await accessible(page, "the outputs");
    const said = await page.value(status);
    // A browser reports an answer of 404 as an error.
    if (!said.startsWith("saved")) page.faults = page.faults.filter((fault) => !String(fault).includes("404"));
    return { said, file: said.startsWith("saved") ? await saved(folder, id) : null };
  },

  /** A job that does not end, withdrawn by the button. */
  async withdraw(page, model) {
    await visit(page);
    await run(page, model);
    await page.until("the job is queued", "document.querySelector('#try-events li')?.textContent.startsWith('queued')");
    await page.click("#try-withdraw");
    await page.until("the result", hasResult);
    check(await page.value("document.querySelector('#try-withdraw').disabled"), "the button is still there");
    return JSON.parse(await page.value(result));
  },

  /** An operator retries a group, then drops one letter of it: nothing is done before the dialog is confirmed. */
  async operate(page, model) {
    await visit(page);
    await lookAtDeadLetters(page, model);
    const said = "document.querySelector('#dead-said').textContent";
    const asks = "document.querySelector('#act').open";
    const button = (action) => `#dead-groups details[open] > .actions .${action}`;
    await page.until("the group is open", `document.querySelector("${button("retry")}")`);
    await page.click(button("retry"));
    await page.until("the dialog", asks);
    await accessible(page, "the dialog");
    const plan = await page.value("document.querySelector('#act-plan').textContent");
    // Escape leaves everything as it is.
    await page.press("Escape", 27);
    await page.until("the dialog is gone", `!${asks}`);
    await page.click("#dead-groups details[open] tbody input");
    await page.click(button("drop"));
    await page.until("the dialog", asks);
    await page.click("#act-go");
    await page.until("the number is asked for", "document.querySelector('#act-error').textContent !== ''");
    await page.fill("#act-count", "1");
    await page.click("#act-go");
    await page.until("the drop is reported", `${said}.startsWith("1 of 1 dead letter dropped")`);
    const dropped = await page.value(said);
    await page.until("the group is open", `document.querySelector("${button("retry")}")`);
    await page.click(button("retry"));
    await page.until("the dialog", asks);
    await page.click("#act-go");
    await page.until("the retry is reported", `${said}.includes("letters retried")`);
    return { plan, dropped, retried: await page.value(said) };
  },

  /** The hint of a gateway that only shows dead letters, and its buttons. */
  async readOnly(page, model) {
    await visit(page);
    await lookAtDeadLetters(page, model);
    await page.until("the group is open", "document.querySelector('#dead-groups details[open] tbody tr')");
    return page.value(`({
      hint: document.querySelector("#dead-hint").textContent,
      buttons: document.querySelectorAll("#dead-groups button").length,
    })`);
  },

  /** By the keyboard alone: to the form, by way of the link that skips what comes before it. */
  async keyboard(page, model) {
    await visit(page);
    // Once more, so that nothing has the focus; the key is kept.
    await page.open(url);
    await page.until("models", "document.querySelectorAll('#model-rows th').length > 0");
    const reached = [];
    for (let tabs = 0; tabs < 60; tabs += 1) {
      await page.press("Tab", 9);
      const at = await page.value(`(() => {
        const { id, tagName, href } = document.activeElement;
        const shown = getComputedStyle(document.activeElement);
        return { name: id || href || tagName, visible: shown.outlineStyle !== "none" || shown.boxShadow !== "none" };
      })()`);
      check(at.visible, `${at.name} has the focus, and nobody sees it`);
      reached.push(at.name);
      if (at.name === "try-text") break;
    }
    check(reached[0].endsWith("#main"), `the first is ${reached[0]}, not the link that skips the head`);
    for (const wanted of ["key", "dead-model", "try-model", "try-text"]) {
      check(reached.includes(wanted), `${wanted} is not reached: ${reached}`);
    }
    await page.value(`document.querySelector("#try-model").value = "${model}"`);
    for (let tabs = 0; tabs < 2; tabs += 1) await page.press("Tab", 9);
    await page.press("Enter", 13);
    await page.until("the result", hasResult);
    return JSON.parse(await page.value(result));
  },

  /** A wrong key, and one that is no operator's. */
  async refused(page) {
    await page.open(url);
    await page.fill("#key", "wrong");
    await page.press("Enter", 13);
    await page.until("the refusal", "!document.querySelector('#trouble').hidden");
    // A browser reports an answer of 401 as an error.
    page.faults = page.faults.filter((fault) => !String(fault).includes("401"));
    await page.fill("#key", key);
    await page.press("Enter", 13);
    await page.until("the reader's view", "document.querySelector('#worker-cards .hint')");
    page.faults = page.faults.filter((fault) => !String(fault).includes("401"));
    return page.value("document.querySelector('#worker-cards').innerText");
  },

  /** Light, dark and narrow: no serious finding, nothing cut off; pictures, if a folder for them is named. */
  async looks(page, model, folder) {
    const looks = {
      light: { scheme: "light", shown: 1480 },
      dark: { scheme: "dark", shown: 1480 },
      narrow: { scheme: "light", shown: 1820, width: 390, height: 844 },
    };
    for (const [name, { shown, ...look }] of Object.entries(looks)) {
      await visit(page, look);
      await lookAtDeadLetters(page, model);
      await run(page, model);
      await page.until("the result", hasResult);
      await accessible(page, name);
      const cut = await page.value("document.documentElement.scrollWidth - innerWidth");
      check(cut <= 0, `${name}: ${cut} pixels are cut off`);
      if (folder) writeFileSync(join(folder, `page-${name}.png`), await page.picture(shown));
    }
    await page.open(new URL("/docs", url).href);
    await page.until("the description", "document.querySelectorAll('main h2, main h3, main details').length > 5");
    await accessible(page, "docs");
  },
};

try {
  const page = await browser.page();
  const found = await steps[step](page, ...more);
  check(page.faults.length === 0, `the page did what it should not:\n${page.faults.join("\n")}`);
  console.log(JSON.stringify(found ?? null));
} catch (error) {
  console.error(error.stack);
  process.exitCode = 1;
} finally {
  await browser.close();
}
