// SPDX-License-Identifier: Apache-2.0
// What went wrong: how the job ended, each outage in a row, and one of them in full.

function banner() {
  const { ending, incidents } = run;
  const open = incidents.find((one) => !one.is_over);
  const lost = ending.casualties.length ? ending.casualties.map((one) => one.line) : [];
  const because = lost.length ? lost : open && open.summary ? [open.summary] : [];
  let kind = "good", title = "The job ended well.";
  const details = [];
  if (ending.code === 0) {
    if (incidents.length) {
      details.push(`${plural(run.account.faults, "fault")} on the way; `
        + `training went on after ${incidents.length === 1 ? "it" : "each"}.`);
    }
  } else if (ending.code === 75) {
    kind = "bad";
    title = "The job stopped with exit code 75: its state is kept.";
    details.push("Launch it again as it was, without the lost host: it goes on from there.");
  } else if (ending.code !== null) {
    kind = "bad";
    title = `The job ${ending.words}.`;
  } else {
    kind = open ? "bad" : "warn";
    title = open ? "An outage has not ended, and no end of the job is recorded."
      : "No end of the job is recorded: it runs, or what started it was lost with it.";
    details.push(`The newest event is ${clockTime(run.account.wall_s, true)} UTC.`);
  }
  return make("div", { class: `banner ${kind}`, role: "status" },
    make("strong", { text: because.length ? `${because[0]}${because.length > 1 ? ` (and ${because.length - 1} more)` : ""}` : title }),
    because.length ? make("p", { text: title }) : null,
    details.map((text) => make("p", { text })),
    because.length > 1 ? make("details", null, make("summary", { text: "All lost processes" }),
      because.map((text) => make("p", { text }))) : null);
}

function worstHost() {
  const counts = new Map();
  for (const incident of [...run.incidents, run.ending]) {
    for (const host of new Set(incident.casualties.map((one) => one.host).filter(Boolean))) {
      counts.set(host, (counts.get(host) || 0) + 1);
    }
  }
  const [worst] = [...counts].sort((a, b) => b[1] - a[1]);
  return worst && worst[1] > 1 ? worst : null;
}

function tiles() {
  const account = run.account;
  const lost = run.incidents.reduce((sum, one) => sum + one.duration_s, 0);
  const worst = worstHost();
  const last = run.protection[run.protection.length - 1];
  const found = [
    [percent(account.effective_training_time_ratio), "effective training time"],
    [String(account.steps), `steps on ${plural(account.ranks, "rank")} in ${duration(account.wall_s)}`],
    [String(account.faults), `${account.faults === 1 ? "fault" : "faults"}, ${plural(run.incidents.length, "outage")}`],
    [duration(lost), `down in outages${account.time_to_recover_s === null ? ""
      : `, ${duration(account.time_to_recover_s)} each`}`],
    worst ? [`${worst[1]} times`, `processes were lost on ${worst[0]}`]
      : [duration(account.time_between_failures_s === null ? account.wall_s : account.time_between_failures_s),
        account.faults ? "between failures" : "without a fault"],
    last ? [last.level, `protection now, ${last.copies} of ${plural(last.wanted, "copy", "copies")}`]
      : ["none", "protection: no window is persisted"],
  ];
  return make("div", { class: "tiles" }, found.map(([value, text]) =>
    make("div", { class: "tile" }, make("b", { text: value }), make("span", { text }))));
}

function verdictOf(incident) {
  if (incident.recovery) return incident.recovery.verdict;
  return incident.plan ? incident.plan.verdict : incident.is_over ? "relaunch" : "none";
}

function proofChip(incident) {
  const { recovery } = incident;
  if (!incident.is_over) return make("span", { class: "chip bad", text: "not over" });
  if (!recovery) return make("span", { class: "chip", text: "no recovery" });
  if (!recovery.verified) return make("span", { class: "chip bad", text: "\u2717 bits differ" });
  if (!recovery.proof) return make("span", { class: "chip", text: "nothing replayed" });
  return recovery.unproven ? make("span", { class: "chip warn", text: "proven in part" })
    : make("span", { class: "chip good", text: "\u2713 same bits" });
}

