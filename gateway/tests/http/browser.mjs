// Drives Chromium over the DevTools protocol, by the pipe that the browser offers for it: no port, no library.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

/** How long a condition of a page may take to come true. */
const DEADLINE_MS = 60_000;

/** A browser of its own, with an empty profile. */
export class Browser {
  #process;
  #profile = mkdtempSync(join(tmpdir(), "vramq-browser-"));
  #waiting = new Map();
  #listeners = [];
  #last = 0;

  constructor(program) {
    const options = [
      "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
      "--no-first-run", "--disable-background-networking", "--hide-scrollbars", `--user-data-dir=${this.#profile}`,
    ];
    const stdio = ["ignore", "ignore", "ignore", "pipe", "pipe"];
    this.#process = spawn(program, options, { stdio });
    let rest = "";
    this.#process.stdio[4].setEncoding("utf8").on("data", (text) => {
      const messages = (rest + text).split("\0");
      rest = messages.pop();
      for (const message of messages) this.#received(JSON.parse(message));
    });
    this.#process.on("exit", (code) => {
      for (const { reject } of this.#waiting.values()) reject(new Error(`the browser ended with ${code}`));
    });
  }

  #received(message) {
    const waiting = this.#waiting.get(message.id);
    if (waiting) {
      this.#waiting.delete(message.id);
      if (message.error) waiting.reject(new Error(JSON.stringify(message.error)));
      else waiting.resolve(message.result);
    } else {
      for (const listener of this.#listeners) listener(message);
    }
  }

  /** Sends a command; its result. */
  send(method, params = {}, sessionId = undefined) {
    const id = ++this.#last;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.#process.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    });
  }

  on(listener) {
    this.#listeners.push(listener);
  }

  /** A new page. */
  async page() {
    const { targetId } = await this.send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await this.send("Target.attachToTarget", { targetId, flatten: true });
    const page = new Page(this, sessionId);
    await page.begin();
    return page;
  }

  async close() {
    const ended = new Promise((resolve) => this.#process.on("exit", resolve));
    await this.send("Browser.close").catch(() => {});
    await ended;
    rmSync(this.#profile, { recursive: true, force: true });
  }
}

/** A page: what a person does with it, and what it did that it should not. */
class Page {
  /** Requests to others than the page's own server, errors of its scripts, violations of its policy. */
  faults = [];
  #browser;
  #session;
  #origin = null;

  constructor(browser, session) {
    this.#browser = browser;
    this.#session = session;
  }

  send(method, params) {
    return this.#browser.send(method, params, this.#session);
  }

  async begin() {
    this.#browser.on(({ method, params, sessionId }) => {
      if (sessionId !== this.#session) return;
      if (method === "Runtime.exceptionThrown") this.faults.push(params.exceptionDetails.exception?.description);
      if (method === "Log.entryAdded" && params.entry.level === "error") this.faults.push(params.entry.text);
      if (method === "Network.requestWillBeSent") {
        const url = new URL(params.request.url);
        if (url.protocol !== "data:" && this.#origin && url.origin !== this.#origin) this.faults.push(`asks ${url}`);
      }
    });
    for (const domain of ["Page", "Runtime", "Log", "Network", "DOM"]) await this.send(`${domain}.enable`);
  }

  /** Loads a URL; the page then has this size and colours. */
  async open(url, { width = 1200, height = 900, scheme = "light" } = {}) {
    this.#origin = new URL(url).origin;
    const mobile = width < 600;
    await this.send("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile });
    await this.send("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
    await this.send("Page.navigate", { url });
    await this.until("the page is loaded", "document.readyState === 'complete'");
  }

  /** The value of an expression in the page. */
  async value(expression) {
    const options = { expression, awaitPromise: true, returnByValue: true };
    const { result, exceptionDetails } = await this.send("Runtime.evaluate", options);
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  /** Waits until an expression is true in the page. */
  async until(what, expression) {
    const end = Date.now() + DEADLINE_MS;
    while (!(await this.value(`!!(${expression})`).catch(() => false))) {
      if (Date.now() > end) throw new Error(`in vain: ${what}\n${await this.value("document.body.innerText")}`);
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  }

  /** Clicks on the middle of an element, as a mouse does. */
  async click(selector) {
    const at = await this.value(`(() => {
      const found = document.querySelector(${JSON.stringify(selector)});
      found.scrollIntoView({ block: "center" });
      const { x, y, width, height } = found.getBoundingClientRect();
      return { x: x + width / 2, y: y + height / 2 };
    })()`);
    for (const type of ["mousePressed", "mouseReleased"]) {
      await this.send("Input.dispatchMouseEvent", { type, ...at, button: "left", clickCount: 1 });
    }
  }

  /** Presses a key: its name and its code. */
  async press(key, code) {
    const text = key === "Enter" ? "\r" : undefined;
    await this.send("Input.dispatchKeyEvent", { type: "keyDown", key, windowsVirtualKeyCode: code, text });
    await this.send("Input.dispatchKeyEvent", { type: "keyUp", key, windowsVirtualKeyCode: code });
  }

  /** Replaces the text of a field. */
  async fill(selector, text) {
    await this.value(`(() => { const field = document.querySelector(${JSON.stringify(selector)}); field.focus(); field.select(); })()`);
    await this.send("Input.insertText", { text });
  }

  /** Chooses a file in a field for files. */
  async choose(selector, file) {
    const { root } = await this.send("DOM.getDocument");
    const { nodeId } = await this.send("DOM.querySelector", { nodeId: root.nodeId, selector });
    await this.send("DOM.setFileInputFiles", { nodeId, files: [file] });
  }

  /** The page from its top down to this height, as a PNG of three quarters of its size. */
  async picture(height) {
    await this.value("document.activeElement.blur(); scrollTo(0, 0)");
    const width = await this.value("innerWidth");
    const clip = { x: 0, y: 0, width, height, scale: 0.75 };
    const options = { format: "png", captureBeyondViewport: true, clip };
    const { data } = await this.send("Page.captureScreenshot", options);
    return Buffer.from(data, "base64");
  }
}
