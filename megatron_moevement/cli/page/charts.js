// SPDX-License-Identifier: Apache-2.0
// Curves over steps, with the faults; of several ranks the mean, and a band from lowest to highest.

function niceRange(low, high, { fromZero, whole }) {
  if (fromZero && low > 0) low = 0;
  if (high <= low) high = low + (Math.abs(low) || 1) * 0.1;
  const step = Math.max(tickStep(high - low, 4), whole ? 1 : 0);
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step, step];
}

// Values beyond these parts of all values may lie outside of a picture: one spike hides no curve.
function robustRange(curves, clip) {
  const values = curves.flatMap((c) => [...(c.data.low || c.data.mean), ...(c.data.high || c.data.mean)]);
  values.sort((a, b) => a - b);
  if (!clip || values.length < 50) return [values[0], values[values.length - 1]];
  const top = values[Math.floor(values.length * 0.995)];
  const highest = values[values.length - 1];
  return [values[0], highest > 3 * top ? top * 1.1 : highest];
}

const PAD = { left: 66, right: 10, top: 8, bottom: 20 };

function drawCurves(chart) {
  const { canvas, curves, format } = chart;
  const [brush, whole] = fitted(canvas, 190);
  const width = whole - PAD.left - PAD.right, height = 190 - PAD.top - PAD.bottom;
  const [low, high, step] = chart.range;
  const x = (value) => PAD.left + ((value - chart.first) / Math.max(chart.last - chart.first, 1)) * width;
  const y = (value) =>
    PAD.top + height - ((Math.min(Math.max(value, low), high) - low) / (high - low)) * height;
  brush.textAlign = "right";
  for (let at = low; at <= high + step / 2; at += step) {
    brush.strokeStyle = colours.grid;
    brush.beginPath();
    brush.moveTo(PAD.left, Math.round(y(at)) + 0.5);
    brush.lineTo(PAD.left + width, Math.round(y(at)) + 0.5);
    brush.stroke();
    brush.fillStyle = colours.soft;
    brush.fillText(format(Math.abs(at) < step / 1e6 ? 0 : at), PAD.left - 5, y(at) + 4);
  }
  brush.textAlign = "center";
  const stepsApart = Math.max(1, tickStep(Math.max(chart.last - chart.first, 1), width / 80));
  for (let at = Math.ceil(chart.first / stepsApart) * stepsApart; at <= chart.last; at += stepsApart) {
    brush.fillText(String(at), Math.min(x(at), whole - 14), 190 - 5);
  }
  brush.fillStyle = colours.bad;
  brush.globalAlpha = 0.4;
  for (const mark of chart.marks) brush.fillRect(x(mark.step) - 0.5, PAD.top, 1, height);
  brush.globalAlpha = 1;
  for (const mark of chart.marks) {
    brush.beginPath();
    brush.moveTo(x(mark.step) - 4, PAD.top); brush.lineTo(x(mark.step) + 4, PAD.top);
    brush.lineTo(x(mark.step), PAD.top + 6);
    brush.fill();
  }
  curves.forEach(({ data, dots }, index) => {
    const colour = colours.curves[index % colours.curves.length];
    if (data.low) {
      brush.fillStyle = colour;
      brush.globalAlpha = 0.22;
      brush.beginPath();
      data.steps.forEach((at, i) => brush.lineTo(x(at), y(data.high[i])));
      for (let i = data.steps.length - 1; i >= 0; i -= 1) brush.lineTo(x(data.steps[i]), y(data.low[i]));
      brush.fill();
      brush.globalAlpha = 1;
    }
    brush.strokeStyle = brush.fillStyle = colour;
    brush.lineWidth = 1.6;
    if (index % 2) brush.setLineDash([5, 3]);
    brush.beginPath();
    data.steps.forEach((at, i) => brush.lineTo(x(at), y(data.mean[i])));
    brush.stroke();
    brush.setLineDash([]);
    brush.lineWidth = 1;
    if (dots || data.steps.length < 3) {
      data.steps.forEach((at, i) => {
        brush.beginPath();
        brush.arc(x(at), y(data.mean[i]), 3, 0, 7);
        brush.fill();
      });
    }
  });
  if (chart.hover !== null) {
    brush.fillStyle = colours.ink;
    brush.fillRect(x(chart.hover) - 0.5, PAD.top, 1, height);
  }
}

