// Draws a worker over time: the memory that is used and what passes hold of it, the slots, the unacknowledged jobs, and where passes ran
// out of memory.

const MIB = 1024 * 1024;

/** Bytes for people. */
export function bytes(n) {
  if (n >= 1024 * MIB) return `${(n / 1024 / MIB).toFixed(1)} GiB`;
  return `${(n / MIB).toFixed(n >= 10 * MIB ? 0 : 1)} MiB`;
}

/** Below the pictures, for the times. */
const TIMES_PX = 16;
/** Between the two pictures. */
const GAP_PX = 8;
/** Above the highest value, for its label. */
const LABEL_PX = 14;
/** The part of the height that memory has. The rest is for slots and jobs. */
const MEMORY_PART = 0.6;
const FONT = "11px system-ui, sans-serif";

/**
 * Draws samples into a canvas, in the colours of the page: memory above, slots and unacknowledged jobs below, on one axis of time. Marks
 * of passes that ran out of memory go through both, so that one sees what was used before, and what became of the slots.
 */
export function timeline(canvas, samples) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (width === 0) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  const first = samples.length > 0 ? samples[0].at_ms : 0;
  const last = samples.length > 0 ? samples[samples.length - 1].at_ms : 0;
  const x = (sample) => (last > first ? ((sample.at_ms - first) / (last - first)) * width : width);

  const high = height - TIMES_PX - GAP_PX;
  const split = Math.round(high * MEMORY_PART);
  const memory = picture(0, split, Math.max(1, ...samples.map((sample) => sample.total)));
  const most = Math.max(1, ...samples.map((sample) => Math.max(sample.slots, sample.unacknowledged)));
  const jobs = picture(split + GAP_PX, high + GAP_PX, most);
  grid(context, width, memory, [0.5, 1], bytes, colour);
  grid(context, width, jobs, [1], (count) => plural(count, "job"), colour);
  area(context, samples, x, (sample) => memory.y(sample.used), memory.bottom, colour("--used"));
  area(context, samples, x, (sample) => memory.y(sample.held), memory.bottom, colour("--held"));
  area(context, samples, x, (sample) => jobs.y(sample.unacknowledged), jobs.bottom, colour("--jobs"));
  steps(context, samples, x, (sample) => jobs.y(sample.slots), colour("--slots"));
  if (samples.length > 0) times(context, width, height, first, last, colour);
  context.fillStyle = colour("--bad");
  for (const sample of samples) {
    if (sample.out_of_memory > 0) {
      context.fillRect(Math.min(x(sample), width - 3), 0, 3, height);
    }
  }
  canvas.setAttribute("aria-label", describe(samples));
}

/** A number of things, in words. */
function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString()} ${count === 1 ? one : many}`;
}

/** A part of the canvas, with its scale. Lines are on whole pixels: they are sharp. */
function picture(top, bottom, most) {
  const y = (value) => bottom - 1 - Math.round((value / most) * (bottom - top - LABEL_PX));
  return { bottom, most, y };
}

function grid(context, width, { most, y, bottom }, parts, said, colour) {
  context.strokeStyle = colour("--line");
  context.fillStyle = colour("--soft");
  context.font = FONT;
  context.lineWidth = 1;
  for (const part of [0, ...parts]) {
    const at = (part === 0 ? bottom - 1 : y(most * part)) + 0.5;
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
    if (part > 0) context.fillText(said(most * part), 2, at - 3);
  }
}

/** When the first sample was taken, and the last. */
function times(context, width, height, first, last, colour) {
  const said = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  context.fillStyle = colour("--soft");
  context.font = FONT;
  context.fillText(said(first), 2, height - 3);
  context.textAlign = "right";
  context.fillText(said(last), width - 2, height - 3);
  context.textAlign = "left";
}

/** Traces samples: each holds until the next. */
function trace(context, samples, x, y) {
  let before = null;
  for (const sample of samples) {
    if (before !== null) context.lineTo(x(sample), y(before));
    context.lineTo(x(sample), y(sample));
    before = sample;
  }
}

function area(context, samples, x, y, bottom, colour) {
  if (samples.length === 0) return;
  const top = (sample) => y(sample) + 0.5;
  context.beginPath();
  context.moveTo(x(samples[0]), bottom);
  trace(context, samples, x, top);
  context.lineTo(x(samples[samples.length - 1]), bottom);
  context.closePath();
  context.globalAlpha = 0.35;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = 1;
  context.strokeStyle = colour;
  context.beginPath();
  trace(context, samples, x, top);
  context.stroke();
}

/** A line without an area: also who does not see its colour tells it from the areas. */
function steps(context, samples, x, y, colour) {
  context.lineWidth = 2;
  context.strokeStyle = colour;
  context.beginPath();
  trace(context, samples, x, y);
  context.stroke();
}

/** What the picture shows, in words. */
function describe(samples) {
  if (samples.length === 0) return "No samples of this worker's memory yet.";
  const last = samples[samples.length - 1];
  const failures = samples.reduce((sum, sample) => sum + sample.out_of_memory, 0);
  const minutes = Math.round((last.at_ms - samples[0].at_ms) / 60000);
  const slots = samples.map((sample) => sample.slots);
  const jobs = samples.map((sample) => sample.unacknowledged);
  return `The last ${plural(minutes, "minute")}. Memory: ${bytes(last.used)} of ${bytes(last.total)} used now, `
    + `${bytes(last.held)} of it by passes. Slots: ${last.slots} now, ${Math.min(...slots)} at least, ${Math.max(...slots)} at most. `
    + `Unacknowledged jobs: ${last.unacknowledged} now, ${Math.max(...jobs)} at most; `
    + `${plural(failures, "pass", "passes")} ran out of memory.`;
}