// Numbers in a row as their first and last one.
function ranges(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a} to ${b}`)).join(", ");
}

function action(incident) {
  const { recovery, plan } = incident;
  const scope = recovery ? recovery.scope : plan ? plan.scope : [];
  const steps = recovery ? recovery.replayed_steps : 0;
  const stages = scope.length
    ? `, ${scope.length === 1 ? "stage" : "stages"} ${ranges(scope)} replayed ${plural(steps, "step")}` : "";
  const lost = plan && plan.lost_steps ? `, ${plural(plan.lost_steps, "step")} lost` : "";
  return `${verdictOf(incident)}${stages}${lost}`;
}

const stepOf = (incident) => (incident.plan ? incident.plan.target : incident.step);

const lossOf = (incident) => incident.summary || (incident.is_relaunch
  ? `launch ${incident.launch - 1} ended; how is not recorded` : "no loss recorded");

function lossInBrief(incident) {
  const [first, ...others] = incident.casualties;
  if (!first || others.length || !first.host || first.rank === null || !first.end) {
    return make("b", { text: lossOf(incident) });
  }
  return make("span", null, make("b", { text: `rank ${first.rank} on ${first.host}` }), ` ${first.end}`);
}

function recoveriesSection() {
  if (!run.incidents.length) {
    const text = run.account.faults ? "Training has not gone on after a fault yet." : "No fault was noticed.";
    return make("section", null, make("h2", { text: "Outages" }), make("p", { text }));
  }
  const longest = Math.max(...run.incidents.map((one) => one.duration_s), 1e-9);
  const rows = run.incidents.map((incident) => {
    const parts = bar(incident.parts_s, incident.duration_s, partsInWords(incident.parts_s));
    parts.style.width = `${Math.max(2, (100 * incident.duration_s) / longest)}%`;
    const row = make("tr", { tabindex: 0, onclick: () => choose(incident, true) },
      make("td", null, make("b", { text: String(incident.number) })),
      make("td", null, lossInBrief(incident),
        incident.faults > 1 ? ` (${incident.faults} faults in a row)` : ""),
      make("td", { class: "number cost" }, make("b", { text: duration(incident.duration_s) })),
      make("td", { class: "wide" }, parts),
      make("td", { class: "wide", text: action(incident) }),
      make("td", { class: "wide" }, proofChip(incident)),
      make("td", { class: "number rest", text: stepOf(incident) === null ? "" : String(stepOf(incident)) }),
      make("td", { class: "number rest", text: clockTime(incident.start, false) }));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(incident, true); });
    incident.row = row;
    return row;
  });
  const heads = ["#", "What was lost", "Outage", "Its parts", "What was done", "Proof", "Step", "UTC"]
    .map((text, i) => make("th", { scope: "col", class: [2, 6, 7].includes(i) && "number", text }));
  const whole = make("table", { class: "recoveries" }, make("thead", null, make("tr", null, heads)),
    make("tbody", null, rows));
  whole.querySelectorAll("th")[3].style.width = "15%";
  const used = run.parts.filter(({ name }) => run.incidents.some((one) => one.parts_s[name]));
  return make("section", { id: "outages" }, make("h2", { text: "Outages" }),
    make("p", { class: "soft", text: "Choose one to see all of it below, and in the timeline." }),
    make("div", { class: "scroll" }, whole),
    make("div", { class: "legend" }, used.map(({ name }) => make("span", null, key(name), name))));
}

function pipeline(incident) {
  const { layout } = run;
  if (!layout) return null;
  const plan = incident.plan || {}, recovery = incident.recovery || {};
  const scope = new Set(recovery.scope || plan.scope || []);
  const lost = new Set(incident.casualties.map((one) => one.rank));
  const per = layout.ranks_per_stage;
  const stages = Array.from({ length: layout.pp }, (_, stage) => {
    const does = scope.has(stage) ? `replays ${plural(recovery.replayed_steps || plan.replayed_steps || 0, "step")}`
      : verdictOf(incident) === "ROLLBACK" ? "loads a checkpoint" : "stands by";
    const ranks = Array.from({ length: per }, (_, i) => stage * per + i);
    const shown = per <= 32 ? ranks : ranks.filter((rank) => lost.has(rank));
    return make("div", { class: `stage${scope.has(stage) ? " scope" : ""}` },
      make("b", { text: `stage ${stage}` }), make("span", { class: "soft", text: does }),
      make("div", { class: "ranks" }, shown.map((rank) =>
        make("span", { class: lost.has(rank) && "lost", title: lost.has(rank) ? `rank ${rank} was lost` : `rank ${rank}`,
          text: lost.has(rank) ? `\u2715${rank}` : String(rank) })),
      shown.length < per ? make("span", { text: `of ${per}` }) : null));
  });
  return [make("h3", { text: "Scope on the pipeline" }), make("div", { class: "pipeline" }, stages)];
}

function holdersMatrix(incident) {
  const { holders } = incident;
  if (!holders || !holders.window || !holders.held) return null;
  const size = holders.window[1] - holders.window[0] + 1;
  const numbers = holders.processes.map((one) => one.process);
  const head = make("tr", null, make("th", { text: "rank" }), numbers.map((n) => make("th", { text: `p${n}` })));
  const rows = holders.held.map((held, rank) => make("tr", null, make("th", { text: String(rank) }),
    numbers.map((n) => {
      const count = held[n] || 0;
      const kind = count === size ? "whole" : count ? "part" : null;
      return make("td", { class: kind, title: `process ${n} had ${count} of ${size} slots of rank ${rank}`,
        text: count && count < size ? String(count) : "" });
    })));
  return [make("h3", { text: `Holders of window ${holders.window[0]} to ${holders.window[1]} when it was planned` }),
    make("p", { class: "soft", text: "Filled: all slots of the rank are in the memory of the process; a number: so many of "
      + `${size}. Fewest whole copies of a rank: ${holders.copies}.` }),
    make("div", { class: "scroll" }, make("table", { class: "matrix" }, head, rows))];
}

function protectionWords(level) {
  if (!level) return "not recorded";
  const spares = level.spares === null ? "" : `, ${plural(level.spares, "spare")} left`;
  return [`${level.level}, ${level.copies} of ${level.wanted} copies${spares}`, ...level.costs].join("; ");
}

function detail(incident) {
  const { plan, recovery } = incident;
  const facts = [];
  const add = (name, value) => { if (value) facts.push(make("dt", { text: name }), make("dd", null, value)); };
  add("Lost", incident.casualties.length ? incident.casualties.map((one) => make("div", null, one.line,
    one.at === null ? "" : make("span", { class: "soft", text: ` at ${clockTime(one.at, true)} UTC` }),
    one.reason && one.end ? make("span", { class: "soft", text: ` (${one.reason})` }) : null)) : null);
  if (incident.lost_processes > incident.casualties.length) {
    add("", `and ${incident.lost_processes - incident.casualties.length} processes more`);
  }
  add("Injected", incident.injected.length ? incident.injected.map((one) =>
    make("div", { text: `${one.kind} on rank ${one.rank} in step ${one.step}${one.where ? `, ${one.where}` : ""}` })) : null);
  add("Why this plan", plan && `${plan.verdict}: ${plan.reason}`);
  add("Outage", `${duration(incident.duration_s)}, ${duration(incident.cost_rank_s)} of all ranks together`
    + (plan && plan.lost_steps ? `; ${plural(plan.lost_steps, "step")} of work lost` : "; no committed step lost"));
  add("Interrupted in", incident.phases.join(", "));
  add("Resumed at", recovery ? `step ${recovery.target}` : plan && `step ${plan.target}`);
  add("Window", plan && plan.window !== null && plan.window !== undefined ? `replayed from the window that begins at step ${plan.window}` : null);
  add("Guarantee", recovery && recovery.guarantee);
  add("Proof", recovery && make("span", null, proofChip(incident), ` ${recovery.proof || "no stage replayed"}`));
  add("Differed", incident.differed.length ? incident.differed.map((one) =>
    make("div", { text: `${one.ranks.join(", ")}: ${one.proof} (${one.consequence})` })) : null);
  add("Protection before", protectionWords(incident.protection.before));
  add("Protection after", incident.is_over && protectionWords(incident.protection.after));
  add("Copies", recovery && (recovery.owed_copies || recovery.moved_copies)
    ? `${recovery.owed_copies} on their way when training resumed, ${recovery.moved_copies} moved` : null);
  const names = run.parts.filter(({ name }) => incident.parts_s[name]);
  const parts = [make("h3", { text: `Where the time went${incident.of_process === null ? "" : ` (process ${incident.of_process}, the one waited for)`}` }),
    bar(incident.parts_s, incident.duration_s, partsInWords(incident.parts_s)),
    table([{ title: "part" }, { title: "seconds", number: true }, { title: "share", number: true }],
      [...names.map(({ name }) => [make("span", null, key(name), name), incident.parts_s[name].toFixed(3),
        percent(incident.parts_s[name] / incident.duration_s)]),
      ["sum", names.reduce((sum, { name }) => sum + incident.parts_s[name], 0).toFixed(3),
        `of ${incident.duration_s.toFixed(3)}`]], "Parts of the outage")];
  return [make("h2", { text: `Outage ${incident.number}: ${lossOf(incident)}` }),
    make("p", { class: "soft", text: `${clockTime(incident.start, true)} UTC, launch ${incident.launch}, before generation ${incident.generation}` }),
    make("div", { class: "pair" }, make("div", null, make("dl", { class: "facts" }, facts)),
      make("div", null, parts, pipeline(incident))), holdersMatrix(incident)].flat();
}

const detailPlace = make("section", { id: "outage", "aria-live": "polite" });
function choose(incident, moves) {
  for (const one of run.incidents) one.row.classList.toggle("chosen", one === incident);
  timeline.chosen = incident.number;
  clear(detailPlace).append(...detail(incident).filter(Boolean));
  if (moves) showIncident(incident);
  else drawTimeline();
}
