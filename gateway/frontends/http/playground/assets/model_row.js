// One version of a model in the table of the server's state; the row stays, its contents change.

import { make } from "./dom.js";
import { Plot } from "./plot.js";
import { Samples, mean, rate } from "./samples.js";
import { milliseconds, rounded } from "./speed.js";

const NS = 1e6;
const REQUESTS = rate("succeeded", "failed");
const LATENCY = inMs(mean("request_ns", "succeeded"), NS);
const QUEUED = inMs(mean("queue_ns", "succeeded"), NS);
const FIRST = inMs(mean("first_token_secs", "first_tokens"), 1e-3);
const TOKENS = rate("completion_tokens");
const STATES = {
  READY: "Ready",
  LOADING: "Loading",
  UNLOADING: "Unloading",
  UNAVAILABLE: "Not ready",
  "": "Not loaded",
};

export class ModelRow {
  // `operate(operation, name)` loads or unloads, and returns when that has ended.
  constructor(model, operate) {
    this.samples = new Samples();
    this.requests = figure();
    this.latency = figure();
    this.tokens = figure();
    this.badge = make("span", { class: "badge" });
    this.reason = make("p", { class: "reason" });
    this.inFlight = make("td", { class: "number", "data-label": "In flight" });
    this.queue = make("td", { class: "number", "data-label": "Queue" });
    this.button = make("button", { type: "button", class: "quiet", click: () => this.#click(operate, model.name) });
    this.operation = make("td", { class: "operation-cell", "data-label": "" }, this.button);
    this.element = this.#element(model);
  }

  // `explicit`: models are loaded and unloaded by request; `first`: of the versions of its model.
  update(model, time, { explicit, first }) {
    const loaded = model.kind !== undefined;
    if (loaded) this.samples.add(time, model);
    this.#state(model);
    this.inFlight.textContent = loaded ? model.in_flight : "–";
    this.queue.textContent = loaded ? model.queued + (model.engine.waiting ?? 0) : "–";
    this.#figures(loaded, model);
    this.operation.hidden = !explicit;
    this.button.hidden = !first;
    this.ready = model.state === "READY";
    if (!this.busy) this.button.textContent = this.ready ? "Unload" : "Load";
    this.button.setAttribute("aria-label", `${this.button.textContent} ${model.name}`);
  }

  #element(model) {
    const name = make("th", { scope: "row" }, make("span", { class: "name" }, model.name));
    if (model.version) name.append(make("span", { class: "tag" }, `version ${model.version}`));
    return make(
      "tr",
      {},
      name,
      make("td", { "data-label": "State" }, this.badge, this.reason),
      this.inFlight,
      this.queue,
      make("td", { "data-label": "Requests per second" }, this.requests.element),
      make("td", { "data-label": "Latency, mean" }, this.latency.element),
      make("td", { "data-label": "Tokens per second" }, this.tokens.element),
      this.operation,
    );
  }

  #state({ state, reason }) {
    const unloaded = state === "UNAVAILABLE" && reason === "unloaded";
    this.badge.textContent = unloaded ? "Unloaded" : (STATES[state] ?? state);
    this.badge.className = `badge ${unloaded ? "" : state.toLowerCase()}`;
    this.reason.textContent = unloaded ? "" : reason;
    this.reason.hidden = !this.reason.textContent;
  }

  #figures(loaded, model) {
    const { samples } = this;
    const requests = samples.recent(REQUESTS);
    draw(this.requests, samples.series(REQUESTS), requests, (value) => rounded(value));
    const latency = samples.recent(LATENCY);
    const queued = samples.recent(QUEUED);
    const note = latency !== null && queued !== null ? `${milliseconds(queued)} in the queue` : "";
    draw(this.latency, samples.series(LATENCY), latency, milliseconds, note);
    const talks = loaded && model.completion_tokens > 0;
    const first = samples.recent(FIRST);
    const begun = first === null ? "" : `first after ${milliseconds(first)}`;
    draw(this.tokens, talks ? samples.series(TOKENS) : [], talks ? samples.recent(TOKENS) : null, rounded, begun);
    this.tokens.plot.element.toggleAttribute("hidden", !talks);
  }

  async #click(operate, name) {
    const operation = this.ready ? "unload" : "load";
    if (this.busy) return;
    this.busy = true;
    this.button.setAttribute("aria-disabled", "true");
    this.button.textContent = operation === "load" ? "Loading" : "Unloading";
    await operate(operation, name);
    this.busy = false;
    this.button.removeAttribute("aria-disabled");
  }
}

function figure() {
  const plot = new Plot();
  const amount = make("span", { class: "amount" });
  const note = make("span", { class: "note" });
  const words = make("span", { class: "words" }, amount, note);
  return { plot, amount, note, element: make("div", { class: "figure" }, words, plot.element) };
}

function draw({ plot, amount, note }, points, value, words, more = "") {
  const known = value !== null && Number.isFinite(value);
  amount.textContent = known ? words(value) : "–";
  note.textContent = known ? more : "";
  plot.draw(points, known ? `now ${words(value)}` : "nothing lately");
}

function inMs(measure, divisor) {
  return (before, after) => {
    const value = measure(before, after);
    return value === null ? null : value / divisor;
  };
}
