"""The options of a fleet on Ray become settings, and those of its replicas."""

import argparse
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.errors import Code, InferenceError
from gateway.flags import devices, fleet, models, ray_fleet, serve
from gateway.settings import Settings


def parse(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_flags(parser)
    return serve.settings(parser.parse_args(["--model-repository=m", "--fleet=ray", *arguments]))


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_fleet, "find_spec", lambda name: ModuleSpec(name, None))


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_fleet, "find_spec", lambda name: None)


@pytest.mark.usefixtures("with_ray")
def test_the_models_of_a_router_on_ray_are_at_its_replicas() -> None:
    found = parse()
    assert found.models.repositories == ()
    assert found.fleet is not None
    assert found.fleet.ray == (
        f"--model-repository={Path('m').absolute()}",
        "--model-load-thread-count=4",
        "--fleet-name=sluice",
        "--exit-timeout-secs=30.0",
        "--rate-limit=off",
        "--golden=strict",
        "--min-supported-compute-capability=6.0",
    )


@pytest.mark.usefixtures("with_ray")
def test_a_router_on_ray_listens_for_others(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("s" * 32)
    proven = f"--fleet-secret-file={secret}"
    found = [parse(), parse(proven), parse(proven, "--fleet-port=7", "--fleet-address=::1")]
    places = [(each.fleet.address, each.fleet.port) for each in found if each.fleet is not None]
    assert places == [("127.0.0.1", 0), ("0.0.0.0", 0), ("::1", 7)]


@pytest.mark.usefixtures("with_ray")
def test_replicas_understand_the_options_that_they_get(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    given = (
        *("--backend-config=onnxruntime,threads=2", "--backend-config=default-max-batch-size=3"),
        *("--model-config-name=small", "--disable-auto-complete-config", "--stall-secs=7"),
        *(f"--fleet-secret-file={secret}", "--fleet-name=f", "--exit-timeout-secs=9"),
    )
    found = parse(*given)
    assert found.fleet is not None
    assert found.fleet.ray is not None
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_flags(parser)
    fleet.add_replica_flags(parser)
    replica = serve.settings(parser.parse_args(["model", *found.fleet.ray]))
    assert replica.fleet is not None
    assert (replica.fleet.name, replica.fleet.secret) == ("f", b"s" * 32)
    assert replica.models.config_name == "small"
    assert replica.models.repositories == (Path("m").absolute(),)
    assert replica.models.backends == {
        "onnxruntime": {"threads": "2"},
        "": {"default-max-batch-size": "3"},
    }
    assert not replica.models.auto_complete
    assert (replica.models.stall_secs, replica.exit_timeout_secs) == (7, 9)


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--fleet-name=a:b", "--fleet-name is 'a:b', expected letters, digits, '_', '.' and '-'"),
        ("--model-control-mode=poll", "--model-control-mode has no effect with --fleet ray"),
        ("--model-namespacing=true", "--model-namespacing has no effect with --fleet ray"),
        ("--exit-on-error=false", "--exit-on-error has no effect with --fleet ray"),
        ("--host-policy=cpu,cpu-cores=0-9999", "--host-policy has no effect with --fleet ray"),
    ],
)
def test_an_option_that_ray_cannot_have_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse(argument)
    assert reason in caught.value.message


PASSED = {
    "--model-repository": "/other",
    "--model-store-path": "/store",
    "--model-load-thread-count": "3",
    "--model-load-retry-count": "2",
    "--model-config-name": "small",
    "--disable-auto-complete-config": None,
    "--backend-config": "onnxruntime,threads=2",
    "--backend-directory": "/backends",
    "--rate-limit": "execution_count",
    "--rate-limit-resource": "R:2:1",
    "--stall-secs": "7.0",
    "--golden": "warn",
    "--min-supported-compute-capability": "7.5",
    "--model-load-gpu-limit": "0:0.500000",
}
REFUSED = {
    *("--model-control-mode", "--model-namespacing", "--exit-on-error", "--host-policy"),
    *("--on-demand", "--model-memory", "--gpu-memory", "--max-resident-models"),
}
OTHERS = {
    "--strict-model-config",  # passed on as the option that replaces it
    "--strict-readiness",  # the readiness of the router itself
    *("--repository-poll-secs", "--load-model"),  # of control modes that are refused
    # of addresses, which are refused
    *("--remote-cache-size", "--repository-settle-secs", "--remote-offline"),
    *("--pinned-memory-pool-byte-size", "--cuda-memory-pool-byte-size"),  # without effect
}


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize("option", PASSED)
def test_an_option_of_models_is_passed_on(option: str) -> None:
    value = PASSED[option]
    given = option if value is None else f"{option}={value}"
    found = parse(given).fleet
    assert found is not None
    assert found.ray is not None
    assert given in found.ray


@pytest.mark.usefixtures("with_ray")
def test_the_deprecated_option_of_complete_configurations_is_passed_on() -> None:
    found = parse("--strict-model-config=true").fleet
    assert found is not None
    assert "--disable-auto-complete-config" in (found.ray or ())


def test_every_option_of_models_and_gpus_is_passed_on_or_refused() -> None:
    parser = argparse.ArgumentParser()
    models.add_flags(parser)
    devices.add_gpu_flags(parser)
    names = vars(parser.parse_args(["--model-repository=m"]))
    options = {f"--{name.replace('_', '-')}" for name in names}
    assert options == PASSED.keys() | REFUSED | OTHERS


@pytest.mark.usefixtures("without_ray")
def test_a_fleet_without_the_package_ray_is_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = "a fleet on Ray needs the package ray: pip install 'sluice[fleet]'"
    with pytest.raises(InferenceError) as caught:
        parse()
    assert (caught.value.code, caught.value.message) == (Code.UNSUPPORTED, reason)
    with pytest.raises(SystemExit):
        main(["fleet", "status"])
    assert reason in capsys.readouterr().err
