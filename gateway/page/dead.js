// Dead letters: counted in groups, explained one by one, and, for operators, retried or dropped after a confirmation.

import { bytes } from "./chart.js";
import { ask, element, find, post } from "./common.js";

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// ---- what is there ----

function explained(letter) {
  const told = letter.explanation.flatMap(({ heading, lines }) =>
    [element("dt", {}, heading), ...lines.map((line) => element("dd", {}, line))]);
  return element("details", { class: "why" }, element("summary", {}, letter.error || letter.reason), element("dl", {}, ...told));
}

function letterRow(letter, mayAct) {
  const box = element("input", { type: "checkbox", value: letter.fingerprint, "aria-label": `Choose ${letter.job || letter.fingerprint}` });
  return element("tr", {},
    ...(mayAct ? [element("td", {}, box)] : []),
    element("td", { class: "wide" }, letter.results ? `${letter.job} (results)` : letter.job),
    element("td", {}, letter.dead_at_ms === null ? "?" : new Date(letter.dead_at_ms).toLocaleString()),
    element("td", {}, letter.worker),
    element("td", { class: "number" }, letter.attempts),
    element("td", { class: "number" }, letter.retries),
    element("td", { class: "number" }, letter.needs_bytes === null ? "" : bytes(letter.needs_bytes)),
    element("td", { class: "wide" }, explained(letter)));
}

/** The buttons of a group: they take the chosen letters, or all of the group if none is chosen. */
function buttons(model, group, body) {
  const button = (action, label) => {
    const made = element("button", { type: "button", class: action, "aria-label": `${label} dead letters: ${group.reason}` }, `${label}…`);
    made.addEventListener("click", () => {
      const chosen = [...body.querySelectorAll("input:checked")].map((box) => box.value);
      propose(action, label, { model, ...(chosen.length > 0 ? { fingerprints: chosen } : { group: group.group }) });
    });
    return made;
  };
  return element("div", { class: "row actions" }, button("retry", "Retry"), button("drop", "Drop"),
    element("span", { class: "hint" }, "the chosen dead letters, or the whole group if none is chosen"));
}

function groupDetails(model, group, letters, mayAct, isFirst) {
  const names = ["Job", "When", "Worker", "Attempts", "Retries", "Would need", "Why"];
  const heads = names.map((name) => element("th", { scope: "col" }, name));
  if (mayAct) heads.unshift(element("th", { scope: "col" }, "Choose"));
  const body = element("tbody", {}, ...letters.map((letter) => letterRow(letter, mayAct)));
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body);
  const about = [counted(group.letters, "dead letter"), `worker version ${group.worker_version}`];
  if (group.retried > 0) about.push(`${group.retried} retried before`);
  if (letters.length < group.letters) about.push(`the oldest ${letters.length} are shown`);
  return element("details", isFirst ? { open: "" } : {},
    element("summary", {}, element("strong", {}, group.reason), ` · ${about.join(" · ")}`),
    ...(mayAct ? [buttons(model, group, body)] : []),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Dead letters: ${group.reason}` }, table));
}

/** Reads the dead letters of the chosen model, and shows them. */
export async function look() {
  const area = find("dead-groups");
  const model = find("dead-model").value;
  try {
    const { total, groups, letters, read_only: readOnly } = await (await ask(`/v1/dead-letters?model=${encodeURIComponent(model)}`)).json();
    const said = total === 0 ? "There are none." : `${total} in all.`;
    const hint = readOnly === null
      ? "Looking changes nothing. What you retry or drop is logged with the name of your key."
      : `Read-only: ${readOnly}.`;
    find("dead-hint").textContent = hint;
    const shown = groups.map((group, index) =>
      groupDetails(model, group, letters.filter((letter) => letter.group === group.group), readOnly === null, index === 0));
    area.replaceChildren(element("p", {}, said), ...shown);
  } catch (error) {
    area.replaceChildren(element("p", { class: "bad" }, error.message));
  }
}

// ---- retry and drop ----

/** What the dialog asks about. */
let proposed = null;

function planned(action, plan) {
  const parts = [];
  if (action === "drop") {
    parts.push(`${counted(plan.letters, "dead letter")} will be written to an archive on the gateway's machine, and leave the queue.`);
    parts.push("`vramq dlq restore` puts them back.");
  } else {
    if (plan.jobs > 0) parts.push(`${counted(plan.jobs, "job")} will run again.`);
    if (plan.results > 0) parts.push(`${counted(plan.results, "dead letter")} with results will go to the reply queue.`);
    if (plan.answered > 0) parts.push(`${counted(plan.answered, "job")} will be answered by these results, and not run again.`);
  }
  if (plan.retried > 0) parts.push(`${plan.retried} of them were retried before and failed again.`);
  if (plan.missing.length > 0) parts.push(`${counted(plan.missing.length, "dead letter")} are no longer there.`);
  return parts.join(" ");
}

/** Asks the gateway what an action would take, and the operator whether to do it. */
async function propose(action, label, selection) {
  const said = find("dead-said");
  said.textContent = "";
  try {
    const plan = await post(`/v1/dead-letters/${action}`, selection);
    if (plan.letters === 0) {
      said.textContent = "None of these dead letters is there any more.";
      await look();
      return;
    }
    proposed = { action, selection, letters: plan.letters };
    find("act-title").textContent = `${label} ${counted(plan.letters, "dead letter")} of ${plan.model}?`;
    find("act-plan").textContent = planned(action, plan);
    find("act-type").hidden = action !== "drop";
    find("act-count").value = "";
    find("act-error").textContent = "";
    find("act-go").textContent = label;
    find("act").showModal();
  } catch (error) {
    said.textContent = error.message;
  }
}

function report({ action, letters, done }) {
  if (done === null) return "Nothing was done.";
  const parts = [`${done.moved} of ${counted(letters, "dead letter")} ${action === "drop" ? "dropped" : "retried"}.`];
  if (done.stayed > 0) parts.push(`${done.stayed} stayed: ${done.kept[0]?.why ?? ""}.`);
  if (done.gone > 0) parts.push(`${done.gone} were no longer there.`);
  if (done.archive !== null) parts.push(`Archive: ${done.archive}`);
  return parts.join(" ");
}

/** Carries out what the dialog asked about. */
async function confirmed(event) {
  event.preventDefault();
  const { action, selection, letters } = proposed;
  // Dropping takes the number, as `vramq dlq drop` does: no habit presses it by mistake.
  if (action === "drop" && find("act-count").value.trim() !== String(letters)) {
    find("act-error").textContent = `Type ${letters} to drop the dead letters.`;
    find("act-count").focus();
    return;
  }
  find("act-go").disabled = true;
  try {
    const done = await post(`/v1/dead-letters/${action}`, { ...selection, confirm: letters });
    find("act").close();
    await look();
    find("dead-said").textContent = report(done);
  } catch (error) {
    find("act-error").textContent = error.message;
  } finally {
    find("act-go").disabled = false;
  }
}

/** Connects the forms of this section. */
export function begin() {
  find("dead-form").addEventListener("submit", (event) => {
    event.preventDefault();
    find("dead-said").textContent = "";
    look();
  });
  find("act-form").addEventListener("submit", confirmed);
  find("act-cancel").addEventListener("click", () => find("act").close());
}
