"""The command `sluice` and its subcommands; a failure is one line on stderr."""

import argparse
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gateway import __version__
from gateway.errors import InferenceError
from gateway.flags import fleet as fleet_flags
from gateway.flags import keys as key_flags
from gateway.flags import label as label_flags
from gateway.flags import record as record_flags
from gateway.flags import remote as remote_flags
from gateway.flags import rollout as rollout_flags
from gateway.flags import serve as flags
from gateway.flags.ray_fleet import require_ray
from gateway.flags.tritonserver import IgnoredOption, ignored_options
from gateway.flags.values import add_url, seconds, url
from gateway.process_limits import collect_garbage_rarely
from gateway.settings import ENVIRONMENT, MODEL_NAME, UNIX, Settings, netloc
from gateway.storage.remote.addresses import is_remote
from gateway.storage.store import KEPT, ModelStore, StoreError, default_root
from gateway.tools.chat import options as chat_options

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
PLAIN = ("grpc", "grpc-admin", "fleet")
"""Ports without a URL."""
LOCAL = ("0.0.0.0", "127.0.0.1", "::")
CHAT = (
    '{"messages": [{"role": "user", "content": "What is the capital of France?"}], '
    '"stream": true, "parameters": {"max_tokens": 64, "temperature": 0}}'
)


class _Parser(argparse.ArgumentParser):
    """A parser with Triton's exit status for unknown options."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_FAILED, f"{self.prog}: {message}\n")


class CliError(Exception):
    """A command failed; the message is printed as one line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits 1 with a message on stderr if it fails."""
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown and parsed.command is not _tritonserver:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command: Callable[[argparse.Namespace], None] = parsed.command
    parsed.unknown = unknown
    try:
        command(parsed)
    except (InferenceError, StoreError, CliError) as error:
        sys.stderr.write(f"sluice: {error}\n")
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and options."""
    parser = _Parser(
        prog="sluice", description="LLM-first streaming inference gateway: a drop-in Triton."
    )
    parser.add_argument("--version", action="version", version=f"sluice {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the models of a repository")
    flags.add_flags(serve)
    serve.set_defaults(command=_serve)
    triton = commands.add_parser(
        "tritonserver",
        help="serve with the arguments of a tritonserver: unknown options are ignored",
        allow_abbrev=False,
    )
    flags.add_flags(triton)
    triton.set_defaults(command=_tritonserver)
    replica = commands.add_parser("replica", help="host one model for the routers of a fleet")
    flags.add_flags(replica)
    fleet_flags.add_replica_flags(replica)
    replica.set_defaults(command=_replica)
    fleet = commands.add_parser("fleet", help="show or end the replicas of a fleet on Ray")
    fleet_flags.add_command_flags(fleet)
    fleet.set_defaults(command=_fleet)
    chat = commands.add_parser("chat", help="chat with a model of a running server")
    chat_options.add_flags(chat)
    chat.set_defaults(command=_chat)
    label = commands.add_parser("label", help="name versions of a model of a running server")
    label_flags.add_flags(label)
    label.set_defaults(command=_label)
    record = commands.add_parser("record", help="make golden requests of clients' requests")
    record_flags.add_flags(record)
    record.set_defaults(command=_record)
    rollout = commands.add_parser(
        "rollout", help="show and change the rollouts of new versions of running servers"
    )
    rollout_flags.add_flags(rollout)
    rollout.set_defaults(command=_rollout)
    fetch = commands.add_parser(
        "fetch", help="store embedded models, or models in object storage, in the user's cache"
    )
    remote_flags.add_fetch_flags(fetch)
    fetch.set_defaults(command=_fetch)
    cache = commands.add_parser("cache", help="look after the cache of models in object storage")
    remote_flags.add_command_flags(cache)
    cache.set_defaults(command=_cache)
    check = commands.add_parser("check", help="check every field of a repository's configs")
    check.add_argument("repository", type=Path, metavar="REPOSITORY")
    check.add_argument(
        "--golden",
        action="store_true",
        help="load the models that have golden requests, and execute these instead",
    )
    check.set_defaults(command=_check)
    _add_config(commands.add_parser("config", help="write the config.pbtxt of a model file"))
    _add_doctor(commands.add_parser("doctor", help="examine what this machine can serve"))
    memory = commands.add_parser("ps", help="show the models in the memory of a running server")
    memory.add_argument("--json", action="store_true", help="print JSON")
    add_url(memory)
    memory.set_defaults(command=_ps)
    key = commands.add_parser("key", help="make, list and revoke API keys")
    key_flags.add_flags(key)
    key.set_defaults(command=_key)
    return parser


