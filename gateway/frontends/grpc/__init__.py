"""Frontend of gRPC: the v2 service, its messages, and two transports.

In reading order:

- `server`: services, health and shutdown behind one transport
- `servicer`: one method per RPC of the v2 protocol
- `rpc`: calls, status codes and errors; the interface of transports
- `methods`: parsing, serialization and error translation around a method
- `stream_infer`: ModelStreamInfer
- `outbox`: sending, order and limits of its responses
- `resumption`: resumable streams
- `request`: decoding of requests
- `parameters`: request parameters and forwarded metadata
- `message_memo`: memo of parsed messages
- `protobuf_wire`: large fields in the protobuf wire format
- `response`: encoding of responses
- `standard_services`: health and reflection
- `sockets`: listening sockets and TLS
- `grpcio_transport`: transport on the grpcio library
- `hyper_transport`: transport on hyper's HTTP/2 (httpunk)
- `hyper_connection`: one connection
- `hyper_call`: one RPC
- `headers`: headers of gRPC over HTTP/2
- `framing`: framing and compression of messages
- `hyper_limits`: limits of memory and of time on the event loop
- `hyper_keepalive`: pings and maximum age
- `hyper_events`: fast events and queues for httpunk
"""
