// Numbers with their units, and elements. Nothing from a worker ever becomes markup.

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
export const NONE = "–";

function scaled(value, units, step) {
  let i = 0;
  while (value >= step && i < units.length - 1) { value /= step; i++; }
  const digits = value >= 100 || i === 0 && Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return [value.toFixed(digits), units[i]];
}

// Each of these returns [number, unit], so that units can be set smaller than numbers.
export const units = {
  count: v => [whole.format(v), ""],
  pages: v => [whole.format(v), v === 1 ? "page" : "pages"],
  perSecond: unit => v => [v >= 100 || Number.isInteger(v) ? whole.format(v) : v.toFixed(v >= 10 ? 1 : 2), unit],
  bytes: v => scaled(v, ["B", "kB", "MB", "GB", "TB"], 1000),
  bytesPerSecond: v => scaled(v, ["B/s", "kB/s", "MB/s", "GB/s"], 1000),
  seconds: v => v < 1 ? [(v * 1000).toFixed(v < .01 ? 2 : v < .1 ? 1 : 0), "ms"] : v < 100 ? [v.toFixed(v < 10 ? 2 : 1), "s"] : [whole.format(v), "s"],
};

export const text = (unit, value) => value === null || value === undefined ? NONE : unit(value).join(" ").trim();
export const count = value => text(units.count, value);
export const share = value => value === null || value === undefined ? NONE : `${(value * 100).toFixed(value > 0 && value < .1 ? 1 : 0)} %`;
export const words = name => name.replaceAll("_", " ");

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export const host = url => url.replace(/^https?:\/\//, "");

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

// Replace the content only where it differs: a selection or a hovered title then survives.
export function put(node, ...children) {
  const next = element("div", {}, ...children);
  if (node.innerHTML !== next.innerHTML) node.replaceChildren(...next.childNodes);
}

// Keep one row per key, in this order, so that focus and scroll position survive an update.
export function rows(body, items, key, cells) {
  const known = new Map([...body.children].map(row => [row.dataset.key, row]));
  items.forEach((item, i) => {
    const name = key(item);
    let row = known.get(name);
    known.delete(name);
    if (!row) { row = element("tr"); row.dataset.key = name; }
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    cells(item, row);
  });
  for (const row of known.values()) row.remove();
}

export function cell(row, i, {cls = "", label = ""}, ...children) {
  let td = row.children[i];
  if (!td) {
    td = element("td", {class: cls || null, "data-label": label || null});
    row.append(td);
  }
  put(td, ...children);
  return td;
}

// Parts are [class, share, title]. Widths are set by script: the page's policy allows no style attributes.
export function bar(host, parts, label, small = false) {
  let drawn = host.querySelector(":scope > .bar");
  if (!drawn) {
    drawn = element("div", {class: small ? "bar small" : "bar", role: "img"});
    host.prepend(drawn);
  }
  drawn.setAttribute("aria-label", label);
  drawn.title = label;
  while (drawn.children.length < parts.length) drawn.append(element("i"));
  parts.forEach(([cls, part], i) => {
    drawn.children[i].className = cls;
    drawn.children[i].style.width = `${Math.max(0, Math.min(1, part)) * 100}%`;
  });
}
