// A tile with one share of the machine, now and over the last two minutes.

import { make } from "./dom.js";
import { Plot } from "./plot.js";

const KEPT_SECS = 120;

export class Meter {
  constructor(name) {
    this.name = name;
    this.points = [];
    this.plot = new Plot();
    this.words = make("span", { class: "amount" });
    const head = make("p", { class: "tile-head" }, make("span", { class: "tile-name" }, name), this.words);
    this.element = make("div", { class: "tile" }, head, this.plot.element);
  }

  update(share, words, time) {
    this.points = [...this.points, { time, value: share }].filter((each) => each.time >= time - KEPT_SECS);
    this.words.textContent = words;
    this.plot.draw(this.points, `${this.name}: ${words}`, 1);
  }
}
