// SPDX-License-Identifier: Apache-2.0
// The account, curves, experts and what else happened.

const MEANINGS = {
  useful: "steps whose work the job has at its end", stall: "waits of steps for what protects them",
  between: "from a step to the next: reporting, garbage", lost: "steps trained again, and steps cut off",
  detect: "from the fault until it is noticed", teardown: "leaving the old generation",
  rendezvous: "meeting the other processes", build: "groups, and a new process's model",
  plan: "facts and the plan", fetch: "slots and logs are brought", replay: "steps computed again",
  reprotect: "until each slot has a second holder", wait: "for the other ranks",
  save: "durable checkpoints", evaluation: "evaluations", "start-up": "of a launch, to its first step",
  spare: "waiting for a place", ending: "after the last step", gone: "the process has ended",
  down: "between two launches", unexplained: "no event explains it",
};

function accountSection() {
  const { account } = run;
  const whole = Object.values(account.parts_s).reduce((sum, one) => sum + one, 0);
  const names = run.parts.filter(({ name }) => account.parts_s[name]);
  const rows = names.map(({ name }) => [make("span", null, key(name), name), MEANINGS[name],
    account.parts_s[name].toFixed(2), percent(account.parts_s[name] / whole)]);
  rows.push([make("b", { text: "sum" }),
    `${duration(account.wall_s)} of ${plural(account.processes.length, "process", "processes")}`,
    whole.toFixed(2), "100.0 %"]);
  const useful = account.parts_s.useful || 0;
  return make("section", { id: "account" }, make("h2", { text: "Where the time went" }),
    make("p", null, make("b", { text: `Effective training time ratio ${percent(account.effective_training_time_ratio)}` }),
      `: ${useful.toFixed(2)} s useful of ${account.ranks} ranks x ${account.wall_s.toFixed(2)} s. `,
      make("span", { class: "soft", text: `Goodput ${plain(account.goodput_steps_per_s)} steps/s`
        + (account.time_between_failures_s === null ? "." : `, ${duration(account.time_between_failures_s)} between failures.`) })),
    bar(account.parts_s, whole, partsInWords(account.parts_s)),
    table([{ title: "part" }, { title: "what it is" }, { title: "process seconds", number: true },
      { title: "share", number: true }], rows, "Parts of the time of all processes"));
}

function chartSection(id, title, charts, more) {
  const found = charts.filter(Boolean);
  if (!found.length && !more) return null;
  return make("section", { id }, make("h2", { text: title }), make("div", { class: "charts" }, found), more);
}

function trainingSection() {
  const { curves } = run;
  const evaluations = run.evaluations.map((one) => ({
    name: `${one.split}${one.is_final ? " at the end" : ""}`, dots: true,
    data: { steps: one.points.map((p) => p[0]), mean: one.points.map((p) => p[1]) },
  })).filter((one) => one.data.mean.every((value) => typeof value === "number"));
  const broken = run.broken_steps.length ? make("p", {
    text: `Steps without an update or a finite loss: ${run.broken_steps.map(([step, why]) => `${step} (${why})`).join(", ")}`,
  }) : null;
  return chartSection("training", "Training", [
    curvesChart("Loss", "nats per token; triangles are outages", [{ name: "training", data: curves.loss }, ...evaluations],
      plain, { fromZero: false, clip: true, exact: (v) => v.toFixed(4) }),
    curvesChart("Gradient norm", "before clipping", [{ name: "gradient norm", data: curves.grad_norm }], plain, { clip: true }),
    curvesChart("Time of a step", "and what of it training waited for protection",
      [{ name: "step", data: curves.duration_s }, { name: "stall", data: curves.stall_s }], duration, { clip: true }),
  ], broken);
}

function windowsTable() {
  const rows = [
    ...run.schedules.map((one) => [one.step, `schedule ${one.version} in force from step ${one.first_step} on`, one.window, "", ""]),
    ...run.chosen.map((one) => [one.step, `W proposed instead of ${one.former}: ${one.reason}`, one.window,
      one.to_host_bytes_per_s ? rate(one.to_host_bytes_per_s) : "", one.to_holder_bytes_per_s ? rate(one.to_holder_bytes_per_s) : ""]),
  ].sort((a, b) => a[0] - b[0]);
  if (!rows.length) return null;
  return [make("h3", { text: "Window schedules" }), table([{ title: "step", number: true }, { title: "what" },
    { title: "W", number: true }, { title: "to the host", number: true }, { title: "to the slowest holder", number: true }],
  rows, "Window schedules")];
}

