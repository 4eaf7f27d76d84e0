// Draws a worker's memory over time: what is used, what passes hold, and where passes ran out of memory.

const MIB = 1024 * 1024;

/** Bytes for people. */
export function bytes(n) {
  if (n >= 1024 * MIB) return `${(n / 1024 / MIB).toFixed(1)} GiB`;
  return `${(n / MIB).toFixed(n >= 10 * MIB ? 0 : 1)} MiB`;
}

/** Draws samples into a canvas, in the colours of the page. */
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
  const top = Math.max(1, ...samples.map((sample) => sample.total));
  const first = samples.length > 0 ? samples[0].at_ms : 0;
  const last = samples.length > 0 ? samples[samples.length - 1].at_ms : 0;
  const x = (at) => (last > first ? ((at - first) / (last - first)) * width : width);
  const y = (value) => height - 1 - (value / top) * (height - 14);
  grid(context, width, y, top, colour);
  area(context, samples, (s) => x(s.at_ms), (s) => y(s.used), height, colour("--used"));
  area(context, samples, (s) => x(s.at_ms), (s) => y(s.held), height, colour("--held"));
  context.fillStyle = colour("--bad");
  for (const sample of samples) {
    if (sample.out_of_memory > 0) {
      context.fillRect(Math.min(x(sample.at_ms), width - 3), 0, 3, height);
    }
  }
  canvas.setAttribute("aria-label", describe(samples));
}

function grid(context, width, y, top, colour) {
  context.strokeStyle = colour("--line");
  context.fillStyle = colour("--soft");
  context.font = "11px system-ui, sans-serif";
  for (const part of [0.5, 1]) {
    const at = Math.round(y(top * part)) + 0.5;
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
    context.fillText(bytes(top * part), 2, at - 3);
  }
}

function area(context, samples, x, y, bottom, colour) {
  if (samples.length === 0) return;
  context.beginPath();
  context.moveTo(x(samples[0]), bottom);
  // A sample holds until the next.
  let before = null;
  for (const sample of samples) {
    if (before !== null) context.lineTo(x(sample), y(before));
    context.lineTo(x(sample), y(sample));
    before = sample;
  }
  context.lineTo(x(before), bottom);
  context.closePath();
  context.globalAlpha = 0.35;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
  context.strokeStyle = colour;
  context.stroke();
}

/** What the picture shows, in words. */
function describe(samples) {
  if (samples.length === 0) return "No samples of this worker's memory yet.";
  const last = samples[samples.length - 1];
  const failures = samples.reduce((sum, sample) => sum + sample.out_of_memory, 0);
  const minutes = Math.round((last.at_ms - samples[0].at_ms) / 60000);
  return `Memory of the last ${minutes} minutes: ${bytes(last.used)} of ${bytes(last.total)} used now, `
    + `${bytes(last.held)} of it by passes; ${failures} ${failures === 1 ? "pass" : "passes"} ran out of memory.`;
}
