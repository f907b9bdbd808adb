"""The options of a fleet on Ray become settings, and those of its replicas."""

import argparse
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.errors import Code, InferenceError
from gateway.flags import fleet, ray_fleet, serve
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
        "--fleet-name=sluice",
        "--exit-timeout-secs=30.0",
        "--rate-limit=off",
    )


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
    ],
)
def test_an_option_that_ray_cannot_have_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(InferenceError) as caught:
        parse(argument)
    assert reason in caught.value.message


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
