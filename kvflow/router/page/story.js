// The story of one room, from both sides, merged by the clocks of the two workers.

import {element, put, text, units, words} from "./format.js";

const at = id => document.getElementById(id);
const AGAIN_MS = 1000;

export class Story {
  constructor(ask) {
    this.ask = ask;
    this.dialog = at("story");
    at("story-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
  }

  open(room) {
    clearTimeout(this.timer);
    this.room = room.room;
    put(at("story-title"), `Room ${room.room}`);
    put(at("story-request"), "Request ", element("code", {}, room.request_id || "unknown"));
    put(at("story-body"), element("p", {class: "empty"}, "Asking both workers…"));
    this.dialog.showModal();
    this.look(room.room);
  }

  async look(room) {
    let sides;
    try {
      const answer = await this.ask(`/rooms/${room}`);
      if (this.room !== room || !this.dialog.open) return;
      if (answer.status === 404) return this.tell("No worker remembers this room any more. Each remembers its latest 256.");
      if (!answer.ok) return this.tell(`The router answered ${answer.status}. Close this, and enter the key again if it asks for it.`);
      sides = await answer.json();
    } catch {
      if (this.room === room && this.dialog.open) this.tell("The router does not answer.");
      return;
    }
    this.show(sides);
    const ended = Object.values(sides).every(side => side.ended);
    if (!ended || Object.keys(sides).length < 2) this.timer = setTimeout(() => this.look(room), AGAIN_MS);
  }

  tell(line) {
    if (at("story-body").querySelector(".tale")) return;
    put(at("story-body"), element("p", {class: "empty"}, line));
  }

  show(sides) {
    const names = ["prefill", "decode"];
    const began = Math.min(...names.filter(n => sides[n]).map(n => sides[n].opened_unix_s));
    const halves = element("div", {class: "halves"}, ...names.map(name => this.half(name, sides[name])));
    const events = names.flatMap(name => (sides[name]?.events ?? []).map(event => ({...event, name, s: sides[name].opened_unix_s - began + event.at_s})));
    events.sort((a, b) => a.s - b.s);
    const table = element("table", {class: "tale"},
      element("thead", {}, element("tr", {}, element("th", {class: "n", scope: "col"}, "Time"), ...names.map(n => element("th", {scope: "col"}, n)))),
      element("tbody", {}, ...events.map(event => element("tr", {},
        element("td", {class: "n at"}, text(units.seconds, Math.max(0, event.s))),
        ...names.map(name => element("td", {class: "side"}, ...(name === event.name ? this.event(event) : [])))))));
    put(at("story-body"), halves, events.length ? table : element("p", {class: "empty"}, "Nothing has happened in this room yet."));
  }

  event({what, phase, text: more}) {
    return [element("span", {class: "what"}, words(what)), element("span", {class: "quiet"}, ` ${words(phase)}`),
      more ? element("span", {class: "sub"}, more) : null];
  }

  half(name, side) {
    if (!side) return element("div", {class: "half"}, element("h3", {}, name), element("p", {class: "quiet"}, "does not know this room, or does not answer"));
    const cls = side.phase === "success" ? "good" : side.ended ? "bad" : "moving";
    const landed = side.bytes_total ? `${text(units.bytes, side.bytes_landed)} of ${text(units.bytes, side.bytes_total)} landed` : null;
    return element("div", {class: "half"}, element("h3", {}, name), element("span", {class: `state ${cls}`}, words(side.phase)),
      landed ? element("span", {class: "sub"}, landed) : null,
      side.cause ? element("p", {}, side.cause) : null);
  }
}
