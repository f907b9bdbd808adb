// The table of a router's replicas: a row for each model of each of them.

import { $, make } from "./dom.js";
import { milliseconds } from "./speed.js";

const STATES = {
  READY: ["Ready", "ready"],
  STARTING: ["Starting", "loading"],
  DRAINING: ["Draining", "unloading"],
  SILENT: ["Silent", "unavailable"],
  LOST: ["Not connected", "unavailable"],
  NONE: ["No replica", "unavailable"],
};
const MS = 1e3;

export class Fleet {
  // What a router says of its fleet now; other servers have no replicas.
  update(fleet) {
    const replicas = fleet?.replicas ?? [];
    const absent = (fleet?.models ?? []).filter((model) => !model.ready).map(absentValues);
    $("fleet").hidden = !(replicas.length || absent.length);
    const present = replicas.flatMap((replica) =>
      replica.models.length ? replica.models.map((model) => values(replica, model)) : [values(replica)],
    );
    const wanted = [...present, ...absent];
    const text = JSON.stringify(wanted);
    if (text === this.shown) return; // A selection in the table stays.
    this.shown = text;
    $("replicas").tBodies[0].replaceChildren(...wanted.map(row));
  }
}

function values({ address, state, reason }, model) {
  if (!model) return { address, state, reason, name: "", version: "", inFlight: "", pinned: "", wait: "" };
  const { name, version, trouble, refused, in_flight: inFlight, expected_wait_secs: secs } = model;
  const why = reason || refused || trouble;
  return { address, state, reason: why, name, version, inFlight, pinned: pinned(model), wait: milliseconds(secs * MS) };
}

// The open conversations or sequences of a model that this router has at a replica.
function pinned({ open_conversations: conversations, open_sequences: sequences }) {
  const counts = [counted(conversations, "conversation"), counted(sequences, "sequence")];
  return counts.filter(Boolean).join(", ") || "0";
}

function counted(count, noun) {
  return count ? `${count} ${noun}${count === 1 ? "" : "s"}` : "";
}

// A model that no replica takes requests of.
function absentValues({ name, version, waiting, reason, expected_start_secs: secs }) {
  const wait = secs === null ? "" : milliseconds(secs * MS);
  return { address: "none", state: "NONE", reason, name, version, inFlight: waiting, pinned: "", wait };
}

function row({ address, state, reason, name, version, inFlight, pinned, wait }) {
  const [words, look] = STATES[state] ?? [state, ""];
  const tag = version ? make("span", { class: "tag" }, `version ${version}`) : null;
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, address),
    make(
      "td",
      { "data-label": "State" },
      make("span", { class: `badge ${look}` }, words),
      reason ? make("p", { class: "reason" }, reason) : null,
    ),
    make("td", { "data-label": "Model" }, make("span", {}, name, " ", tag ?? "")),
    make("td", { class: "number", "data-label": "In flight" }, inFlight),
    make("td", { class: "number", "data-label": "Pinned" }, pinned),
    make("td", { class: "number", "data-label": "Expected wait" }, wait),
  );
}
