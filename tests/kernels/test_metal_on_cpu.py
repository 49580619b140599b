"""What runs Metal source on the CPU computes what Metal would, and notices each thing that Metal leaves undefined."""

import itertools

import metal_on_cpu
import numpy as np
import pytest
from metal_on_cpu import MetalFault, Options
from metal_on_cpu.source import NotMetal, cpp_source

pytestmark = [pytest.mark.once, pytest.mark.thorough]
THREADS = 128
SOURCE = """\
#include <metal_stdlib>
#include <simd/simd.h>

using namespace metal;

struct args_t
{{
    int _m0;
    float _m1;
}};

struct given_ptr
{{
    {kind} _m0[1];
}};

struct found_ptr
{{
    {kind} _m0[1];
}};

constant uint3 gl_WorkGroupSize [[maybe_unused]] = uint3(128u, 1u, 1u);

kernel void main0(constant args_t& args [[buffer(0)]], device given_ptr& given [[buffer(1)]], \
device found_ptr& found [[buffer(2)]], uint3 gl_GlobalInvocationID [[thread_position_in_grid]], \
uint3 gl_LocalInvocationID [[thread_position_in_threadgroup]])
{{
    threadgroup {kind} shared[128];
    int i = int(gl_GlobalInvocationID.x);
    int own = int(gl_LocalInvocationID.x);
    {body}
}}
"""


@pytest.fixture
def launch(clang):
    """A function of a kernel's body and `Options`: what it left of the numbers from 0 on, or of those `given`."""

    def launch(body, options=Options(), *, kind="uint", groups=2, given=None, size=None):  # noqa: B008
        metal = SOURCE.format(kind=kind, body="\n    ".join(body.strip().splitlines()))
        dtype = {"uint": np.uint32, "float": np.float32, "uchar": np.uint8}[kind]
        given = np.arange(groups * THREADS, dtype=dtype) if given is None else np.asarray(given, dtype)
        found = np.zeros(groups * THREADS if size is None else size, dtype)
        arguments = np.array([(7, 0.5)], [("_m0", np.int32), ("_m1", np.float32)])
        metal_on_cpu.MetalFunction(metal, options, clang, (0, 4))(groups, {0: arguments, 1: given, 2: found})
        return found

    return launch


EVERY = [
    Options(width, seed, fast, flush)
    for width, seed, fast, flush in itertools.product((16, 32, 64), (0, 3), (False, True), (False, True))
]
REVERSED = """
shared[own] = given._m0[i] * uint(args._m0);
threadgroup_barrier(mem_flags::mem_threadgroup);
found._m0[i] = shared[127 - own];
"""


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_threads_meet_at_a_barrier(launch, options):
    want = np.arange(2 * THREADS, dtype=np.uint32).reshape(2, THREADS)[:, ::-1].ravel() * 7
    np.testing.assert_array_equal(launch(REVERSED, options), want)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("seed", [0, 3])
def test_simd_groups_are_as_wide_as_asked_for(launch, width, seed):
    groups = np.arange(2 * THREADS, dtype=np.uint32).reshape(-1, width)
    options = Options(width, seed)
    for name, reduced in (("sum", groups.sum(1)), ("max", groups.max(1)), ("min", groups.min(1))):
        found = launch(f"uint x = given._m0[i];\nfound._m0[i] = simd_{name}(x);", options)
        np.testing.assert_array_equal(found, np.repeat(reduced, width), err_msg=name)
    found = launch("uint x = given._m0[i];\nfound._m0[i] = simd_prefix_inclusive_sum(x);", options)
    np.testing.assert_array_equal(found, groups.cumsum(1).ravel())


SET = "shared[own] = 0u;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
WRONG = {
    "outside the buffer": [
        "found._m0[i + 1] = 1u;",
        "found._m0[i - 1] = 1u;",
        "found._m0[i] = given._m0[i + 255];",
        "found._m0[i + (1 << 30) * 2] = 1u;",
    ],
    "outside threadgroup memory: shared": ["shared[own + 1] = 1u;", "shared[own - 1] = 1u;"],
    "race in threadgroup memory: shared": [
        f"{SET}shared[own] = given._m0[i];\nfound._m0[i] = shared[127 - own];",  # no barrier
        "shared[own / 2] = given._m0[i];",  # two write
        f"{SET}uint x = shared[127 - own];\nshared[own] = x;",  # read by one, then written by another
        f"{SET}uint x = shared[0];\nif (own == 77) shared[0] = x;",  # read by all
    ],
    "threadgroup memory read before it is written: shared": [
        "found._m0[i] = shared[own];",
        "if (own != 5) shared[own] = 1u;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "found._m0[i] = shared[127 - own];",
        "if (i < 128) shared[own] = 1u;\nfound._m0[i] = shared[own];",  # what another threadgroup wrote
    ],
    "race in device memory: found": [
        "found._m0[i / 2] = 1u;",
        "found._m0[i] = 1u;\nfound._m0[0] = found._m0[i];",
        "found._m0[i] = found._m0[255 - i];",
        "found._m0[own] = 1u;",  # threads of two threadgroups
    ],
    "a barrier that not all threads reach": [
        "if (own != 77) threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (own == 77) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (own < 64)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        "for (int n = 0; n <= own / 127; n++)\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        "for (int n = 0; n <= own / 127; n++)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
    ],
    "a SIMD-group function that not all its threads reach": [
        "uint x = given._m0[i];\nfound._m0[i] = own == 77 ? 0u : simd_sum(x);",
        "uint x = given._m0[i];\nif (own == 77) return;\nfound._m0[i] = simd_sum(x);",
        "uint x = given._m0[i];\nif (own == 77) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "found._m0[i] = simd_sum(x);",
        "uint x = given._m0[i];\nif (own % 2 == 0)\nfound._m0[i] = simd_sum(x);\nelse\nfound._m0[i] = simd_sum(x);",
    ],
}


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("what", "body"),
    [pytest.param(what, body, id=f"{what}, {n}") for what, bodies in WRONG.items() for n, body in enumerate(bodies)],
)
def test_what_metal_leaves_undefined_is_noticed(launch, what, body, seed):
    with pytest.raises(MetalFault, match=rf"^thread \d+: {what}"):
        launch(body, Options(seed=seed))


