"""A packed environment is unpacked once, and nothing of it lies elsewhere."""

import asyncio
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.python.environment_builds import KeptFolders
from backends.python.environments import unpacked
from gateway.errors import Code, InferenceError

Member = Callable[[tarfile.TarFile], None]


def file(name: str, text: str = "text", mode: int = 0o644) -> Member:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(text), mode
        archive.addfile(member, io.BytesIO(text.encode()))

    return add


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    def add(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)

    return add


def packed(path: Path, *members: Member) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for add in members:
            add(archive)
    return path


async def unpack(archive: Path) -> Path:
    return await unpacked(archive, "m", KeptFolders(archive.parent / "kept"))


async def test_it_is_unpacked_once_for_its_content(tmp_path: Path) -> None:
    archive = packed(tmp_path / "env.tar.gz", file("bin/python", "#!", 0o755))
    both = await asyncio.gather(unpack(archive), unpack(archive))
    again = await unpack(archive)
    assert both == [again, again]
    assert (again / "bin" / "python").stat().st_mode & 0o777 == 0o755
    (again / "noted").touch()
    same = archive.rename(tmp_path / "other.tar.gz")
    assert (await unpack(same) / "noted").exists()
    assert await unpack(packed(tmp_path / "env.tar.gz", file("bin/python", "#!!"))) != again


async def test_a_made_environment_is_found_on_a_read_only_disk(
    tmp_path: Path,
) -> None:
    archive = packed(tmp_path / "env.tar.gz", file("bin/python"))
    made = await unpack(archive)
    lock = made.with_name(f"{made.name}.lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, not even by root
    assert await unpack(archive) == made


async def test_links_to_the_systems_python_are_kept(tmp_path: Path) -> None:
    members = (link("bin/python3", "/usr/bin/python3"), link("bin/python", "python3"))
    found = await unpack(packed(tmp_path / "env.tar.gz", *members))
    assert (found / "bin" / "python3").readlink() == Path("/usr/bin/python3")
    assert (found / "bin" / "python").readlink() == Path("python3")


async def test_members_get_the_rights_of_this_users_files(tmp_path: Path) -> None:
    def folder(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("closed")
        member.type, member.mode = tarfile.DIRTYPE, 0o000
        archive.addfile(member)

    members = (folder, file("closed/tool", mode=0o6777), file("/absolute", mode=0o000))
    found = await unpack(packed(tmp_path / "env.tar.gz", *members))
    assert (found / "closed").stat().st_mode & 0o7777 == 0o755
    assert (found / "closed" / "tool").stat().st_mode & 0o7777 == 0o755
    assert (found / "absolute").stat().st_mode & 0o7777 == 0o400
    assert (found / "absolute").stat().st_uid == os.getuid()


async def test_hard_links_inside_it_are_kept(tmp_path: Path) -> None:
    members = (file("lib/a.so"), link("lib/b.so", "lib/a.so", tarfile.LNKTYPE))
    found = await unpack(packed(tmp_path / "env.tar.gz", *members))
    assert (found / "lib" / "a.so").samefile(found / "lib" / "b.so")


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ([file("../escaped")], "../escaped"),
        ([file("inner/../../escaped")], "inner/../../escaped"),
        ([link("out", ".."), file("out/escaped")], "out/escaped"),
        ([link("hard", "../../outside", tarfile.LNKTYPE)], "hard"),
        ([link("hard", "/etc/hostname", tarfile.LNKTYPE)], "hard"),
        ([link("out", "/"), link("hard", "out/etc/hostname", tarfile.LNKTYPE)], "hard"),
        ([link("a", "b"), link("b", ".."), file("a/escaped")], "a/escaped"),
        ([link("out", "../escaped"), file("out")], "out"),
        ([link("device", "", tarfile.CHRTYPE)], "device"),
        ([link("pipe", "", tarfile.FIFOTYPE)], "pipe"),
    ],
)
async def test_a_member_outside_of_the_folder_is_refused_and_nothing_stays(
    tmp_path: Path, members: list[Member], named: str
) -> None:
    (tmp_path / "outside").write_text("untouched")
    archive = packed(tmp_path / "env.tar.gz", file("bin/python"), *members)
    with pytest.raises(InferenceError) as refused:
        await unpack(archive)
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message == (
        "model 'm': its environment 'env.tar.gz' cannot be unpacked: "
        f"'{named}' would not lie inside it"
    )
    assert [name for _, _, files in os.walk(tmp_path) for name in files if name == "escaped"] == []
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is no tar archive, compressed by gzip, bzip2, xz or not at all"),
        (b"no archive", "it is no tar archive, compressed by gzip, bzip2, xz or not at all"),
        (b"\x1f\x8b\x08\x00 cut", "Compressed file ended before the end-of-stream marker"),
    ],
)
async def test_a_file_that_is_no_archive_is_refused(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "env.tar.gz").write_bytes(content)
    with pytest.raises(InferenceError) as refused:
        await unpack(tmp_path / "env.tar.gz")
    assert f"its environment 'env.tar.gz' cannot be unpacked: {why}" in refused.value.message


async def test_a_damaged_archive_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    archive = packed(tmp_path / "env.tar.gz", *(file(f"f{n}", str(n) * 50_000) for n in range(9)))
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(InferenceError) as refused:
        await unpack(archive)
    assert str(tmp_path) not in refused.value.message
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


async def test_an_unwritable_place_is_reported_without_its_path(tmp_path: Path) -> None:
    archive = packed(tmp_path / "env.tar.gz", file("bin/python"))
    (tmp_path / "kept").write_text("a file where the folder should be")
    with pytest.raises(InferenceError) as refused:
        await unpack(archive)
    assert refused.value.code is Code.UNAVAILABLE
    assert "cannot be used" in refused.value.message
    assert str(tmp_path) not in refused.value.message
