// SPDX-License-Identifier: Apache-2.0
// Elements, formats and colours. Text from events reaches the page as text nodes alone.

const run = JSON.parse(document.getElementById("document").textContent);
const redraws = [];

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function clear(element) {
  while (element.firstChild) element.firstChild.remove();
  return element;
}

function digits(value, count) {
  if (value === 0) return "0";
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(places, 8));
}

// Without zeros at the end, as the numbers of an axis are written.
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "?";
  if (seconds === 0) return "0 s";
  const s = Math.abs(seconds);
  if (s < 0.0995) return `${digits(s * 1000, 2)} ms`;
  if (s < 99.95) return `${digits(s, s < 10 ? 2 : 3)} s`;
  if (s < 5995) return `${Math.floor(Math.round(s) / 60)} min ${Math.round(s) % 60} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.round((minutes % 1440) / 60)} h`;
}

function scaled(value, units, base) {
  let place = 0;
  while (Math.abs(value) >= base * 0.9995 && place < units.length - 1) {
    value /= base;
    place += 1;
  }
  return `${trimmed(digits(value, 3))} ${units[place]}`;
}

const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
const rate = (value) => `${bytes(value)}/s`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const plain = (value) => (Number.isInteger(value) ? String(value) : trimmed(digits(value, 4)));
const plural = (count, one, many) => `${count} ${count === 1 ? one : many || `${one}s`}`;

function clockTime(seconds, withDate) {
  const text = new Date((run.begun_s + seconds) * 1000).toISOString();
  return withDate ? `${text.slice(0, 10)} ${text.slice(11, 19)}` : text.slice(11, 19);
}

function since(seconds) {
  const s = Math.max(0, seconds), pad = (n) => String(n).padStart(2, "0");
  const whole = Math.floor(s);
  const hours = Math.floor(whole / 3600);
  const rest = `${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  colours = { parts: run.parts.map((part) => get(`p-${part.name}`)) };
  for (const name of ["ink", "soft", "line", "grid", "card", "accent", "bad", "back"]) {
    colours[name] = get(name);
  }
  colours.curves = [1, 2, 3, 4].map((number) => get(`c-${number}`));
}

function key(part) {
  const mark = make("i", { class: "key" });
  mark.style.background = `var(--p-${part})`;
  return mark;
}

function bar(parts, whole, label) {
  const element = make("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const { name } of run.parts) {
    if (!parts[name]) continue;
    const piece = make("i");
    piece.style.background = `var(--p-${name})`;
    piece.style.width = `${(100 * parts[name]) / whole}%`;
    element.append(piece);
  }
  return element;
}

function partsInWords(parts) {
  return run.parts
    .filter(({ name }) => parts[name] >= 0.0005)
    .map(({ name }) => `${name} ${duration(parts[name])}`)
    .join(", ");
}

function table(columns, rows, name) {
  const head = columns.map((c) => make("th", { class: c.number && "number", text: c.title, scope: "col" }));
  const body = rows.map((row) =>
    make("tr", null, row.map((cell, index) => {
      const kind = columns[index].number ? "number" : null;
      return cell instanceof Node ? make("td", { class: kind }, cell)
        : make("td", { class: kind, text: cell === null || cell === undefined ? "" : cell });
    })));
  const whole = make("table", { "aria-label": name }, make("thead", null, make("tr", null, head)));
  whole.append(make("tbody", null, body));
  return make("div", { class: "scroll", tabindex: 0 }, whole);
}

// A table that is made when a reader opens it: the same numbers as a picture has, for those who
// don't see it.
function asTable(title, build) {
  const element = make("details", null, make("summary", { text: title }));
  element.addEventListener("toggle", () => {
    if (element.open && element.children.length === 1) element.append(build());
  });
  return element;
}

const tip = make("div", { class: "tip", role: "status" });
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const width = tip.offsetWidth, height = tip.offsetHeight;
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const below = event.clientY + 16;
  tip.style.left = `${Math.max(6, left)}px`;
  tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
}
const hideTip = () => { tip.style.display = "none"; };

function fitted(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const brush = canvas.getContext("2d");
  brush.setTransform(ratio, 0, 0, ratio, 0, 0);
  brush.clearRect(0, 0, width, height);
  brush.font = "11px system-ui, sans-serif";
  return [brush, width];
}

const STEPS = [1, 2, 5];
function tickStep(range, count) {
  const rough = range / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return (STEPS.find((step) => step * power >= rough) || 10) * power;
}
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
function timeStep(range, count) {
  const rough = range / Math.max(count, 1);
  if (rough < 1) return tickStep(range, count);
  return TIMES.find((step) => step >= rough) || Math.ceil(rough / 86400) * 86400;
}
