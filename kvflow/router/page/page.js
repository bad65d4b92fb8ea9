// Follows the router: one stream of snapshots while this tab is visible, and another try when it breaks.

import {Plots} from "./plots.js";
import {Story} from "./story.js";
import * as views from "./views.js";
import {count} from "./format.js";

const KEY = "kvflow-operator-key";
const FIRST_PAUSE_MS = 500, LONGEST_PAUSE_MS = 5000;
const SILENCE_MS = 8000;
const at = id => document.getElementById(id);

const plots = new Plots(at("plots"), at("legend"));
const story = new Story(path => fetch(path, {headers: headers()}));
let controller = null;
let shown = null;

// A browser may forbid storage: the key is then kept by the page alone.
let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* kept in memory */ }

function headers() { return key ? {Authorization: `Bearer ${key}`} : {}; }

function keep(value) {
  key = value;
  try { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } catch { /* kept in memory */ }
}

function link(cls, line) {
  at("link").className = `link ${cls}`;
  if (at("link-text").textContent !== line) at("link-text").textContent = line;
  at("main").classList.toggle("old", cls === "lost");
  if (cls === "lost") at("serving").textContent = "";
}

async function refused(answer) {
  let why = "";
  try { why = (await answer.json()).error.message; } catch { /* no JSON: a proxy answered */ }
  const line = at("key-why");
  if (answer.status === 403) {
    line.textContent = `No key opens this page: ${why || "the router has no operator's key"}.`;
    at("key").querySelector(".key-row").hidden = at("key").querySelector("label").hidden = at("key-kept").hidden = true;
  } else {
    line.textContent = key ? "The router refused this key." : "Figures and rooms are for operators.";
  }
  line.classList.toggle("refused", Boolean(key) || answer.status === 403);
  at("main").hidden = true;
  at("key").hidden = false;
  at("key-input").focus();
  link("", answer.status === 403 ? "Closed" : "Key needed");
}

function show(snapshot) {
  shown = snapshot;
  at("key").hidden = true;
  at("main").hidden = false;
  const {router} = snapshot;
  at("model").textContent = router.model.split("/").pop() || "no model yet";
  at("model").title = router.model;
  at("serving").textContent = router.draining ? "Shutting down" : router.trouble ? "Not serving" : "Serving";
  at("serving").classList.toggle("bad", Boolean(router.draining || router.trouble));
  document.title = `${router.trouble ? "! " : ""}kvflow ${router.model}`.trim();
  link("live", "Live");
  plots.add(snapshot.now, snapshot.window_s);
  views.problems(snapshot);
  views.workers(snapshot);
  views.rooms(snapshot, room => story.open(room));
  views.peers(snapshot);
  views.tiers(snapshot);
  views.ranks(snapshot);
  const errors = Object.entries(router.errors);
  const told = errors.length ? errors.map(([code, n]) => `${count(n)} ${code}`).join(", ") : "none";
  at("foot").textContent = `Errors to clients since the router started: ${told}. Workers run kvflow ${views.versions(snapshot).join(" and ") || "of a version not known yet"}.`;
}

const takes = {
  history: data => plots.begin(data.points),
  snapshot: show,
};

async function read(answer, alive) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    alive();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) ?? [];
      if (name in takes) takes[name](JSON.parse(data));
    }
  }
}

// One stream, to its end. Returns true if the next try may come at once.
async function follow(mine) {
  let watchdog;
  const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => mine.abort(), SILENCE_MS); };
  alive();
  try {
    const answer = await fetch("/overview/events", {headers: headers(), signal: mine.signal, cache: "no-store"});
    if (answer.status === 401 || answer.status === 403) { await refused(answer); return "refused"; }
    if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
    await read(answer, alive);
    return "ended";
  } finally {
    clearTimeout(watchdog);
  }
}

async function run() {
  controller?.abort();
  const mine = controller = new AbortController();
  let pause = FIRST_PAUSE_MS;
  while (controller === mine) {
    const before = shown;
    const stream = new AbortController();
    mine.signal.addEventListener("abort", () => stream.abort());
    let why = "";
    try {
      if (await follow(stream) === "refused") return;
    } catch (error) {
      why = error.message.startsWith("the router answered") ? `: ${error.message}` : "";
    }
    if (controller !== mine || document.hidden) return;
    if (shown !== before) pause = FIRST_PAUSE_MS;
    const last = shown ? `, figures of ${new Date(shown.now.at_unix_s * 1000).toLocaleTimeString()}` : "";
    link("lost", `Reconnecting${why}${last}`);
    await new Promise(resolve => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

at("key").addEventListener("submit", event => {
  event.preventDefault();
  keep(at("key-input").value.trim());
  at("key-input").value = "";
  run();
});

// Workers are asked for nothing while nobody looks.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { controller?.abort(); controller = null; link("", "Paused"); } else run();
});

run();
