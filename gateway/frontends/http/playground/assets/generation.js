// A conversation sent to a model, and its answer as it comes.

import { ServerError, events, get, modelPath, post } from "./api.js";

const SAMPLING = "sampling_parameters";
const WISHES = ["return_num_output_tokens", "return_finish_reason"];

const TIMED = { "x-want-timing": "1" };

// Yields { text, tokens, finish, timing }; tokens is null where nobody counts, finish "" until the end.
export async function* generate(model, messages, parameters, signal) {
  const ask = model.door === "openai" ? askOpenAi : askGenerate;
  const read = model.door === "openai" ? readOpenAi : readGenerate;
  const response = await ask(model, messages, parameters, signal);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ServerError(piece.error.message ?? piece.error);
    yield { ...read(piece), timing: piece.timing };
  }
}

async function askGenerate(model, messages, parameters, signal) {
  const path = modelPath(model.name, model.version);
  const { inputs } = await (await get(path, signal)).json();
  const has = (name) => inputs.some((input) => input.name === name);
  const asked = Object.fromEntries(WISHES.filter(has).map((wish) => [wish, true]));
  // A model that has an input for them looks nowhere else.
  const sampling = has(SAMPLING) ? { [SAMPLING]: JSON.stringify(parameters) } : parameters;
  const body = JSON.stringify({ messages, stream: true, ...sampling, ...asked });
  return await post(`${path}/generate_stream`, body, signal, TIMED);
}

function readGenerate(piece) {
  const finish = first(piece.finish_reason);
  return {
    text: String(first(piece.text_output) ?? ""),
    tokens: first(piece.num_output_tokens) ?? null,
    finish: !finish || finish === "None" ? "" : finish,
  };
}

async function askOpenAi(model, messages, parameters, signal) {
  const stream = { stream: true, stream_options: { include_usage: true } };
  const body = JSON.stringify({ model: model.name, messages, ...stream, ...parameters });
  return await post("v1/chat/completions", body, signal, TIMED);
}

function readOpenAi(piece) {
  const choice = piece.choices?.[0];
  return {
    text: choice?.delta?.content ?? "",
    tokens: null,
    finish: choice?.finish_reason ?? "",
    total: piece.usage?.completion_tokens ?? null,
  };
}

function first(value) {
  return Array.isArray(value) ? value[0] : value;
}