def _add_config(config: argparse.ArgumentParser) -> None:
    config.add_argument(
        "model", metavar="MODEL", help="a model of the repository, or the path of a model file"
    )
    config.add_argument(
        *("--model-repository", "--model-store"),
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder of models; repeatable",
    )
    config.add_argument(
        "--write", action="store_true", help="write config.pbtxt into the model's folder"
    )
    config.add_argument("--force", action="store_true", help="with --write: overwrite the old one")
    config.set_defaults(command=_config)


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--json", action="store_true", help="print JSON")
    add_url(doctor, remark="")
    doctor.add_argument(
        "--limit-secs",
        type=seconds,
        default=60.0,
        metavar="SECS",
        help="time limit of the import of one backend (seconds, default: %(default)g)",
    )
    doctor.add_argument(
        "--metrics-url",
        type=url,
        metavar="URL",
        help="its metrics port (default: port 8002 of that host)",
    )
    doctor.set_defaults(command=_doctor)


def _tritonserver(parsed: argparse.Namespace) -> None:
    known = [f"--{name.replace('_', '-')}" for name in vars(parsed)]
    _serve(parsed, tuple(ignored_options(parsed.unknown, known)))


def _replica(parsed: argparse.Namespace) -> None:
    """Serve one model at the port of the fleet."""
    parsed.model_control_mode, parsed.load_model = "explicit", [parsed.model]
    _serve(parsed)


def _serve(parsed: argparse.Namespace, ignored: Sequence[IgnoredOption] = ()) -> None:
    collect_garbage_rarely()
    settings = flags.settings(parsed)
    log = importlib.import_module("gateway.observability.log").Log(settings.log)
    try:
        log.install()
    except OSError as error:
        raise CliError(f"--log-file {settings.log.file}: {error.strerror}") from None
    for each in ignored:
        extra = {"option": each.option, "why": each.why}
        logging.getLogger("sluice.flags").warning("option ignored", extra=extra)
    # Spawned engine processes import this module again, so heavy imports are in functions.
    uvloop = importlib.import_module("uvloop")
    # Until there is a server nothing is to be drained; a first listing of a storage takes minutes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    uvloop.run(_run_server(settings, log))


async def _run_server(settings: Settings, log: Any) -> None:
    server = importlib.import_module("gateway.server")
    try:
        await server.serve(settings, log, partial(_announce, settings))
    except server.StartFailed as error:
        raise CliError(str(error)) from None


def _announce(settings: Settings, ports: Mapping[str, int], models: Sequence[Any]) -> None:
    addresses = {name: each.address for name, each in settings.listeners.items()}
    if settings.fleet is not None:
        addresses["fleet"] = settings.fleet.address
    places = {name: netloc(_local(addresses[name]), port) for name, port in ports.items()}
    web = "http://" if settings.http.tls is None else "https://"
    for name, place in places.items():
        scheme = "" if name in PLAIN or place.startswith(UNIX) else web
        sys.stderr.write(f"{name:>8}  {scheme}{place}\n")
    chats = [
        model.name for model in models if any(i.name == "messages" for i in model.config.input)
    ]
    if chats and "http" in places:
        url = f"{web}{places['http']}/v2/models/{chats[0]}/generate_stream"
        sys.stderr.write(f"\nStream tokens:\n\n  curl -N {url} -d '{CHAT}'\n\n")


def _fleet(parsed: argparse.Namespace) -> None:
    require_ray()
    importlib.import_module("gateway.fleet.ray_command").run(parsed, _console())


def _console() -> Any:
    """A terminal for tables and bars; a server needs none, so `serve` does without the import."""
    return importlib.import_module("rich.console").Console()


def _local(address: str) -> str:
    """The name of an address on this machine."""
    return "localhost" if address in LOCAL else address


def _chat(parsed: argparse.Namespace) -> None:
    command = importlib.import_module("gateway.tools.chat.command")
    try:
        command.run(chat_options.options(parsed))
    except importlib.import_module("gateway.tools.chat.server").ChatError as error:
        raise CliError(str(error)) from None


def _label(parsed: argparse.Namespace) -> None:
    importlib.import_module("gateway.tools.label").run(parsed, ENVIRONMENT)