@pytest.mark.parametrize("fast_math", [False, True])
def test_a_buffer_ends_where_its_last_whole_element_does(launch, fast_math):
    options = Options(fast_math=fast_math)
    assert launch("if (i < 3) found._m0[i] = 1u;", options, size=3).tolist() == [1, 1, 1]
    with pytest.raises(MetalFault, match=r"thread 2: outside the buffer: found, 2 of 2"):
        launch("if (i < 3) found._m0[i] = 1u;", options, size=2)


def test_neighbouring_bytes_are_no_race(launch):
    assert launch("found._m0[i] = uchar(1);", kind="uchar").all()


def test_a_launch_after_a_fault_is_as_any_other(launch):
    body = (
        f"shared[own] = 0u;\nif (given._m0[own] != 77u)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n{REVERSED}"
    )
    given = np.arange(1000, 1000 + 2 * THREADS)
    want = given.reshape(2, THREADS)[:, ::-1].ravel() * 7
    np.testing.assert_array_equal(launch(body, given=given), want)
    with pytest.raises(MetalFault, match="a barrier"):
        launch(body)
    np.testing.assert_array_equal(launch(body, given=given), want)


def test_a_seed_is_another_order_of_threads(launch):
    first = set()
    for seed in range(4):
        with pytest.raises(MetalFault) as fault:
            launch("found._m0[-1] = 1u;", Options(seed=seed))
        first.add(str(fault.value).partition(":")[0])
    assert "thread 0" in first
    assert len(first) > 2


def test_a_variable_that_is_not_set_is_no_zero(launch):
    assert launch("uint x;\nif (args._m0 == 8) x = 1u;\nfound._m0[i] = x;").all()


def test_fast_math_changes_the_order_of_a_sum_and_fuses(launch):
    given = np.full(2 * THREADS, 1 + 2.0**-12, np.float32)
    given[1] = 2.0**-30
    lost = "found._m0[i] = (given._m0[0] + given._m0[1]) - given._m0[0];"
    assert not launch(lost, kind="float", given=given).any()
    assert (launch(lost, Options(fast_math=True), kind="float", given=given) == np.float32(2.0**-30)).all()
    fused = "float x = given._m0[0];\nfloat y = args._m1 + float(own) * 0.0;\nfound._m0[i] = x * x - (1.5 - y);"
    exact = np.float64(given[0]) ** 2 - 1
    assert (launch(fused, kind="float", given=given) == np.float32(given[0] * given[0]) - 1).all()
    assert (launch(fused, Options(fast_math=True), kind="float", given=given) == np.float32(exact)).all()


def test_subnormals_are_flushed_where_asked_for(launch):
    least = np.full(2 * THREADS, 2.0**-126, np.float32)
    body = "found._m0[i] = given._m0[i] * args._m1;"
    assert (launch(body, kind="float", given=least) == np.float32(2.0**-127)).all()
    assert not launch(body, Options(flush=True), kind="float", given=least).any()
    assert not launch(body, Options(flush=True), kind="float", given=least / 2).any()
    assert (least / 2 > 0).all(), "the process goes on as before"


def test_what_metal_does_not_take_is_refused(launch):
    source = SOURCE.format(kind="uint", body="found._m0[i] = 1u;")
    for body in ("double x = 1.0;", "threadgroup uint more[8065];", "atomic_fetch_add_explicit(found, 1u);"):
        with pytest.raises(NotMetal):
            cpp_source(SOURCE.format(kind="uint", body=body))
    cpp_source(SOURCE.format(kind="uint", body="threadgroup uint more[8064];"))
    with pytest.raises(NotMetal, match=r"buffer\(31\); Metal has 31"):
        cpp_source(source.replace("buffer(2)", "buffer(31)"))


def test_arguments_lie_where_the_struct_has_them(clang):
    source = SOURCE.format(kind="uint", body="found._m0[i] = 1u;")
    with pytest.raises(RuntimeError, match="static_assert"):
        metal_on_cpu.MetalFunction(source, Options(), clang, (0, 8))
