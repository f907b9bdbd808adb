"""The HTTP frontend: the v2 protocol with Triton's extensions, OpenAI's endpoints, the playground.

Read in this order:
`app` (all routes), `listener` (the port), `connection` (HTTP/1.1 with bounds and time limits),
`connection_parts`;
`request_scope` (extensions of ASGI, paths and headers, traces), `body` (limits and compression),
`errors`, `head` (refusals before the body);
`infer` (the route), `infer_request` (decoding), `infer_inputs`, `infer_response` (encoding);
`generate` (the routes), `generate_codec`, `sse` (streams of events);
`json_object` (parsing), `large_json`, `json_layout` (large texts in parts), `json_tensors`;
`control`, `repository`, `shared_memory` (management routes), `documentation` (/docs);
`guard` (conditions of routes), `cross_origin` (CORS).
"""
