"""The expectations of compiled code are read from the source in its package."""

from pathlib import Path

import pytest

from backends.pytorch.inductor import can_abort, expected, lacking, load_inductor
from backends.pytorch.signature import TensorSlot
from gateway.tensor import Datatype
from tests.torch_models import COMPILES

CHECK = """
AOTI_NOINLINE static void check_input_0(
    AtenTensorHandle* input_handles
) {
    ConstantHandle arg3_1 = ConstantHandle(input_handles[0]);
    int32_t arg3_1_expected_dtype = aoti_torch_dtype_int64();
    if (arg3_1_size[0] < 2) { throw 1; }
    if (arg3_1_size[0] > 64) { throw 1; }
    if (16 != arg3_1_size[1]) { throw 1; }
}
"""
RUN = """
void AOTInductorModel::run_impl() {
    auto arg3_1 = std::move(inputs[0]);
    auto arg3_1_size = arg3_1.sizes();
    int64_t s32 = arg3_1_size[0];
    if (check()) { assert_size_stride(arg3_1, {s32, 16L, 2L*s32}, {16L, 1L}, "input"); }
    {USE}
    arg3_1.reset();
}
"""
X = TensorSlot(names=("x",))


def read(use: str = "", check: str = CHECK, run: str = RUN) -> TensorSlot:
    return expected(X, 0, check + run.replace("{USE}", use))


def test_datatype_sizes_and_limits_are_read() -> None:
    found = read()
    assert found.datatype is Datatype.INT64
    assert found.shape == ("s32", 16, -1)
    assert found.limits == ((0, 64),)
    assert not found.written


def test_without_the_assertion_the_checks_of_each_size_do() -> None:
    assert read(run=RUN.replace("assert_size_stride", "nothing")).shape == (-1, 16)


def test_an_input_is_written_unless_all_uses_are_known_to_read() -> None:
    assert not read(
        "kernel((const int64_t*)(arg3_1.data_ptr()), (float*)(buf0.data_ptr()));"
    ).written
    assert read("kernel((int64_t*)(arg3_1.data_ptr()));").written
    assert read("aoti_torch_copy_(arg3_1, buf0, 0);").written
    assert not read("output_handles[0] = arg3_1.release();").written


def test_a_package_without_source_is_trusted_with_copies_only() -> None:
    assert expected(X, 0, "") == TensorSlot(names=("x",), written=True)


@pytest.mark.parametrize(
    ("isa", "flags", "missing"),
    [
        ("AVX512 AVX512_VNNI", {"avx512f", "avx512_vnni"}, []),
        ("AVX512 AVX512_VNNI", {"avx512f", "avx2"}, ["avx512_vnni"]),
        ("AVX2", {"sse"}, ["avx2"]),
        ("AVX2", set(), []),
        ("", {"sse"}, []),
        ("ASIMD", {"sse"}, []),
    ],
)
def test_instructions_that_this_cpu_lacks_are_found(
    isa: str, flags: set[str], missing: list[str]
) -> None:
    assert lacking(isa, flags) == missing


@pytest.mark.parametrize(
    ("kernel", "aborts"),
    [
        ("#pragma omp parallel\n{ AOTI_TORCH_CHECK(0 <= tmp2, 'index out of bounds'); }", True),
        ("for (;;) { AOTI_TORCH_CHECK(0 <= tmp2, 'index out of bounds'); }", False),
        ("#pragma omp parallel\n{ tmp3.store(out_ptr0); }", False),
    ],
)
def test_checks_in_parallel_loops_are_found(kernel: str, aborts: bool) -> None:
    assert can_abort(kernel) is aborts


@pytest.mark.release
@COMPILES
def test_a_closed_program_keeps_no_files(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    programs = [load_inductor(package, "cpu", 1)]
    assert list(tmp_path.iterdir())
    programs.clear()
    assert list(tmp_path.iterdir()) == []
