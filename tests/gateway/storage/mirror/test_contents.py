"""Names and changes of remote models come from listings; a change counts once it is settled."""

import pytest

from gateway.storage.mirror.contents import (
    RemoteFiles,
    RemoteModel,
    RemoteModels,
    follow,
    is_one_model,
    models_of,
)
from gateway.storage.remote.objects import RemoteListing, RemoteObject


def remote(key: str, etag: str = "e", size: int = 1, modified_ns: int = 0) -> RemoteObject:
    return RemoteObject(key, etag, size, modified_ns)


def listed(*keys: str, folders: tuple[str, ...] = ()) -> RemoteModels:
    listing = RemoteListing(tuple(map(remote, keys)), folders=folders)
    return models_of(listing, one=is_one_model(listing))[0]


def model(etag: str, modified_ns: int = 0) -> RemoteModel:
    return RemoteModel((remote("m/1/a", etag, modified_ns=modified_ns),))


def test_objects_belong_to_the_model_of_their_first_folder() -> None:
    found = listed("a/config.pbtxt", "a/1/model.onnx", "b c+d/1/x", "README")
    assert list(found) == ["a", "b c+d"]
    files = RemoteFiles(found)
    assert files.content("") == ["a/", "b c+d/"]
    assert files.content("a") == ["1/", "config.pbtxt"]
    assert files.content("a/1") == ["model.onnx"]
    assert files.content("README") is None


def test_a_repository_with_a_config_or_versions_at_its_top_is_one_model() -> None:
    assert list(listed("config.pbtxt", "1/model.onnx")) == [""]
    assert list(listed("1/model.onnx")) == [""]


def test_an_object_that_stands_for_a_folder_is_one() -> None:
    files = RemoteFiles(listed("e/config.pbtxt", folders=("e/1",)))
    assert files.content("e") == ["1/", "config.pbtxt"]
    assert files.content("e/1") == []
    assert files.snapshot("e")["1/"] == (0, -1)


@pytest.mark.parametrize(
    "key", ["m/../../etc/x", "m//x", "/m/x", "m/./x", "m/\0", "m/" + "x" * 256]
)
def test_a_key_that_is_no_path_below_the_repository_is_no_file(key: str) -> None:
    models, refused = models_of(RemoteListing((remote(key), remote("m/1/a"))), one=False)
    assert [each.key for each in models["m"].objects] == ["m/1/a"]
    assert refused == (key,)


def test_a_file_below_another_file_excludes_it() -> None:
    models, refused = models_of(RemoteListing((remote("m/1"), remote("m/1/a"))), one=False)
    assert [each.key for each in models["m"].objects] == ["m/1/a"]
    assert refused == ("m/1",)


def test_bytecode_is_no_part_of_a_model() -> None:
    models, refused = models_of(
        RemoteListing((remote("m/1/model.py"), remote("m/1/__pycache__/x"))), one=False
    )
    assert RemoteFiles(models).content("m/1") == ["model.py"]
    assert refused == ()


def test_the_stamp_of_a_file_changes_with_its_etag_and_size_only() -> None:
    def stamp(each: RemoteObject) -> tuple[int, int]:
        return RemoteFiles({"m": RemoteModel((each,))}).snapshot("m")["a"]

    first = stamp(remote("m/a", "e", 1, modified_ns=1))
    assert first == stamp(remote("m/a", "e", 1, modified_ns=2))
    assert first != stamp(remote("m/a", "f", 1))
    assert first != stamp(remote("m/a", "e", 2))
    assert 0 <= first[0] < 2**63


def test_files_come_without_the_folders_that_are_left_out() -> None:
    files = RemoteFiles(listed("m/config.pbtxt", "m/1/a", "m/2/b/c", "m/2x/d"))
    assert sorted(path for path, _ in files.files("m", ["2"])) == [
        *("1", "1/a", "2x", "2x/d", "config.pbtxt"),
    ]


OLD, NEW, NEWER = model("old"), model("new"), model("newer")


@pytest.mark.parametrize(
    ("accepted", "before", "now", "served"),
    [
        pytest.param(OLD, OLD, OLD, OLD, id="unchanged"),
        pytest.param(OLD, OLD, NEW, OLD, id="changed in one listing"),
        pytest.param(OLD, NEW, NEW, NEW, id="changed in two"),
        pytest.param(OLD, NEW, NEWER, OLD, id="changed twice"),
        pytest.param(None, None, NEW, None, id="new in one listing"),
        pytest.param(None, NEW, NEW, NEW, id="new in two"),
        pytest.param(OLD, OLD, None, OLD, id="missing in one listing"),
        pytest.param(OLD, None, None, None, id="missing in two"),
        pytest.param(OLD, NEW, OLD, OLD, id="changed back"),
    ],
)
def test_a_change_counts_after_two_listings(
    accepted: RemoteModel | None,
    before: RemoteModel | None,
    now: RemoteModel | None,
    served: RemoteModel | None,
) -> None:
    def models(each: RemoteModel | None) -> RemoteModels:
        return {} if each is None else {"m": each}

    found = follow(models(accepted), models(before), models(now), lambda each: True)
    assert found == models(served)


def test_a_change_that_is_not_settled_does_not_count() -> None:
    found = follow({"m": OLD}, {"m": NEW}, {"m": NEW}, lambda each: each is not NEW)
    assert found == {"m": OLD}


def test_a_model_is_settled_when_its_newest_object_is_old_enough() -> None:
    assert model("e", modified_ns=1_000_000_000).is_settled(6_000_000_000, 5)
    assert not model("e", modified_ns=1_000_000_001).is_settled(6_000_000_000, 5)


def test_a_model_with_an_upload_marker_is_never_settled() -> None:
    marked = RemoteModel((remote("m/1/a"), remote("m/.uploading")))
    assert marked.is_uploading
    assert not marked.is_settled(10**18, 5)
