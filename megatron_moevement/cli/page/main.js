// SPDX-License-Identifier: Apache-2.0
// Puts the page together, and draws what is drawn again when its size or colours change.

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = null;
try { theme = localStorage.getItem("moevement-theme"); } catch (error) { theme = null; }

const button = make("button", { type: "button", "aria-label": "Light or dark" });
function applyTheme() {
  const isDark = theme === null ? dark.matches : theme === "dark";
  document.documentElement.classList.toggle("dark", isDark);
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  button.textContent = isDark ? "\u2600 Light" : "\u263e Dark";
  readColours();
  redraws.forEach((draw) => draw());
}
button.addEventListener("click", () => {
  theme = document.documentElement.classList.contains("dark") ? "light" : "dark";
  try { localStorage.setItem("moevement-theme", theme); } catch (error) { /* not kept */ }
  applyTheme();
});

function heading() {
  const { layout, account } = run;
  const names = ["pp", "dp", "tp", "cp", "ep"].filter((name) => layout && (layout[name] > 1 || name === "pp"));
  const hosts = new Set(run.timeline.flatMap((row) => row.lives.map((life) => life.host)).filter(Boolean));
  const parts = [
    layout && names.map((name) => `${name.toUpperCase()}${layout[name]}`).join(" x "),
    plural(account.processes.length, "process", "processes"),
    hosts.size ? plural(hosts.size, "host") : null,
    plural(account.launches, "launch", "launches"),
    `${clockTime(0, true)} to ${clockTime(account.wall_s, true)} UTC`,
  ];
  return make("header", null, make("div", null,
    make("h1", { text: run.runs.length ? `Run ${run.runs.join(", ")}` : "Run" }),
    make("p", { class: "soft", text: parts.filter(Boolean).join(" \u00b7 ") })), button);
}

function start() {
  readColours();
  const page = document.getElementById("page");
  const sections = [heading(), banner(), tiles(), recoveriesSection(), run.incidents.length ? detailPlace : null,
    timelineSection(), accountSection(), trainingSection(), protectionSection(), machineSection(), expertsSection(),
    notesSection(),
    make("footer", null, "Made by ", make("code", { text: "moevement report" }),
      " from the events of the run; it needs no network. Times are UTC.")];
  page.append(...sections.filter(Boolean), tip);
  applyTheme();
  const chosen = run.incidents.find((one) => !one.is_over)
    || [...run.incidents].sort((a, b) => b.duration_s - a.duration_s)[0];
  if (chosen) choose(chosen, false);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redraws.forEach((draw) => draw());
  });
  dark.addEventListener("change", applyTheme);
}

start();
