// The table of rollouts: a row for the latest of each model.

import { $, make } from "./dom.js";

const STATES = {
  waiting: ["Waiting", "loading"],
  step: ["Step", "loading"],
  baking: ["Baking", "loading"],
  paused: ["Paused", "unloading"],
  promoted: ["Promoted", "ready"],
  rolled_back: ["Rolled back", "unavailable"],
  aborted: ["Aborted", "unavailable"],
  superseded: ["Superseded", "unavailable"],
};
const MINUTE = 60;

export class Rollouts {
  update(rollouts) {
    $("rollouts").hidden = !rollouts.length;
    const text = JSON.stringify(rollouts);
    if (text === this.shown) return; // A selection in the table stays.
    this.shown = text;
    $("rollout-rows").tBodies[0].replaceChildren(...rollouts.map(row));
  }
}

function row({ model, stable, candidate, state, reason, weight, shadow, step, steps, ...progress }) {
  const [words, look] = STATES[state] ?? [state, ""];
  const versions = state === "promoted" ? candidate : `${stable} → ${candidate}`;
  const share = shadow ? `shadow ${shadow} %` : `${weight} %`;
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, model, " ", make("span", { class: "tag" }, versions)),
    make(
      "td",
      { "data-label": "State" },
      make("span", { class: `badge ${look}` }, words),
      reason ? make("p", { class: "reason" }, reason) : null,
    ),
    cell("Weight", share),
    cell("Step", `${step} of ${steps.length}`),
    cell("Time", `${minutes(progress.spent_secs)} of ${minutes(progress.for_secs)}`),
    cell("Requests", `${progress.requests} of ${progress.min_requests}`),
    cell("Evidence, log10", evidence(progress.guardrails)),
  );
}

function cell(label, words) {
  return make("td", { class: "number", "data-label": label }, words);
}

// That of the guardrail that is nearest to its limit.
function evidence(guardrails) {
  const [worst] = guardrails.toSorted((one, other) => left(one) - left(other));
  return worst ? `${worst.guardrail} ${worst.evidence.toFixed(1)} of ${worst.limit.toFixed(1)}` : "";
}

function left({ evidence, limit }) {
  return limit - evidence;
}

function minutes(secs) {
  const whole = Math.round(secs);
  return `${Math.floor(whole / MINUTE)}:${String(whole % MINUTE).padStart(2, "0")}`;
}
