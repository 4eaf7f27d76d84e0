// Takes pictures of pages of the documentation, as a site, in Chromium.
//
//     node scripts/site-pictures.mjs SITE FOLDER      `make site-pictures` does this
//
// Fails if a script of a page fails, or if a diagram is not drawn. VRAMQ_TEST_CHROMIUM is the browser's program.

import { mkdirSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

import { Browser } from "../gateway/tests/http/browser.mjs";

const PAGES = ["repository/overview", "first-job", "celery", "capacity", "memory", "bench/index", "troubleshooting"];
const SIZE = { width: 1200, height: 1500 };

const [site, folder] = process.argv.slice(2);
if (!folder) {
  console.error("usage: node scripts/site-pictures.mjs SITE FOLDER");
  process.exit(2);
}
mkdirSync(folder, { recursive: true });
const browser = new Browser(process.env.VRAMQ_TEST_CHROMIUM ?? "chromium");
let faults = [];
for (const name of PAGES) {
  const page = await browser.page();
  await page.open(pathToFileURL(resolve(site, `${name}.html`)).href, SIZE);
  await page.until("the diagrams", "[...document.querySelectorAll('pre.mermaid')].every((it) => it.querySelector('svg'))");
  const picture = join(folder, `${name.replace("/", "-")}.png`);
  writeFileSync(picture, await page.picture(SIZE.height));
  faults = faults.concat(page.faults.map((fault) => `${name}: ${fault}`));
  console.log(picture);
}
await browser.close();
for (const fault of faults) console.error(fault);
process.exitCode = faults.length > 0 ? 1 : 0;