def _record(parsed: argparse.Namespace) -> None:
    record = importlib.import_module("gateway.tools.record")
    record.run(parsed, ENVIRONMENT, _console())


def _rollout(parsed: argparse.Namespace) -> None:
    command = importlib.import_module("gateway.tools.rollout")
    if status := command.run(parsed, ENVIRONMENT, _console()):
        raise SystemExit(status)


def _fetch(parsed: argparse.Namespace) -> None:
    if parsed.names and is_remote(parsed.names[0]):
        importlib.import_module("gateway.tools.remote").fetch(parsed, _console())
        return
    fetch = importlib.import_module("gateway.storage.fetch")
    fetch.fetch_all(parsed.names, ModelStore(default_root(ENVIRONMENT)), _console())


def _cache(parsed: argparse.Namespace) -> None:
    if not importlib.import_module("gateway.tools.remote").look_after(parsed, _console()):
        raise SystemExit(EXIT_FAILED)


def _check(parsed: argparse.Namespace) -> None:
    if parsed.golden:
        _check_golden(parsed.repository)
        return
    check = importlib.import_module("gateway.tools.check")
    findings = check.check(_repository([parsed.repository]))
    _console().print(check.table(findings))
    if any(finding.verdict == "refused" for finding in findings):
        raise CliError("the repository has fields that are refused")


def _check_golden(repository: Path) -> None:
    # The table has the reasons that the log would have.
    logging.getLogger("sluice").addHandler(logging.NullHandler())
    golden = importlib.import_module("gateway.tools.golden")
    rows = golden.check_golden(
        repository, default_root(ENVIRONMENT), ENVIRONMENT.get(MODEL_NAME, "")
    )
    _console().print(golden.table(rows))
    if failed := sum(row.result.outcome == "failed" for row in rows):
        raise CliError(f"{failed} of {len(rows)} golden requests failed")


def _repository(folders: Sequence[Path]) -> Any:
    repository = importlib.import_module("gateway.models.repository")
    return repository.ModelRepository(folders, model_name=ENVIRONMENT.get(MODEL_NAME, ""))


def _config(parsed: argparse.Namespace) -> None:
    # The remarks of a backend are in the text, as comments.
    logging.getLogger("sluice").addHandler(logging.NullHandler())
    drafting = importlib.import_module("gateway.tools.draft")
    backend_loader = importlib.import_module("gateway.backend_loader")
    backends = backend_loader.BackendLoader(kept=_kept())
    draft = drafting.draft(_model_file(parsed), backends)
    if not parsed.write:
        sys.stdout.write(draft.text)
        return
    if draft.path is None:
        raise CliError(
            "--write needs a model of a repository, whose file is at DIR/MODEL/1/...; without "
            "--write the text is printed"
        )
    _write_new(draft.path, draft.text, overwrite=parsed.force)
    sys.stderr.write(f"wrote {draft.path}\n")


def _kept() -> Path | None:
    """The folder for files that backends keep; None without a cache folder."""
    try:
        return default_root(ENVIRONMENT) / KEPT
    except StoreError:
        return None


def _doctor(parsed: argparse.Namespace) -> None:
    if not importlib.import_module("gateway.tools.doctor.command").run(parsed):
        raise SystemExit(EXIT_FAILED)


def _ps(parsed: argparse.Namespace) -> None:
    importlib.import_module("gateway.tools.memory").run(parsed, ENVIRONMENT, _console())


def _key(parsed: argparse.Namespace) -> None:
    command = importlib.import_module("gateway.tools.keys")
    try:
        command.run(parsed)
    except importlib.import_module("gateway.policy.key_file").KeyFileError as error:
        raise CliError(str(error)) from None


def _model_file(parsed: argparse.Namespace) -> Any:
    """The model file: by the name of its model if repositories are given, else by its path."""

    drafting = importlib.import_module("gateway.tools.draft")
    if parsed.model_repository:
        return drafting.find_file(_repository(parsed.model_repository), parsed.model)
    if "/" in parsed.model or Path(parsed.model).exists():
        return drafting.open_file(Path(parsed.model))
    raise CliError(
        f"'{parsed.model}' is no file; for a model of a repository add --model-repository DIR"
    )


def _write_new(path: Path, text: str, *, overwrite: bool) -> None:
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CliError(f"{path} exists; --force overwrites it") from None
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from None
