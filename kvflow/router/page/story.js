// The story of one room, from both sides, merged by the clocks of the two workers.

import {element, host, put, text, units, words} from "./format.js";
import {phaseClass} from "./views.js";

const at = id => document.getElementById(id);
const AGAIN_MS = 1000;
const TITLES = {prefill: "Prefill", decode: "Decode"};

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
    this.at = {prefill: room.prefill?.worker, decode: room.decode?.worker};
    put(at("story-title"), `Room ${room.room}`);
    put(at("story-request"), "Request ", element("code", {}, room.request_id || "unknown"));
    put(at("story-body"), element("p", {class: "empty"}, "Asking both workers. One that does not answer is given up after 5 s."));
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
      element("thead", {}, element("tr", {}, element("th", {class: "n", scope: "col"}, "Time"), ...names.map(n => element("th", {scope: "col"}, TITLES[n])))),
      element("tbody", {}, ...events.map(event => element("tr", {},
        element("td", {class: "n at"}, text(units.seconds, Math.max(0, event.s))),
        ...names.map(name => element("td", {class: "side"}, ...(name === event.name ? this.event(event) : [])))))));
    put(at("story-body"), halves, events.length ? table : element("p", {class: "empty"}, "Nothing has happened in this room yet."));
  }

  event({what, phase, text: more}) {
    return [element("span", {class: "what"}, words(what)), element("span", {class: "quiet"}, ` → ${words(phase)}`),
      more ? element("span", {class: "sub"}, more) : null];
  }

  half(name, side) {
    const title = element("h3", {}, TITLES[name], this.at[name] ? ` ${host(this.at[name])}` : "");
    if (!side) return element("div", {class: "half"}, title, element("p", {class: "quiet"}, "does not know this room, or does not answer"));
    const landed = side.bytes_total ? `${text(units.bytes, side.bytes_landed)} of ${text(units.bytes, side.bytes_total)} landed` : null;
    return element("div", {class: "half"}, title, element("span", {class: `state ${phaseClass(side)}`}, words(side.phase)),
      landed ? element("span", {class: "sub"}, landed) : null,
      side.cause ? element("p", {}, side.cause) : null);
  }
}