function placementSums(placements) {
  const number = (title) => ({ title, number: true });
  const rows = placements.filter((one) => !one.ranks).map((one) => [clockTime(one.at, false), one.generation,
    one.of, one.changed, one.fewest, one.most]);
  return [asTable(`Holders of copies (${plural(rows.length, "placement")})`, () =>
    table([{ title: "UTC, from" }, number("restarts"), number("ranks"), number("with another process or other holders"),
      number("fewest holders of a rank"), number("most ranks of one holder")], rows, "Holders of copies")),
  make("p", { class: "soft", text: "Of more than 64 ranks only sums are here: the holders of each are in the facts beside the events, *.facts.json." })];
}

function placementsTable() {
  const { placements } = run;
  if (!placements.length) return null;
  if (placements.some((one) => !one.ranks)) return placementSums(placements);
  const most = Math.max(...placements.map((one) => one.ranks.length));
  const ranks = Array.from({ length: most }, (_, rank) => ({ title: `rank ${rank}` }));
  const names = (processes) => processes.map((n) => `p${n}`).join(", ") || "none";
  const rows = placements.map((one) => [clockTime(one.at, false), one.generation,
    ...one.ranks.map(([process, holders]) => `p${process}: ${names(holders)}`)]);
  return asTable(`Holders of copies (${plural(placements.length, "placement")})`, () =>
    table([{ title: "UTC, from" }, { title: "restarts", number: true }, ...ranks], rows, "Holders of copies"));
}

function levelsTable() {
  if (!run.protection.length) return null;
  const rows = run.protection.map((one) => [one.step, clockTime(one.at, false), one.level,
    `${one.copies} of ${one.wanted}`, one.spares === null ? "" : one.spares, one.costs.join("; ")]);
  return asTable(`Levels of protection (${rows.length} changes)`, () => table([{ title: "step", number: true },
    { title: "UTC" }, { title: "level" }, { title: "copies" }, { title: "spares", number: true },
    { title: "what a loss costs beyond its own stage" }], rows, "Levels of protection"));
}

function protectionSection() {
  const { curves } = run;
  const more = [windowsTable(), placementsTable(), levelsTable()].flat().filter(Boolean);
  return chartSection("protection", "Windows, slots and holders", [
    curvesChart("Window size and lag", "in steps: W, and how far the newest persisted window is behind",
      [{ name: "W", data: curves.size }, { name: "lag", data: curves.lag }], plain, { whole: true }),
    curvesChart("Copies", "of the newest persisted window, on other processes", [{ name: "copies", data: curves.copies }], plain, { whole: true }),
    curvesChart("Slots", "bytes captured in a step, of each rank", [{ name: "captured", data: curves.captured_bytes }], bytes),
    curvesChart("Sent", "bytes of a step, of each rank",
      [{ name: "copies", data: curves.replicated_bytes }, { name: "upstream log", data: curves.log_bytes }], bytes, { clip: true }),
  ], more.length ? make("div", null, more) : null);
}

function machineSection() {
  const { curves } = run;
  return chartSection("machine", "Host memory and bandwidth", [
    curvesChart("Host memory", "in use by snapshots and logs, of each rank", [{ name: "host memory", data: curves.host_bytes }], bytes),
    curvesChart("To the host", "bandwidth of a slot's copy and its checksums", [{ name: "to the host", data: curves.to_host }], rate, { clip: true }),
    curvesChart("To the slowest holder", "bandwidth of copies", [{ name: "to the slowest holder", data: curves.to_holder }], rate, { clip: true }),
  ]);
}

