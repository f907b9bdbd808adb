"""Frontend of gRPC: the v2 service, its messages, and two transports.

In reading order:

- `server`: services, health, reflection and shutdown behind one transport
- `servicer`: one method per RPC of the v2 protocol
- `unary_infer`: ModelInfer
- `rpc`: calls, methods, status codes and errors; the interface of transports
- `stream_infer`: ModelStreamInfer, its requests and their cancellation
- `recorded_streams`: its recorded streams, and messages that resume them
- `stream_order`: order of its requests
- `outbox`: limits and sending of its responses
- `request`: decoding of requests
- `parameters`: request parameters and forwarded metadata
- `message_memo`: memo of parsed messages
- `protobuf_wire`: large fields in the protobuf wire format
- `response`: encoding of responses
- `sockets`: listening sockets and TLS
- `grpcio_transport`: transport on the grpcio library
- `hyper_transport`: transport on hyper's HTTP/2 (httpunk), its connections
- `hyper_call`: one RPC
- `hyper_begun`: RPCs without a task
- `hyper_limits`: limits of memory, of time on the event loop, of pings and age
- `hyper_writes`: messages without a task
- `hyper_ends`: ends of many RPCs at once
- `http2_wire`: headers, framing and compression of gRPC over HTTP/2
"""