function indexAt(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

function valueLine(curve, index, format, isOne) {
  const { data, name } = curve;
  const label = isOne ? "" : `${name}: `;
  if (!data.low || data.low[index] === data.high[index]) return `${label}${format(data.mean[index])}`;
  return `${label}mean ${format(data.mean[index])}, ${format(data.low[index])} to `
    + `${format(data.high[index])} (rank ${data.rank[index]})`;
}

function hovered(chart, event) {
  const box = chart.canvas.getBoundingClientRect();
  const share = (event.clientX - box.left - PAD.left) / (box.width - PAD.left - PAD.right);
  if (share < -0.02 || share > 1.02) return;
  const step = chart.first + share * (chart.last - chart.first);
  const index = indexAt(chart.curves[0].data.steps, step);
  chart.hover = chart.curves[0].data.steps[index];
  drawCurves(chart);
  const lines = chart.curves.map((curve) =>
    valueLine(curve, indexAt(curve.data.steps, chart.hover), chart.exact, chart.curves.length === 1));
  const near = (chart.last - chart.first) * 6 / box.width;
  const mark = chart.marks.find((one) => Math.abs(one.step - step) <= near);
  if (mark) lines.push(`outage ${mark.number}: ${mark.loss}`);
  showTip(event, [`step ${chart.hover}`, ...lines].join("\n"));
}

function curveTable(chart) {
  const { steps } = chart.curves[0].data;
  const every = Math.max(1, Math.ceil(steps.length / 100));
  const rows = steps.filter((_, i) => i % every === 0 || i === steps.length - 1);
  return table(
    [{ title: "step", number: true }, ...chart.curves.map((c) => ({ title: c.name }))],
    rows.map((step) => [step, ...chart.curves.map((curve) =>
      valueLine(curve, indexAt(curve.data.steps, step), chart.exact, true))]),
    chart.title);
}

// A picture of curves; null where none has a value.
function curvesChart(title, about, curves, format, options = {}) {
  const found = curves.filter((curve) => curve.data && curve.data.steps.length);
  if (!found.length) return null;
  const range = robustRange(found, options.clip);
  const chart = {
    title, curves: found, format, exact: options.exact || format, hover: null,
    range: niceRange(range[0], range[1], { fromZero: true, ...options }),
    first: Math.min(...found.map((c) => c.data.steps[0])),
    last: Math.max(...found.map((c) => c.data.steps[c.data.steps.length - 1])),
    marks: run.incidents.filter((one) => stepOf(one) !== null).map((one) => ({
      step: stepOf(one), number: one.number, loss: lossOf(one),
    })),
  };
  chart.canvas = make("canvas", {
    role: "img", "aria-label": `${title} by step; the table below has the numbers`,
    onpointermove: (event) => hovered(chart, event),
    onpointerleave: () => { chart.hover = null; hideTip(); drawCurves(chart); },
  });
  redraws.push(() => drawCurves(chart));
  const legend = found.length < 2 ? null : make("div", { class: "legend" }, found.map((c, i) => {
    const mark = make("i", { class: "key" });
    mark.style.background = `var(--c-${i + 1})`;
    return make("span", null, mark, c.name + (i % 2 ? " (dashed)" : ""));
  }));
  return make("div", { class: "chart" }, make("h3", { text: title }),
    make("p", { class: "soft", text: about }), chart.canvas, legend,
    asTable("Table", () => curveTable(chart)));
}
