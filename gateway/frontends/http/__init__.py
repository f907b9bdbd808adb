"""The HTTP frontend: the v2 protocol with Triton's extensions, OpenAI's endpoints, the playground.

Read in this order:
`app` (all routes), `listener` (the port), `connection` (HTTP/1.1 with bounds), `time_limits` (bytes
that a client owes), `asgi_extensions` (what a connection offers the application);
`request_head` (paths and headers), `body` (bodies and their limits), `compression`, `errors`;
`infer` (the route), `infer_request` (decoding), `infer_inputs`, `request_parameters`,
`infer_response` (encoding);
`generate` (the routes), `generate_codec`, `sse` (streams of events);
`json_object` (parsing), `large_json`, `json_layout` (large texts in parts), `json_tensors`;
`control`, `repository`, `shared_memory` (management routes), `tracing`.
"""
