"""Settings of the export of traces to a collector of OpenTelemetry."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSettings:
    """The collector and its batches of spans, with the defaults of Triton.

    `url` takes OTLP over HTTP, in protobuf. `resource` are attributes of this server. The fields
    `bsp_*` are those of a batch span processor: at most `bsp_max_queue_size` spans wait, and each
    `bsp_schedule_delay` milliseconds those that wait are sent, in requests of at most
    `bsp_max_export_batch_size`.
    """

    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512