function expertsSection() {
  const { popularity } = run;
  if (!popularity.scores) {
    return make("section", { id: "experts" }, make("h2", { text: "Experts" }), make("p", { text: popularity.orders.length
      ? `A new order of experts was asked for in steps ${popularity.orders.join(", ")}.`
      : "No popularity of experts is recorded. It is counted with --moevement-order hard, soft, decayed or capacity, "
        + "not with index, the default, and shown from the first new order on." }));
  }
  const { scores, experts } = popularity;
  const layers = Array.from({ length: scores.length / experts }, (_, i) => scores.slice(i * experts, (i + 1) * experts));
  const shares = layers.map((layer) => {
    const sum = layer.reduce((a, b) => a + b, 0) || 1;
    return layer.map((score) => score / sum);
  });
  const canvas = make("canvas", { role: "img", "aria-label": "Share of each expert by layer; the table below has the numbers" });
  const size = Math.max(8, Math.min(18, Math.floor(320 / layers.length)));
  const draw = () => {
    const [brush, whole] = fitted(canvas, layers.length * size + 22);
    const width = (whole - 52) / experts;
    const most = Math.max(...shares.flat());
    brush.textAlign = "right";
    shares.forEach((layer, row) => {
      brush.fillStyle = colours.soft;
      if (size >= 11 || row % 4 === 0) brush.fillText(`layer ${row}`, 46, row * size + size / 2 + 4);
      layer.forEach((share, column) => {
        brush.fillStyle = colours.grid;
        brush.fillRect(52 + column * width, row * size, width - 1, size - 1);
        brush.fillStyle = colours.curves[0];
        brush.globalAlpha = share / most;
        brush.fillRect(52 + column * width, row * size, width - 1, size - 1);
        brush.globalAlpha = 1;
      });
    });
    brush.fillStyle = colours.soft;
    brush.textAlign = "left";
    brush.fillText("expert 0", 52, layers.length * size + 15);
    brush.textAlign = "right";
    brush.fillText(`expert ${experts - 1}; full colour: ${percent(most)}, even: ${percent(1 / experts)}`,
      whole, layers.length * size + 15);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / size);
    const column = Math.floor((event.clientX - box.left - 52) / ((box.width - 52) / experts));
    if (shares[row] && shares[row][column] !== undefined) {
      showTip(event, `layer ${row}, expert ${column}: ${percent(shares[row][column])} of the layer`);
    } else hideTip();
  });
  canvas.addEventListener("pointerleave", hideTip);
  redraws.push(draw);
  const order = scores.map((score, i) => [i, score]).sort((a, b) => a[1] - b[1] || a[0] - b[0]);
  const build = () => table([{ title: "place", number: true }, { title: "layer of experts", number: true },
    { title: "expert", number: true }, { title: "share of its layer", number: true }],
  order.slice(0, 400).map(([i], place) => [place + 1, Math.floor(i / experts), i % experts,
    percent(shares[Math.floor(i / experts)][i % experts])]), "Experts by popularity");
  return make("section", { id: "experts" }, make("h2", { text: "Experts" }),
    make("p", { class: "soft", text: `Popularity (${popularity.ordering}) that the newest order was asked for with, in step ${popularity.step}. `
      + `A new order was asked for ${plural(popularity.orders.length, "time")}: in steps ${popularity.orders.slice(-20).join(", ")}.` }),
    canvas, asTable("Table: experts from the least to the most used", build));
}

function notesSection() {
  if (!run.notes.length && run.launches.length < 2) return null;
  const words = (note) => Object.entries(note).filter(([name]) => !["time", "event", "step", "rank"].includes(name))
    .map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(", ") : value}`).join("; ");
  const launches = run.launches.map((one, index) => ({
    time: one.start, event: "launch", step: "",
    text: `launch ${index}${one.name ? ` (${one.name})` : ""} of ${one.processes} processes`
      + (one.slurm_job ? `, SLURM job ${one.slurm_job}` : "") + `, for ${duration(one.end - one.start)}`,
  }));
  const rows = [...launches, ...run.notes.map((note) => ({ ...note, text: words(note) }))]
    .sort((a, b) => a.time - b.time)
    .map((one) => [clockTime(one.time, true), one.event.replace(/_/g, " "), one.step, one.text]);
  return make("section", { id: "notes" }, make("h2", { text: "What else happened" }),
    asTable(`${plural(rows.length, "event")}: launches, checkpoints, schedules, doubts`,
      () => table([{ title: "UTC" }, { title: "event" }, { title: "step", number: true }, { title: "" }], rows, "Events")));
}
