// The tables, and the list of problems: each takes a snapshot and shows it.

import {ago, bar, cell, count, element, host, NONE, put, rows, share, text, units, words} from "./format.js";

const at = id => document.getElementById(id);
const body = id => at(id).tBodies[0];
const sub = (...parts) => element("span", {class: "sub"}, ...parts);
const state = (cls, name) => element("span", {class: `state ${cls}`}, name);

// Figures older than this are shown as such.
const OLD_S = 4;
const isOld = worker => worker.answered_ago_s === null || worker.answered_ago_s > OLD_S;
const several = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;

function stateOf(worker) {
  if (!worker.up) return ["bad", worker.not_seen || isOld(worker) ? "down" : "refusing"];
  if (worker.leaving) return ["warn", "leaving"];
  if (worker.draining) return ["warn", "draining"];
  if (worker.trouble) return ["warn", "unpaired"];
  return ["good", "up"];
}

// Shares of a pool, and the words for them.
function pool(pages) {
  const total = pages.total ?? 0;
  if (!total) return null;
  const free = pages.free ?? 0, cached = pages.cache ?? 0, quarantine = pages.quarantine ?? 0;
  const held = Math.max(0, total - free - cached - quarantine);
  const parts = [["held", held / total], ["cached", cached / total], ["quarantine", quarantine / total]];
  const told = [`${count(held)} in use`, `${count(cached)} cached`, ...(quarantine ? [`${count(quarantine)} quarantine`] : []), `${count(free)} free`];
  return {parts, told: `${told.join(" · ")} of ${count(total)} pages`, total};
}

function poolCell(row, i, pages, more) {
  const td = row.children[i] ?? row.appendChild(element("td", {"data-label": "Pool"}));
  const found = pool(pages);
  if (!found) { put(td, NONE); return; }
  if (!td.querySelector(".sub")) td.replaceChildren(sub());
  bar(td, found.parts, found.told);
  put(td.querySelector(".sub"), found.told, element("span", {class: "capacity"}, more));
}

export function problems(snapshot) {
  const found = [];
  const add = (cls, name, why) => found.push(element("li", {class: cls}, element("b", {}, name), why ? ` ${why}` : ""));
  const {router, workers} = snapshot;
  if (router.draining) add("warn", "The router is shutting down.", "It finishes what runs, and takes no new requests.");
  else if (router.trouble) add("bad", "Requests cannot be served:", router.trouble);
  for (const one of workers) {
    const name = `${one.role} ${host(one.url)}`;
    if (one.trouble) add(one.up ? "warn" : "bad", name, `gets no requests: ${one.trouble}`);
    else if (one.not_seen) add("warn", name, `does not tell its figures: ${one.not_seen}`);
    if (one.quarantine_overdue_pages && !one.trouble.includes("quarantine")) {
      const over = one.quarantine_overdue_pages > one.quarantine_limit_pages;
      add(over ? "bad" : "warn", name, `holds ${several(one.quarantine_overdue_pages, "page")} in quarantine whose writer is in doubt, of ${count(one.quarantine_limit_pages)} at which it refuses requests.`);
    }
    const gone = one.ranks.filter(rank => !rank.up).map(rank => rank.rank);
    if (gone.length) add("bad", name, `has lost rank ${gone.join(", ")}.`);
  }
  if (snapshot.workers_left_out) add("warn", `${several(snapshot.workers_left_out, "worker")} more`, "are not shown here; GET /workers lists all of them.");
  put(at("problems"), ...found);
}

export const versions = snapshot => [...new Set(snapshot.workers.map(one => one.version).filter(Boolean))].sort();
const made = ({pool, data_plane, version}, all) =>
  `${data_plane} plane, ${pool.dtype} on ${pool.device}${all.length > 1 ? `, version ${version}` : ""}`;

