// SPDX-License-Identifier: Apache-2.0
// What a reader does with the timeline: drag, pinch, wheel, keys, and what is shown at the pointer.

function timeAt(event) {
  const box = timeline.canvas.getBoundingClientRect();
  const { left, right } = geometry(timeline.canvas);
  const share = (event.clientX - box.left - left) / (box.width - left - right);
  return timeline.from + share * (timeline.to - timeline.from);
}

function describeMoment(event) {
  const box = timeline.canvas.getBoundingClientRect();
  const y = event.clientY - box.top, time = timeAt(event);
  const { height } = geometry(timeline.canvas);
  const row = timeline.rows[Math.floor((y - LANE) / height)];
  if (y < LANE) {
    const near = (timeline.to - timeline.from) * 12 / box.width;
    const incident = run.incidents.find((one) => Math.abs(one.start - time) < near);
    return incident && `${incident.number}: ${lossOf(incident)}\n`
      + `outage of ${duration(incident.duration_s)}`;
  }
  if (!row || time < timeline.from || time > timeline.to) return null;
  const span = spanAt(row, time);
  const begun = row.edges[span], until = row.edges[span + 1];
  const incident = run.incidents.find((one) => time >= one.start && time < (one.end || 1e18));
  const stage = row.stage === null ? "" : `, stage ${row.stage}`;
  return `${run.parts[row.parts[span]].name} for ${duration(until - begun)}\n`
    + `from ${clockTime(begun, false)} UTC (${since(begun)})\n`
    + `process ${row.process}: ${row.place}${stage}${row.host ? `, ${row.host}` : ""}`
    + (incident ? `\nin outage ${incident.number}` : "");
}

const pointers = new Map();
function pointerDown(event) {
  pointers.set(event.pointerId, event.clientX);
  timeline.canvas.setPointerCapture(event.pointerId);
  if (pointers.size === 1) {
    const x = event.clientX - timeline.canvas.getBoundingClientRect().left;
    timeline.begun = { x, time: timeAt(event), touch: event.pointerType === "touch" };
  }
}

function pointerMove(event) {
  if (!pointers.has(event.pointerId)) {
    const text = describeMoment(event);
    if (text) showTip(event, text);
    else hideTip();
    return;
  }
  const box = timeline.canvas.getBoundingClientRect();
  if (pointers.size === 2) {  // a pinch
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.clientX);
    const after = [...pointers.values()];
    const gap = Math.abs(after[0] - after[1]) || 1;
    zoom((Math.abs(before[0] - before[1]) || 1) / gap, timeAt({ clientX: (after[0] + after[1]) / 2 }));
    return;
  }
  if (timeline.begun.touch || event.shiftKey) {
    pan((pointers.get(event.pointerId) - event.clientX) / box.width);
    pointers.set(event.pointerId, event.clientX);
    return;
  }
  timeline.drag = [timeline.begun.x, event.clientX - box.left];
  drawTimeline();
}

function pointerUp(event) {
  const drag = timeline.drag;
  pointers.delete(event.pointerId);
  timeline.drag = null;
  if (drag && Math.abs(drag[0] - drag[1]) > 6) {
    const times = [timeline.begun.time, timeAt(event)].sort((a, b) => a - b);
    show(times[0], times[1]);
    return;
  }
  drawTimeline();
  if (event.type !== "pointerup") return;
  const near = (timeline.to - timeline.from) * 12 / timeline.canvas.clientWidth;
  const time = timeAt(event);
  const incident = run.incidents.find(
    (one) => (time >= one.start && time < (one.end || 1e18)) || Math.abs(one.start - time) < near);
  if (incident) choose(incident, false);
  if (timeline.begun && timeline.begun.touch) {
    const text = describeMoment(event);
    if (text) showTip(event, text);
  }
}

function pressed(event) {
  const actions = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5),
    "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, run.account.wall_s),
  };
  const action = actions[event.key];
  if (!action || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  action();
}

function timelineSection() {
  const button = (text, title, action) =>
    make("button", { type: "button", title, "aria-label": title, onclick: action, text });
  timeline.shown = make("span", { class: "soft number" });
  timeline.canvas = make("canvas", {
    tabindex: 0, role: "img",
    "aria-label": "What each moment of each process was; the tables below have the sums",
    onpointerdown: pointerDown, onpointermove: pointerMove, onpointerup: pointerUp,
    onpointercancel: pointerUp, onpointerleave: hideTip, onkeydown: pressed,
    ondblclick: () => show(0, run.account.wall_s),
  });
  timeline.canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
  }, { passive: false });
  timeline.map = make("canvas", { class: "map", "aria-hidden": "true" });
  const goTo = (event) => {
    const box = timeline.map.getBoundingClientRect();
    const { left, right } = geometry(timeline.map);
    const half = (timeline.to - timeline.from) / 2;
    const share = (event.clientX - box.left - left) / (box.width - left - right);
    const at = share * run.account.wall_s;
    show(at - half, at + half);
  };
  timeline.map.addEventListener("pointerdown", (event) => {
    timeline.map.setPointerCapture(event.pointerId);
    goTo(event);
  });
  timeline.map.addEventListener("pointermove", (event) => { if (event.buttons) goTo(event); });
  redraws.push(drawTimeline);
  const seen = new Set(timeline.rows.flatMap((row) => [...new Set(row.parts)]));
  const legend = run.parts.filter((_, number) => seen.has(number)).map(({ name }) =>
    make("span", null, key(name), name));
  const names = run.parts.filter((_, number) => seen.has(number)).map(({ name }) => name);
  const rows = () => table(
    [{ title: "process" }, { title: "rank" }, { title: "host" }, { title: "end" },
      ...names.map((title) => ({ title, number: true })), { title: "sum", number: true }],
    timeline.rows.map((row) => {
      const parts = run.account.processes.find((one) => one.process === row.process).parts_s;
      const life = row.lives[row.lives.length - 1];
      return [row.process, row.ranks.join(", ") || "spare", row.host,
        !life || life.code === null ? "not recorded" : `exit code ${life.code}`,
        ...names.map((name) => (parts[name] ? parts[name].toFixed(2) : "")),
        run.account.wall_s.toFixed(2)];
    }), "Seconds of each process by part");
  return make("section", { id: "timeline" },
    make("h2", { text: "Timeline" }),
    make("p", { class: "soft" }, "A row for each process. Numbers are outages, a cross is the end of a ",
      "lost process. Drag over a time, or hold Ctrl and turn the wheel, to zoom; a double click shows all."),
    make("div", { class: "tools" },
      button("\u2212", "Show more time", () => zoom(2)), button("+", "Show less time", () => zoom(0.5)),
      button("\u2190", "Earlier", () => pan(-0.3)), button("\u2192", "Later", () => pan(0.3)),
      button("All", "Show the whole run", () => show(0, run.account.wall_s)), timeline.shown),
    make("div", { class: "rows" }, timeline.canvas), timeline.map,
    make("div", { class: "legend" }, legend),
    asTable("Table: seconds of each process by part", rows));
}
