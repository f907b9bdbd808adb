// The view of the server's state: its machine, a row for each version of each model, its rollouts and replicas.

import { post } from "./api.js";
import { $ } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Meter } from "./meter.js";
import { ModelRow } from "./model_row.js";
import { Rollouts } from "./rollouts.js";

const GIB = 2 ** 30;

export class State {
  constructor() {
    this.rows = new Map();
    this.meters = new Map();
    this.fleet = new Fleet();
    this.rollouts = new Rollouts();
  }

  // What the server says now; `time` in seconds.
  update({ server, models, machine, fleet, rollouts }, time) {
    $("operations").hidden = !server.explicit;
    this.#models(models, server.explicit, time);
    this.#machine(machine, models, time);
    this.fleet.update(fleet);
    this.rollouts.update(rollouts);
  }

  #models(models, explicit, time) {
    const operate = (operation, name) => this.#operate(operation, name);
    const seen = new Map();
    let last = "";
    models.forEach((model, index) => {
      const key = JSON.stringify([model.name, model.version, model.name === last ? index : 0]);
      const row = this.rows.get(key) ?? new ModelRow(model, operate);
      row.update(model, time, { explicit, first: model.name !== last });
      seen.set(key, row);
      last = model.name;
    });
    this.rows = seen;
    const wanted = [...seen.values()].map((row) => row.element);
    const body = $("models").tBodies[0];
    const same = wanted.length === body.rows.length && wanted.every((row, at) => row === body.rows[at]);
    if (!same) body.replaceChildren(...wanted);
  }

  #machine(machine, models, time) {
    const { cpu, memory_used: used, memory_total: total, gpus } = machine;
    const shown = new Map();
    const meter = (name, share, words) => {
      if (share == null) return;
      const found = this.meters.get(name) ?? new Meter(name);
      found.update(share, words, time);
      shown.set(name, found);
    };
    meter("CPU", cpu, percent(cpu));
    meter("Memory", used / total || null, `${gib(used)} of ${gib(total)} GiB`);
    gpus.forEach((gpu, index) => {
      meter(`GPU ${index}`, gpu.use, percent(gpu.use));
      const memory = `${gib(gpu.memory_used)} of ${gib(gpu.memory_total)} GiB`;
      meter(`GPU ${index} memory`, gpu.memory_used / gpu.memory_total, memory);
    });
    for (const { name, version, engine } of models) {
      const known = shown.has(`KV cache of ${name}`);
      const cache = `KV cache of ${name}${known ? `, version ${version}` : ""}`;
      meter(cache, engine?.kv_cache, percent(engine?.kv_cache));
    }
    this.meters = shown;
    const tiles = [...shown.values()].map((each) => each.element);
    if (tiles.some((tile, at) => tile !== $("machine").children[at]) || tiles.length !== $("machine").children.length) {
      $("machine").replaceChildren(...tiles);
    }
  }

  async #operate(operation, name) {
    this.#say(`${operation === "load" ? "Loading" : "Unloading"} ${name}`);
    try {
      await post(`v2/repository/models/${encodeURIComponent(name)}/${operation}`, "{}");
      this.#say(operation === "load" ? `${name} is loaded.` : `${name} is being unloaded.`);
    } catch (error) {
      this.#say(error.message, true);
    }
  }

  #say(words, failed = false) {
    $("operation").hidden = false;
    $("operation").textContent = words;
    $("operation").classList.toggle("failure", failed);
  }
}

function percent(share) {
  return share == null ? "" : `${Math.round(share * 100)} %`;
}

function gib(bytes) {
  const amount = bytes / GIB;
  return amount.toFixed(amount < 10 ? 1 : 0);
}
