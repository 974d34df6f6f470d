// SPDX-License-Identifier: Apache-2.0
// The timeline: a row for each process, what each moment was, with faults; it zooms.

const URGENT = new Set(["recovery", "lost"]);
const timeline = { from: 0, to: run.account.wall_s, rows: [], listeners: [] };

// Decodes pairs of a length and a part into edges in seconds, so that a moment is found by bisection.
function decoded(row) {
  const count = row.spans.length / 2;
  const edges = new Float64Array(count + 1);
  const parts = new Uint8Array(count);
  let at = 0;
  for (let i = 0; i < count; i += 1) {
    at += row.spans[2 * i];
    edges[i + 1] = at * row.unit_us / 1e6;
    parts[i] = row.spans[2 * i + 1];
  }
  return { edges, parts };
}

function stageOf(rank) {
  return run.layout && rank >= 0 ? Math.floor(rank / run.layout.ranks_per_stage) : null;
}

function rowName(row) {
  const ranks = [...new Set(row.lives.flatMap((life) => life.ranks))];
  const host = row.lives.length ? row.lives[row.lives.length - 1].host : null;
  const stage = ranks.length === 1 ? stageOf(ranks[0]) : null;
  const place = ranks.length ? `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")}` : "spare";
  const name = ranks.length === 1 ? place : `spare ${row.process}`;
  return { place, name, host, stage, ranks };
}

timeline.rows = run.timeline.map((row) => ({ ...row, ...decoded(row), ...rowName(row) }));
timeline.rows.sort((a, b) => {  // spares, which had several ranks or none, come last
  const order = (row) => (row.ranks.length === 1 ? row.ranks[0] : 1e9);
  return order(a) - order(b) || a.process - b.process;
});

