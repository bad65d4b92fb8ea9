// Small plots over time, drawn as SVG. A cursor, by pointer or arrow keys, reads all of them at one moment.

import {element, NONE, text, units} from "./format.js";

const SPANS_S = [60, 120, 300];
const GAP_S = 4;
const TOP = 14, FOOT = 2;
const svg = "http://www.w3.org/2000/svg";

const PLOTS = [
  {title: "Generated", first: "tokens_per_s", unit: units.perSecond("tokens/s")},
  {title: "Requests ended", first: "requests_per_s", second: "failed_per_s", name: "failed", unit: units.perSecond("/s")},
  {title: "In flight", first: "running", second: "waiting", name: "waiting", unit: v => [units.count(v)[0], ""]},
  {title: "KV moved", first: "bytes_per_s", unit: units.bytesPerSecond},
  {title: "Time to first token", first: "first_token_p50_s", second: "first_token_p95_s", name: "p95", unit: units.seconds, main: "p50"},
  {title: "Between tokens", first: "inter_token_p50_s", second: "inter_token_p95_s", name: "p95", unit: units.seconds, main: "p50"},
  {title: "Transfer of a room", first: "transfer_p50_s", second: "transfer_p95_s", name: "p95", unit: units.seconds, main: "p50"},
  {title: "In quarantine", first: "quarantine_pages", unit: units.pages},
];

function drawn(name, cls) {
  const made = document.createElementNS(svg, name);
  made.setAttribute("class", cls);
  return made;
}

// The next round number above the largest value: axes that change at every look cannot be read.
function roof(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].find(step => step * power >= value * 1.0001 || step === 10) * power;
}

class Plot {
  constructor(spec, move) {
    this.spec = spec;
    this.value = element("span", {class: "value"});
    this.second = element("span", {class: "second"});
    this.svg = drawn("svg", "");
    this.svg.setAttribute("aria-hidden", "true");
    this.parts = {};
    for (const [name, tag] of [["grid", "path"], ["area", "path"], ["second-line", "path"], ["first-line", "path"], ["cursor", "path"], ["at-first", "circle"], ["at-second", "circle"], ["roof", "text"]]) {
      this.svg.append(this.parts[name] = drawn(tag, name));
    }
    this.root = element("div", {class: "plot", tabindex: 0, role: "img"},
      element("h3", {}, spec.title), element("div", {class: "values"}, this.value, this.second), this.svg);
    this.root.addEventListener("pointermove", event => {
      const box = this.svg.getBoundingClientRect();
      move({share: Math.max(0, Math.min(1, (event.clientX - box.left) / box.width))});
    });
    this.root.addEventListener("pointerleave", () => move(null));
    this.root.addEventListener("blur", () => move(null));
    this.root.addEventListener("keydown", event => {
      const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
      if (step) { move({step}); event.preventDefault(); }
      if (event.key === "Escape") move(null);
    });
  }

  draw(points, now, at, spanS) {
    const width = this.svg.clientWidth || 200, height = this.svg.clientHeight || 60;
    const {first, second} = this.spec;
    const names = second ? [first, second] : [first];
    const high = roof(Math.max(0, ...points.flatMap(p => names.map(n => p[n] ?? 0))));
    const x = p => width - (now - p.at_unix_s) / spanS * width;
    const y = v => height - FOOT - v / high * (height - FOOT - TOP);
    this.parts.grid.setAttribute("d", `M0 ${TOP + .5}H${width}M0 ${height - FOOT + .5}H${width}`);
    this.parts.roof.setAttribute("x", 0);
    this.parts.roof.setAttribute("y", TOP - 3);
    const known = points.some(p => names.some(n => p[n] !== null && p[n] !== undefined));
    this.parts.roof.textContent = known ? text(this.spec.unit, high) : "";
    const runs = this.runs(points, first);
    this.line("first-line", runs, first, x, y);
    this.parts.area.setAttribute("d", runs.filter(run => run.length > 1).map(run =>
      `M${x(run[0])} ${y(0)}` + run.map(p => `L${x(p)} ${y(p[first])}`).join("") + `L${x(run.at(-1))} ${y(0)}Z`).join(""));
    if (second) this.line("second-line", this.runs(points, second), second, x, y);
    this.read(at ?? points.at(-1), at, x, y, height);
  }

