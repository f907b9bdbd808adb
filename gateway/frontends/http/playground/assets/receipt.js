// The receipt of an answer: a bar with a share for each part of its time, and their names.

import { make } from "./dom.js";
import { milliseconds } from "./speed.js";

const KINDS = {
  waiting: ["queue", "batch", "engine_queue", "stall", "replay"],
  model: ["prefill", "infer", "engine", "members", "cache"],
  tokens: ["generate"],
};
const NO_PART = new Set(["total", "preemptions", "remote", "calls"]);
const LEAST_SHARE = 0.01; // A smaller part has no name.

export function receiptBar(timing) {
  const parts = Object.entries(timing).filter(([name, ms]) => ms > 0 && !NO_PART.has(name));
  const named = parts.filter(([, ms]) => ms >= LEAST_SHARE * timing.total);
  const words = named.map(([name, ms]) => `${name.replace("_", " ")} ${milliseconds(ms)}`);
  const bar = make("div", { class: "shares" }, parts.map(share));
  const legend = named.map(([name], index) => make("span", { class: `part ${kind(name)}` }, words[index]));
  const label = `${milliseconds(timing.total)} in the server: ${words.join(", ")}`;
  return make("div", { class: "receipt", role: "img", "aria-label": label }, bar, make("p", {}, legend));
}

function share([name, ms]) {
  const element = make("span", { class: `share ${kind(name)}`, title: `${name}: ${milliseconds(ms)}` });
  element.style.flexGrow = ms;
  return element;
}

function kind(name) {
  return Object.keys(KINDS).find((each) => KINDS[each].includes(name)) ?? "gateway";
}
