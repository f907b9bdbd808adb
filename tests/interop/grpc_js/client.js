// Runs one RPC of the v2 protocol by @grpc/grpc-js: what to do comes as JSON on standard input,
// and what came of it goes as JSON to standard output.
//
// in:  {target, proto, method, requests, metadata, deadline_ms, gzip, half_close, cancel_after}
// out: {responses, code, details, initial, trailing}
//
// Bytes are base64 on both sides. With cancel_after, the client leaves after so many responses;
// a unary RPC that is cancelled after none of them is cancelled once "cancel" comes as a line.

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const path = require("path");
const readline = require("readline");

const FORM = { keepCase: true, longs: Number, enums: String, bytes: String, defaults: true, oneofs: true };

function stub(asked) {
  const definition = loader.loadSync(asked.proto, { ...FORM, includeDirs: [path.dirname(asked.proto)] });
  const options = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    "grpc.default_compression_algorithm": asked.gzip ? 2 : 0,
  };
  const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
  return new GRPCInferenceService(asked.target, grpc.credentials.createInsecure(), options);
}

function metadata(pairs) {
  const found = new grpc.Metadata();
  for (const [name, value] of Object.entries(pairs || {})) {
    found.add(name, name.endsWith("-bin") ? Buffer.from(value, "base64") : value);
  }
  return found;
}

function shown(found) {
  return Object.fromEntries(
    Object.entries(found ? found.getMap() : {}).map(([name, value]) => [
      name,
      Buffer.isBuffer(value) ? value.toString("base64") : value,
    ]),
  );
}

function run(asked, lines) {
  const client = stub(asked);
  const options = asked.deadline_ms ? { deadline: Date.now() + asked.deadline_ms } : {};
  const result = { responses: [], initial: {} };
  const unary = !client[asked.method].requestStream;
  const answered = (error, response) => error || result.responses.push(response);
  const call = unary
    ? client[asked.method](asked.requests[0], metadata(asked.metadata), options, answered)
    : client[asked.method](metadata(asked.metadata), options);
  call.on("metadata", (found) => (result.initial = shown(found)));
  call.on("status", ({ code, details, metadata: found }) => {
    Object.assign(result, { code, details, trailing: shown(found) });
    setImmediate(() => {
      process.stdout.write(JSON.stringify(result));
      client.close();
      lines.close();
    });
  });
  lines.on("line", () => call.cancel());
  if (unary) return;
  call.on("error", () => {});
  call.on("data", (response) => {
    result.responses.push(response);
    if (result.responses.length === asked.cancel_after) call.cancel();
  });
  asked.requests.forEach((request) => call.write(request));
  if (asked.half_close !== false) call.end();
}

const lines = readline.createInterface({ input: process.stdin });
lines.once("line", (line) => run(JSON.parse(line), lines));
