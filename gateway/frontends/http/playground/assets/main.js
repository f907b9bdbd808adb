// The page: which view is shown, and the server's state, asked for each second while it is seen.

import { get } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { State } from "./state.js";
import { Tensors } from "./tensors.js";

const EVERY_MS = 1000;
const VIEWS = ["chat", "tensors", "state"];
const chat = new Chat();
const tensors = new Tensors();
const state = new State();

function show() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  for (const each of VIEWS) {
    $(`view-${each}`).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function firstView(models) {
  if (location.hash || !models.length) return;
  const talks = models.some((model) => model.kind === "chat");
  const computes = models.some((model) => model.kind === "tensor");
  location.replace(talks ? "#chat" : computes ? "#tensors" : "#state");
}

async function look() {
  try {
    const found = await (await get("playground/state")).json();
    tell(found.server);
    chat.update(found.models);
    tensors.update(found.models);
    state.update(found, performance.now() / 1000);
    firstView(found.models);
    $("banner").hidden = true;
  } catch (error) {
    $("server").className = "server lost";
    $("server").lastElementChild.textContent = "No answer";
    $("banner").textContent = `${error.message} It is asked again every second.`;
    $("banner").hidden = false;
  }
}

function tell({ name, version, ready }) {
  const words = `${name} ${version} · ${ready ? "ready" : "not ready"}`;
  $("server").className = `server ${ready ? "ready" : "unready"}`;
  if ($("server").lastElementChild.textContent !== words) $("server").lastElementChild.textContent = words;
}

// Nobody asks while the page is not seen.
async function follow() {
  for (;;) {
    if (document.hidden) await seen();
    await look();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

function seen() {
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

// On a narrow screen the parameters of a chat are folded away.
function fold(wide) {
  document.querySelector(".settings").open = wide.matches;
}

const wide = matchMedia("(min-width: 54rem)");
wide.addEventListener("change", () => fold(wide));
fold(wide);
addEventListener("hashchange", show);
show();
$("question").focus();
follow();