  // Lines break where nobody looked, and where a figure has no value.
  runs(points, name) {
    const runs = [];
    let before = null;
    for (const p of points) {
      const value = p[name];
      if (value === null || value === undefined) { before = null; continue; }
      if (!before || p.at_unix_s - before.at_unix_s > GAP_S) runs.push([]);
      runs.at(-1).push(p);
      before = p;
    }
    return runs;
  }

  line(part, runs, name, x, y) {
    this.parts[part].setAttribute("d", runs.map(run => {
      const d = run.map((p, i) => `${i ? "L" : "M"}${x(p).toFixed(1)} ${y(p[name]).toFixed(1)}`).join("");
      return run.length === 1 ? d + "h1" : d;
    }).join(""));
  }

  read(point, cursor, x, y, height) {
    const {first, second, name, unit, main, title} = this.spec;
    const shown = (value) => value === null || value === undefined ? [NONE, ""] : unit(value);
    const [a, b] = shown(point?.[first]);
    this.value.classList.toggle("none", a === NONE);
    this.value.replaceChildren(a, element("small", {}, `${b ? " " + b : ""}${main ? " " + main : ""}`));
    let label = `${title}: ${a} ${b}${main ? " " + main : ""}`;
    if (second) {
      const [c, d] = shown(point?.[second]);
      this.second.replaceChildren(c, element("small", {}, `${d && d !== b ? " " + d : ""} ${name}`));
      label += `, ${c} ${d} ${name}`;
    }
    this.root.setAttribute("aria-label", label + (cursor ? ", at the cursor" : ""));
    this.parts.cursor.setAttribute("d", cursor ? `M${x(cursor)} ${TOP}V${height - FOOT}` : "");
    for (const [part, key] of [["at-first", first], ["at-second", second]]) {
      const value = cursor && key ? cursor[key] : null;
      const on = value !== null && value !== undefined;
      this.parts[part].setAttribute("r", on ? 2.5 : 0);
      if (on) { this.parts[part].setAttribute("cx", x(cursor)); this.parts[part].setAttribute("cy", y(value)); }
    }
  }
}

export class Plots {
  constructor(root, legend) {
    this.points = [];
    this.cursor = null;
    this.legend = legend;
    this.plots = PLOTS.map(spec => new Plot(spec, to => this.move(to)));
    root.append(...this.plots.map(plot => plot.root));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  begin(points) { this.points = points; this.draw(); }

  add(point, windowS) {
    this.windowS = windowS;
    this.points.push(point);
    this.draw();
  }

  move(to) {
    if (to === null || !this.points.length) {
      this.cursor = null;
    } else if (to.step) {
      const i = this.cursor ? this.points.indexOf(this.cursor) : this.points.length - 1;
      this.cursor = this.points[Math.max(0, Math.min(this.points.length - 1, i + to.step))];
    } else {
      const at = this.points.at(-1).at_unix_s - (1 - to.share) * this.spanS;
      this.cursor = this.points.reduce((best, p) => Math.abs(p.at_unix_s - at) < Math.abs(best.at_unix_s - at) ? p : best);
    }
    this.draw();
  }

  draw() {
    const last = this.points.at(-1);
    if (!last) return;
    const longest = SPANS_S.at(-1), age = last.at_unix_s - this.points[0].at_unix_s;
    this.points = this.points.filter(p => last.at_unix_s - p.at_unix_s <= longest);
    this.spanS = SPANS_S.find(span => span >= age) ?? longest;
    if (this.cursor && !this.points.includes(this.cursor)) this.cursor = null;
    for (const plot of this.plots) plot.draw(this.points, last.at_unix_s, this.cursor, this.spanS);
    const when = this.cursor ? `At ${new Date(this.cursor.at_unix_s * 1000).toLocaleTimeString()}` : `Over the last ${this.windowS ?? 5} s`;
    const told = [when, `Plots: the last ${this.spanS / 60} min, drawn while somebody looks`, "Pointer or arrow keys read a moment"];
    this.legend.replaceChildren(...told.map(line => element("span", {}, line)));
  }
}