export function workers(snapshot) {
  const up = snapshot.workers.filter(one => one.up).length;
  put(at("workers-count"), `${count(up)} of ${count(snapshot.workers.length)} up`);
  rows(body("workers"), snapshot.workers, one => one.id, (one, row) => {
    const old = isOld(one) && one.answered_ago_s !== null;
    row.className = old || !one.up ? "stale" : "";
    cell(row, 0, {}, element("span", {class: "name"}, element("strong", {class: "role"}, one.role), element("span", {class: "mono"}, host(one.url))),
      one.pool ? element("span", {class: "sub plane"}, made(one, versions(snapshot))) : null);
    cell(row, 1, {}, state(...stateOf(one)), old ? sub(`figures ${ago(one.answered_ago_s)} old`) : null);
    const own = one.running === null ? one.requests : one.running;
    cell(row, 2, {cls: "n", label: "Running"}, count(own));
    cell(row, 3, {cls: "n", label: "Waiting"}, count(one.waiting));
    const moved = one.role === "prefill";
    cell(row, 4, {cls: "n", label: moved ? "KV sent" : "Generated"},
      moved ? text(units.bytesPerSecond, one.bytes_per_s) : text(units.perSecond("tokens/s"), one.tokens_per_s));
    const capacity = one.pool ? ` · ${count(one.pool.tokens)} tokens, ${text(units.bytes, one.pool.bytes)}` : "";
    poolCell(row, 5, one.pages, capacity);
    cell(row, 6, {cls: "n", label: "Quarantine"}, one.quarantine_pages
      ? element("span", {class: one.quarantine_overdue_pages ? "bad" : "warn"}, several(one.quarantine_pages, "page"),
        sub(one.quarantine_overdue_pages ? `${count(one.quarantine_overdue_pages)} overdue` : "awaiting proof"))
      : one.pool ? "0" : NONE);
    cell(row, 7, {cls: "n", label: "Cache hits"}, one.cache ? share(one.hit_share) : one.pool ? "off" : NONE);
  });
}

// A client that leaves, or an operator who aborts, is no failure.
const isWanted = cause => /^(client_gone|aborted)\b/.test(cause ?? "");
export const phaseClass = half =>
  half.phase === "success" ? "good" : !half.ended ? "moving" : isWanted(half.cause) ? "idle" : "bad";
const phase = half => {
  if (!half) return element("span", {class: "quiet"}, NONE);
  const cls = half.stale ? "idle" : phaseClass(half);
  return element("span", {class: `state ${cls}`}, half.stale ? `${words(half.phase)}, not seen` : words(half.phase));
};

export function rooms(snapshot, openStory) {
  const open = snapshot.rooms.filter(room => [room.prefill, room.decode].some(half => half && !half.ended && !half.stale)).length;
  const left = snapshot.rooms_left_out ? `, ${count(snapshot.rooms_left_out)} more not shown` : "";
  put(at("rooms-count"), snapshot.rooms.length ? `${count(open)} open, ${count(snapshot.rooms.length - open)} ended${left}` : "");
  at("rooms-empty").hidden = snapshot.rooms.length > 0;
  at("rooms").hidden = snapshot.rooms.length === 0;
  rows(body("rooms"), snapshot.rooms, room => `${room.room} ${room.request_id}`, (room, row) => {
    if (!row.children.length) {
      const button = element("button", {class: "room", type: "button", title: `room ${room.room}, request ${room.request_id}`}, `…${room.room.slice(-6)}`);
      button.setAttribute("aria-label", `Story of room ${room.room}`);
      button.addEventListener("click", () => openStory(room));
      row.append(element("td", {}, button));
    }
    cell(row, 1, {cls: "n age"}, ago(room.opened_ago_s));
    cell(row, 2, {}, phase(room.prefill));
    const landed = row.children[3] ?? row.appendChild(element("td"));
    const {bytes_landed: done, bytes_total: total} = room.prefill ?? {};
    if (total && (done === total || room.prefill.ended)) {
      landed.replaceChildren(text(units.bytes, done), done === total ? "" : ` of ${text(units.bytes, total)}`);
    } else if (total) {
      const told = `${text(units.bytes, done)} of ${text(units.bytes, total)}`;
      if (!landed.querySelector(".sub")) landed.replaceChildren(sub());
      bar(landed, [["held", done / total]], told, true);
      put(landed.querySelector(".sub"), told);
    } else put(landed, NONE);
    cell(row, 4, {}, phase(room.decode));
    const cause = room.decode?.cause ?? room.prefill?.cause;
    cell(row, 5, {cls: "wide"}, cause ?? "");
  });
}