function spanAt(row, time) {
  let low = 0, high = row.parts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (row.edges[middle] <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Draws the spans of a row. Of the spans in one pixel a recovery is drawn before other parts, else
// the longest: a short recovery stays to be seen however long the run is.
function drawRow(brush, row, left, width, top, height) {
  const { edges, parts } = row;
  const perPixel = (timeline.to - timeline.from) / width;
  const last = parts.length - 1;
  let pixel = -1;
  let inside = {};
  const flush = () => {
    if (pixel < 0) return;
    let best = -1, most = 0, urgent = false;
    for (const name in inside) {
      const isUrgent = URGENT.has(run.parts[name].group);
      if ((isUrgent && !urgent) || (isUrgent === urgent && inside[name] > most)) {
        best = +name; most = inside[name]; urgent = isUrgent;
      }
    }
    if (best >= 0) {
      brush.fillStyle = colours.parts[best];
      brush.fillRect(left + pixel, top, 1.02, height);
    }
    inside = {};
  };
  for (let i = spanAt(row, timeline.from); i <= last && edges[i] < timeline.to; i += 1) {
    const from = Math.max(0, (edges[i] - timeline.from) / perPixel);
    const to = Math.min(width, (edges[i + 1] - timeline.from) / perPixel);
    let first = Math.floor(from);
    if (first !== pixel) { flush(); pixel = first; }
    const end = Math.floor(to);
    if (end === first) { inside[parts[i]] = (inside[parts[i]] || 0) + to - from; continue; }
    inside[parts[i]] = (inside[parts[i]] || 0) + first + 1 - from;
    flush();
    first += 1;
    if (end > first) {
      brush.fillStyle = colours.parts[parts[i]];
      brush.fillRect(left + first, top, end - first + 0.02, height);
    }
    pixel = end;
    if (to > end) inside[parts[i]] = (inside[parts[i]] || 0) + to - end;
  }
  flush();
}

const LANE = 24;
const AXIS = 20;
function geometry(canvas) {
  const count = timeline.rows.length;
  const height = count <= 24 ? 19 : count <= 64 ? 13 : count <= 256 ? 6 : 3;
  const narrow = canvas.clientWidth < 560;
  return { height, left: count > 64 ? 8 : narrow ? 56 : 196, narrow, right: 8 };
}

function timeAxis(brush, left, width, y, bottom) {
  const step = timeStep(timeline.to - timeline.from, width / 90);
  brush.strokeStyle = colours.grid;
  brush.fillStyle = colours.soft;
  brush.textAlign = "center";
  for (let at = Math.ceil(timeline.from / step) * step; at <= timeline.to; at += step) {
    const x = left + ((at - timeline.from) / (timeline.to - timeline.from)) * width;
    brush.beginPath();
    brush.moveTo(x, LANE);
    brush.lineTo(x, bottom);
    brush.stroke();
    const text = step < 1 ? `${at.toFixed(step < 0.1 ? 2 : 1)} s` : since(at);
    brush.fillText(text, Math.min(Math.max(x, left + 14), left + width - 16), y + 14);
  }
}

function drawFlags(brush, left, width, bottom) {
  let lastX = -99;
  brush.textAlign = "center";
  for (const incident of run.incidents) {
    const x = left + ((incident.start - timeline.from) / (timeline.to - timeline.from)) * width;
    if (x < left - 1 || x > left + width + 1) continue;
    const isChosen = incident.number === timeline.chosen;
    brush.fillStyle = isChosen ? colours.accent : colours.bad;
    brush.globalAlpha = 0.45;
    brush.fillRect(x - 0.5, LANE, 1, bottom - LANE);
    brush.globalAlpha = 1;
    if (x - lastX < 17 && !isChosen) { brush.fillRect(x - 1, 15, 2, LANE - 15); continue; }
    brush.beginPath();
    brush.arc(x, 12, 9, 0, 7);
    brush.fill();
    brush.fillStyle = colours.card;
    brush.font = "bold 10.5px system-ui, sans-serif";
    brush.fillText(String(incident.number), x, 16);
    brush.font = "11px system-ui, sans-serif";
    lastX = x;
  }
}

// A cross on the row of a process where it was lost.
function drawDeaths(brush, left, width, size) {
  brush.lineWidth = 2;
  timeline.rows.forEach((row, index) => {
    for (const life of row.lives) {
      if (life.end === null || !life.code || life.code === 75) continue;
      const x = left + ((life.end - timeline.from) / (timeline.to - timeline.from)) * width;
      if (x < left || x > left + width) continue;
      const y = LANE + index * size + size / 2, half = Math.min(5, size / 2 - 1);
      for (const [style, thick] of [[colours.card, 4], [colours.bad, 2]]) {
        brush.strokeStyle = style;
        brush.lineWidth = thick;
        brush.beginPath();
        brush.moveTo(x - half, y - half); brush.lineTo(x + half, y + half);
        brush.moveTo(x + half, y - half); brush.lineTo(x - half, y + half);
        brush.stroke();
      }
    }
  });
  brush.lineWidth = 1;
}

function shortened(brush, text, width) {
  let shown = text;
  while (shown && brush.measureText(shown).width > width) shown = shown.slice(0, -1);
  return shown.length < text.length ? `${shown.slice(0, -1)}\u2026` : text;
}

function drawNames(brush, left, size, narrow) {
  if (size < 12) return;
  brush.textAlign = "left";
  timeline.rows.forEach((row, index) => {
    const y = LANE + index * size + size / 2 + 4;
    brush.fillStyle = colours.ink;
    brush.fillText(shortened(brush, row.name, left - 6), 2, y);
    if (narrow) return;
    brush.fillStyle = colours.soft;
    brush.fillText(row.stage === null ? "" : `stage ${row.stage}`, 60, y);
    brush.fillText(shortened(brush, row.host || "", left - 116), 110, y);
  });
}

function drawTimeline() {
  const { canvas } = timeline;
  const { height: size, left, narrow, right } = geometry(canvas);
  const rowsBottom = LANE + timeline.rows.length * size;
  const [brush, whole] = fitted(canvas, rowsBottom + AXIS);
  const width = whole - left - right;
  drawNames(brush, left, size, narrow);
  timeAxis(brush, left, width, rowsBottom, rowsBottom);
  timeline.rows.forEach((row, index) => {
    drawRow(brush, row, left, width, LANE + index * size + 1, size - (size > 6 ? 2 : 0));
  });
  drawFlags(brush, left, width, rowsBottom);
  drawDeaths(brush, left, width, size);
  if (timeline.drag) {
    const [a, b] = timeline.drag;
    brush.fillStyle = colours.accent;
    brush.globalAlpha = 0.25;
    brush.fillRect(Math.min(a, b), LANE, Math.abs(b - a), rowsBottom - LANE);
    brush.globalAlpha = 1;
  }
  drawMap();
  timeline.shown.textContent = `${since(timeline.from)} to ${since(timeline.to)}`
    + ` (${duration(timeline.to - timeline.from)})`;
}

// The whole run in one strip, with what is shown above it in a frame.
function drawMap() {
  const [brush, whole] = fitted(timeline.map, 22);
  const { left, right } = geometry(timeline.map);
  const wall = run.account.wall_s, width = whole - left - right;
  brush.translate(left, 0);
  brush.fillStyle = colours.grid;
  brush.fillRect(0, 4, width, 14);
  brush.fillStyle = colours.bad;
  for (const incident of run.incidents) {
    const end = incident.end === null ? wall : incident.end;
    const x = (incident.start / wall) * width;
    brush.fillRect(x, 4, Math.max(1.5, ((end - incident.start) / wall) * width), 14);
  }
  const from = (timeline.from / wall) * width, to = (timeline.to / wall) * width;
  brush.strokeStyle = colours.accent;
  brush.lineWidth = 2;
  brush.strokeRect(from + 1, 2, Math.max(3, to - from - 2), 18);
  brush.lineWidth = 1;
}

let pending = false;
function show(from, to) {
  const wall = run.account.wall_s;
  const range = Math.min(Math.max(to - from, 0.02), wall);
  timeline.from = Math.min(Math.max(from, 0), wall - range);
  timeline.to = timeline.from + range;
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawTimeline(); });
}

function zoom(factor, centre) {
  const at = centre === undefined ? (timeline.from + timeline.to) / 2 : centre;
  show(at - (at - timeline.from) * factor, at + (timeline.to - at) * factor);
}

function pan(share) {
  const by = (timeline.to - timeline.from) * share;
  show(timeline.from + by, timeline.to + by);
}

function showIncident(incident) {
  const end = incident.end === null ? run.account.wall_s : incident.end;
  const margin = Math.max((end - incident.start) * 0.35, 0.2);
  show(incident.start - margin, end + margin);
}
