"""The flags of `sluice serve`, with Triton's names, and the Settings they become."""

import argparse
from pathlib import Path

from gateway.settings import (
    ENVIRONMENT,
    GrpcSettings,
    HttpSettings,
    MetricsSettings,
    ModelSettings,
    Settings,
)
from gateway.store import default_root

TRUE = frozenset({"true", "on", "1"})
FALSE = frozenset({"false", "off", "0"})


def truth(text: str) -> bool:
    """A boolean as Triton's flags write it."""
    if text.lower() in TRUE | FALSE:
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"invalid value for bool option: {text}")


def port(text: str) -> int:
    """A port number; 0 picks a free one."""
    if text.isdigit() and int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' is no port: expected 0 to {2**16 - 1}")


def seconds(text: str) -> float:
    """A duration of more than zero seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if 0 < found < float("inf"):
        return found
    raise argparse.ArgumentTypeError(f"'{text}' is no duration: expected seconds, more than 0")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}': expected a whole number of at least 1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of `sluice serve`."""
    _add_model_flags(parser)
    _add_http_flags(parser)
    _add_grpc_flags(parser)
    _add_process_flags(parser)


def settings(flags: argparse.Namespace) -> Settings:
    """What the flags say."""
    metrics_address = flags.metrics_address or flags.http_address
    return Settings(
        id=flags.id,
        exit_timeout_secs=flags.exit_timeout_secs,
        models=ModelSettings(
            repositories=tuple(flags.model_repository),
            store=flags.model_store_path or default_root(ENVIRONMENT),
            config_name=flags.model_config_name,
            exit_on_error=flags.exit_on_error,
            strict_readiness=flags.strict_readiness,
            load_thread_count=flags.model_load_thread_count,
        ),
        http=HttpSettings(
            enabled=flags.allow_http,
            address=flags.http_address,
            port=flags.http_port,
            max_input_size=flags.http_max_input_size,
            first_response_secs=flags.http_first_response_secs,
            keep_alive_secs=flags.http_keep_alive_secs,
            send_timeout_secs=flags.send_timeout_secs,
        ),
        grpc=GrpcSettings(
            enabled=flags.allow_grpc,
            address=flags.grpc_address,
            port=flags.grpc_port,
            send_timeout_secs=flags.send_timeout_secs,
        ),
        metrics=MetricsSettings(
            enabled=flags.allow_metrics, address=metrics_address, port=flags.metrics_port
        ),
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("models"), ModelSettings()
    group.add_argument(
        *("--model-repository", "--model-store"),
        action="append",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of models to serve; may be given several times",
    )
    group.add_argument(
        "--model-config-name",
        default=defaults.config_name,
        metavar="NAME",
        help="use a model's configs/NAME.pbtxt where it exists",
    )
    group.add_argument(
        "--model-store-path",
        type=Path,
        metavar="DIR",
        help="where `sluice fetch` keeps models (default: the user's cache)",
    )
    _add_truth(group, "--exit-on-error", defaults.exit_on_error, "end if a model fails to load")
    _add_truth(
        group, "--strict-readiness", defaults.strict_readiness, "ready only if every model is"
    )
    group.add_argument(
        "--model-load-thread-count",
        type=count,
        default=defaults.load_thread_count,
        metavar="N",
        help="models that load side by side (default: %(default)s)",
    )


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("HTTP"), HttpSettings()
    _add_listener(group, "http", defaults.address, defaults.port)
    group.add_argument(
        "--http-max-input-size",
        type=count,
        default=defaults.max_input_size,
        metavar="BYTES",
        help="largest request body (default: %(default)s)",
    )
    group.add_argument(
        "--http-first-response-secs",
        type=seconds,
        default=defaults.first_response_secs,
        metavar="SECS",
        help="how long a stream waits for its first response before it sends its headers "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--http-keep-alive-secs",
        type=seconds,
        default=defaults.keep_alive_secs,
        metavar="SECS",
        help="silence on a stream that is filled with a comment (default: %(default)s)",
    )


def _add_grpc_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("gRPC"), GrpcSettings()
    _add_listener(group, "grpc", defaults.address, defaults.port)
    group.add_argument(
        "--send-timeout-secs",
        type=seconds,
        default=defaults.send_timeout_secs,
        metavar="SECS",
        help="a client that takes nothing for so long is gone, on gRPC and on HTTP streams "
        "(default: %(default)s)",
    )


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    group, defaults = parser.add_argument_group("metrics and process"), MetricsSettings()
    _add_truth(group, "--allow-metrics", defaults.enabled, "serve GET /metrics")
    group.add_argument(
        "--metrics-address", default="", metavar="ADDR", help="default: as --http-address"
    )
    group.add_argument(
        "--metrics-port",
        type=port,
        default=defaults.port,
        metavar="PORT",
        help="0 picks a free one (default: %(default)s)",
    )
    group.add_argument(
        "--id", default=Settings().id, help="name of the server in its metadata (%(default)s)"
    )
    group.add_argument(
        "--exit-timeout-secs",
        type=seconds,
        default=Settings().exit_timeout_secs,
        metavar="SECS",
        help="how long requests may go on after SIGTERM (default: %(default)s)",
    )
    group.add_argument(
        "--log-verbose",
        type=int,
        default=0,
        metavar="LEVEL",
        help="above 0, log more (default: %(default)s)",
    )


def _add_listener(
    group: "argparse._ArgumentGroup", wire: str, address: str, default_port: int
) -> None:
    _add_truth(group, f"--allow-{wire}", True, "serve it")
    group.add_argument(
        f"--{wire}-address",
        default=address,
        metavar="ADDR",
        help="address to listen on (default: %(default)s)",
    )
    group.add_argument(
        f"--{wire}-port",
        type=port,
        default=default_port,
        metavar="PORT",
        help="0 picks a free one (default: %(default)s)",
    )


def _add_truth(group: "argparse._ArgumentGroup", flag: str, default: bool, text: str) -> None:
    group.add_argument(
        flag,
        type=truth,
        default=default,
        metavar="true|false",
        help=f"{text} (default: {str(default).lower()})",
    )