export function peers(snapshot) {
  const named = new Map(snapshot.workers.filter(one => one.incarnation).map(one => [one.incarnation, one]));
  const found = snapshot.workers.flatMap(one => one.peers.map(peer => ({one, peer})));
  // Peers in doubt come first, and those that hold pages before others.
  const rank = ({peer}) => (peer.phase === "up" ? 1e9 : 0) - peer.quarantine_pages - peer.pinned_pages;
  found.sort((a, b) => rank(a) - rank(b));
  const held = snapshot.workers.reduce((sum, one) => sum + one.quarantine_pages, 0);
  put(at("peers-count"), found.length ? `${held ? several(held, "page") : "nothing"} in quarantine` : "");
  at("peers-empty").hidden = found.length > 0;
  at("peers").hidden = found.length === 0;
  rows(body("peers"), found, ({one, peer}) => `${one.id} ${peer.incarnation} ${peer.rank}`, ({one, peer}, row) => {
    row.className = isOld(one) ? "stale" : "";
    const known = named.get(peer.incarnation);
    cell(row, 0, {}, element("span", {}, one.role), sub(host(one.url)));
    cell(row, 1, {}, known ? `${known.role} ${host(known.url)}` : "earlier process",
      sub(element("span", {class: "mono long", title: peer.incarnation}, peer.incarnation), peer.rank ? `, rank ${peer.rank}` : ""));
    const doubtful = peer.phase !== "up";
    cell(row, 2, {label: "Link"}, state(doubtful ? peer.quarantine_pages ? "bad" : "warn" : "good", words(peer.phase)));
    cell(row, 3, {cls: "n", label: "Heard"}, peer.heard_ago_s === null ? NONE : `${ago(peer.heard_ago_s)} ago`);
    cell(row, 4, {cls: "n loans"}, peer.loans !== null ? several(peer.loans, "loan") : peer.rooms !== null ? several(peer.rooms, "room") : NONE);
    const kept = peer.quarantine_pages ? element("span", {class: "bad"}, `${count(peer.quarantine_pages)} quarantine`)
      : peer.pinned_pages ? `${count(peer.pinned_pages)} pinned` : "0";
    cell(row, 5, {cls: "n", label: "Held pages"}, kept);
  });
}

export function tiers(snapshot) {
  const found = snapshot.workers.filter(one => one.cache);
  at("tiers-empty").hidden = found.length > 0;
  at("tiers").hidden = found.length === 0;
  rows(body("tiers"), found, one => one.id, (one, row) => {
    row.className = isOld(one) ? "stale" : "";
    const {cache, pages} = one;
    cell(row, 0, {}, one.role, sub(host(one.url)), sub(`${share(one.hit_share)} hits`));
    const tier = (i, label, used, total, told) => {
      const td = row.children[i] ?? row.appendChild(element("td", {"data-label": label}));
      if (!total) { put(td, element("span", {class: "quiet"}, "off")); return; }
      if (!td.querySelector(".sub")) td.replaceChildren(sub(), sub());
      bar(td, [["cached", used / total]], `${count(used)} of ${count(total)} pages`);
      const [first, second] = td.querySelectorAll(".sub");
      put(first, `${count(used)} of ${count(total)} pages`);
      put(second, told);
    };
    tier(1, "Device", cache.pages, pages.total, `${count(cache.evictable_pages)} evictable, ${count(cache.evicted_pages)} evicted`);
    tier(2, "Host", cache.host_pages, cache.host_limit_pages, `${count(cache.saved_pages)} saved, ${count(cache.loaded_pages)} loaded`);
    const {storage} = cache;
    cell(row, 3, {cls: "n", label: "Storage"}, storage ? state(storage.readable && storage.writable ? "good" : "bad", storage.readable && storage.writable ? "in use" : "left alone") : element("span", {class: "quiet"}, "off"),
      storage ? sub(`${count(cache.stored_pages)} stored, ${count(cache.fetched_pages)} fetched`) : null,
      cache.failed_copies ? sub(element("span", {class: "bad"}, `${several(cache.failed_copies, "failed copy").replace("copys", "copies")}`)) : null);
  });
}

export function ranks(snapshot) {
  const found = snapshot.workers.flatMap(one => one.ranks.map(rank => ({one, rank})));
  at("ranks-section").hidden = found.length === 0;
  rows(body("ranks"), found, ({one, rank}) => `${one.id} ${rank.rank}`, ({one, rank}, row) => {
    row.className = isOld(one) ? "stale" : "";
    cell(row, 0, {}, `${one.role} ${host(one.url)}`);
    cell(row, 1, {cls: "n"}, count(rank.rank));
    cell(row, 2, {}, state(rank.up ? "good" : "bad", rank.up ? "up" : "down"));
    const used = rank.pages_total - rank.pages_free;
    const td = row.children[3] ?? row.appendChild(element("td"));
    if (rank.up && rank.pages_total) {
      if (!td.querySelector(".sub")) td.replaceChildren(sub());
      bar(td, [["held", used / rank.pages_total]], `${count(used)} of ${count(rank.pages_total)} pages taken`, true);
      put(td.querySelector(".sub"), `${count(used)} of ${count(rank.pages_total)} pages taken`);
    } else put(td, NONE);
    cell(row, 4, {cls: "n"}, rank.up ? count(rank.requests) : NONE);
    cell(row, 5, {cls: "n"}, rank.up ? count(Object.values(rank.rooms).reduce((a, b) => a + b, 0)) : NONE);
    cell(row, 6, {cls: "n"}, rank.up ? text(units.bytes, rank.bytes_moved) : NONE);
  });
}
