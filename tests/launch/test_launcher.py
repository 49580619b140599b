"""Which launcher kernels get, without a GPU; and what stays with the engine's own."""

import types

import pytest

import tikv
from tikv import engines, extras, launch
from tikv.launch import compiled, launcher
from tikv.launch.cuda import compiler, driver, keys, legacy_stream, made, ptx


@pytest.fixture
def choice(monkeypatch):
    """No launcher chosen, nothing known yet about the driver."""
    monkeypatch.delenv("TIKV_LAUNCHER", raising=False)
    monkeypatch.setattr(launcher, "_selected", None)
    monkeypatch.setattr(launcher, "_unavailable", {})
    monkeypatch.setattr(launcher, "fallbacks", {})
    return monkeypatch


def driver_gives(choice, device, is_capturing=False):
    """Let the driver open a GPU by `device(index)`, and its stream be captured or not."""
    choice.setattr(driver, "device", device)
    choice.setattr(driver, "capturing", lambda index: is_capturing)


CUDA = types.SimpleNamespace(
    is_cuda=True,
    is_cpu=False,
    arch="cuda",
    engine=engines.TAICHI,
    index=0,
    device="cuda:0",
    invariant=False,
    attention_bits=16,
)
SECOND = types.SimpleNamespace(**{**vars(CUDA), "index": 1, "device": "cuda:1"})
CPU = types.SimpleNamespace(is_cuda=False, is_cpu=True, arch="cpu", engine=engines.TAICHI, index=0, device="cpu")
QUADRANTS = types.SimpleNamespace(**{**vars(CUDA), "engine": engines.QUADRANTS})


def missing(index):
    raise tikv.ArchError("cuda-bindings cannot be imported. Install taichi-kv[cuda].")


def test_native_is_taken_where_the_driver_answers(choice):
    driver_gives(choice, lambda index: None)
    assert launch.launcher_report(CUDA)["launcher"] == "native"
    assert launch.launcher_report(CPU)["launcher"] == "direct"
    for name in ("direct", "public", "native"):
        choice.setenv("TIKV_LAUNCHER", name)
        assert launch.launcher_report(CUDA) == {"launcher": name, "why": "asked for", "fallbacks": {}}
    launch.choose_launcher("direct")
    assert launch.launcher_report(CUDA)["launcher"] == "direct"
    launch.choose_launcher(None)


def test_without_a_driver_taichi_launches_and_the_report_says_why(choice):
    driver_gives(choice, missing)
    report = launch.launcher_report(CUDA)
    assert report["launcher"] == "direct"
    assert "Install taichi-kv[cuda]" in report["why"]
    choice.setenv("TIKV_LAUNCHER", "native")
    assert launch.launcher_report(CUDA)["launcher"] == "none"
    with pytest.raises(tikv.ArchError, match=r"asked for but is not available.*taichi-kv\[cuda\]"):
        launcher.launcher_of(CUDA)
    assert launcher.launcher_of(CPU)[0] == "direct"


NO_FILE = (
    "the native launcher cannot load what Quadrants compiles, and no file of kernels made beforehand serves this GPU. "
    "Make one with `tikv kernels build` where Taichi is installed, or use engine='taichi'."
)


def test_what_quadrants_compiles_stays_with_its_own_launcher(choice):
    """The native launcher rewrites PTX, and knows the form that Taichi writes; the driver is not even asked."""
    driver_gives(choice, missing)
    choice.setenv(made.VARIABLE, "")
    assert launch.launcher_report(QUADRANTS) == {"launcher": "direct", "why": NO_FILE, "fallbacks": {}}
    choice.setenv("TIKV_LAUNCHER", "native")
    with pytest.raises(tikv.ArchError) as caught:
        launcher.launcher_of(QUADRANTS)
    assert str(caught.value) == f"launch: the native launcher was asked for but is not available: {NO_FILE}"
    driver_gives(choice, missing, is_capturing=True)
    choice.setenv("TIKV_LAUNCHER", "direct")
    bound = legacy_stream.OnLegacyStream.__new__(legacy_stream.OnLegacyStream)
    bound.kernel = kernel_stub(live=QUADRANTS)
    with pytest.raises(tikv.ArchError, match=r"Quadrants's launcher, which.*cannot capture.*Use engine='taichi' for"):
        bound.launch()


@pytest.fixture
def of_files(choice, tmp_path):
    """A function that lets a folder have a file of kernels for a compute capability, and the GPU be a V100."""
    choice.setenv(made.VARIABLE, str(tmp_path))
    driver_gives(choice, lambda index: types.SimpleNamespace(target="sm_70", index=index))

    def file_for(capability, kernels=(), **facts):
        name = f"sm_{capability[0]}{capability[1]}.zip"
        texts = {keys.made_key_of(kernel.factory, kernel.choices): "PTX" for kernel in kernels}
        (tmp_path / name).write_bytes(made.packed(capability, texts, {"tikv": tikv.__version__, **facts}))

    return file_for


def test_quadrants_has_the_native_launcher_for_kernels_made_beforehand(choice, of_files):
    of_files((6, 0))
    why = "for kernels made beforehand; Quadrants launches the others"
    assert launch.launcher_report(QUADRANTS) == {"launcher": "native", "why": why, "fallbacks": {}}
    assert launch.why_not_native(QUADRANTS) == ""
    choice.setenv("TIKV_LAUNCHER", "direct")
    assert launch.launcher_report(QUADRANTS)["launcher"] == "direct"
    assert "Quadrants cannot link bitcode, and kernels are launched by 'direct' (asked for)" in (
        launch.why_no_tensor_cores(QUADRANTS)
    )


@pytest.mark.parametrize(("capability", "facts"), [((8, 0), {}), ((7, 0), {"sources": "a digest of others"})])
def test_files_for_newer_gpus_or_of_other_sources_do_not_serve_quadrants(choice, of_files, capability, facts):
    of_files(capability, **facts)
    assert launch.launcher_report(QUADRANTS) == {"launcher": "direct", "why": NO_FILE, "fallbacks": {}}
    assert launch.launcher_report(CUDA)["launcher"] == "native", "Taichi compiles for it"


def test_quadrants_needs_cuda_bindings_for_what_was_made_beforehand(choice, of_files):
    of_files((7, 0))
    driver_gives(choice, missing)
    report = launch.launcher_report(QUADRANTS)
    assert (report["launcher"], "Install taichi-kv[cuda]" in report["why"]) == ("direct", True)


def test_under_invariant_one_engine_compiles_all_kernels(choice, of_files):
    of_files((7, 0))
    live = types.SimpleNamespace(**vars(QUADRANTS) | {"invariant": True})
    report = launch.launcher_report(live)
    assert report["launcher"] == "direct"
    assert "kernels that Quadrants compiles may give other bits than those made beforehand" in report["why"]
    assert launch.launcher_report(QUADRANTS)["launcher"] == "native"
    assert launch.launcher_report(types.SimpleNamespace(**vars(CUDA) | {"invariant": True}))["launcher"] == "native"


def test_what_no_file_has_stays_with_quadrants_without_a_warning(choice, of_files, caplog):
    kernel, on_gpu = kernel_stub(live=QUADRANTS), types.SimpleNamespace(device="cuda:0")
    choice.setattr(compiler.runtime, "engine_in_use", lambda: engines.QUADRANTS)
    of_files((7, 0))
    with caplog.at_level("INFO", "tikv"):
        assert kernel._bind_native(1, (on_gpu,)) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "keeps Quadrants's own launcher: no file of kernels made beforehand has it" in caplog.text
    assert list(launch.launcher_report(QUADRANTS)["fallbacks"]) == [kernel.name]
    launcher.fallbacks.clear()
    choice.setattr(driver, "capturing", lambda index: True)
    assert kernel._bind_native(1, (on_gpu,)) is None, "the engine's launcher then says what a capture needs"
    launcher.fallbacks.clear()
    choice.setenv("TIKV_LAUNCHER", "native")
    with pytest.raises(made.NotMade, match="cannot load what Quadrants compiles"):
        kernel._bind_native(1, (on_gpu,))


def test_what_quadrants_cannot_compile_is_refused_at_once_if_no_file_has_it(choice, of_files):
    kernel = kernel_stub(live=QUADRANTS)
    kernel.needs_native = True
    kernel.compile = lambda: pytest.fail("compiled for the engine's launcher")
    of_files((7, 0))
    with pytest.raises(launch.NeedsNativeLauncher, match=r"\(no file of kernels made .*has it\). Use engine='taichi'"):
        kernel.bind(1, types.SimpleNamespace(device="cuda:0"))
    of_files((6, 0), [kernel])
    del kernel.is_made
    assert kernel.is_made


def test_an_unknown_launcher_is_refused(choice):
    with pytest.raises(tikv.ArchError, match="native, direct, public"):
        launch.choose_launcher("fast")
    choice.setenv("TIKV_LAUNCHER", "fast")
    with pytest.raises(tikv.ArchError, match="TIKV_LAUNCHER=fast"):
        launcher.launcher_of(CPU)


def kernel_stub(native=None, live=CUDA):
    found = launch.Kernel.__new__(launch.Kernel)
    found.factory, found.choices, found.native = test_an_unknown_launcher_is_refused, (1,), native
    found.words, found.lengths, found.runtime = ["u64"], [0], live
    found.shared_bytes, found.needs_native = 0, False
    return found


@pytest.fixture
def unpatchable(choice):
    """The driver answers, and no kernel's PTX is of a form that is known."""

    def refuse(kernel):
        raise ptx.Unpatchable("a form nobody knows")

    choice.setattr(compiled.native, "load_native", refuse)
    driver_gives(choice, lambda index: None)
    return choice


def test_a_kernel_that_cannot_be_patched_stays_with_taichi(unpatchable):
    on_gpu = types.SimpleNamespace(device="cuda:0")
    kernel = kernel_stub()
    assert kernel._bind_native(1, (on_gpu,)) is None
    assert list(launch.launcher_report(CUDA)["fallbacks"].values()) == ["a form nobody knows"]
    assert kernel._bind_native(1, (on_gpu,)) is None
    unpatchable.setattr(launcher, "fallbacks", {})
    unpatchable.setenv("TIKV_LAUNCHER", "native")
    with pytest.raises(ptx.Unpatchable):
        kernel._bind_native(1, (on_gpu,))


@pytest.mark.parametrize(("nbytes", "what"), [(100_000, "shared memory"), (0, "arithmetic or instructions")])
def test_what_only_the_native_launcher_provides_has_no_other_launcher(unpatchable, nbytes, what):
    kernel = kernel_stub()
    kernel.shared_bytes, kernel.needs_native = nbytes, True
    kernel.compile = lambda: pytest.fail("compiled for the engine's launcher")
    with pytest.raises(
        launch.NeedsNativeLauncher, match=rf"{what} that only the native launcher provides.*a form nobody"
    ):
        kernel.bind(1, types.SimpleNamespace(device="cuda:0"))


def test_host_arrays_stay_with_taichi(choice):
    assert kernel_stub(native="loaded")._bind_native(1, (types.SimpleNamespace(device="cpu"),)) is None


def test_taichis_launcher_refuses_a_capture(choice):
    driver_gives(choice, missing, is_capturing=True)
    bound = legacy_stream.OnLegacyStream.__new__(legacy_stream.OnLegacyStream)
    bound.kernel = kernel_stub()
    with pytest.raises(tikv.ArchError, match=r"cannot capture.*taichi-kv\[cuda\]"):
        bound.launch()


def test_another_gpu_needs_the_native_launcher(choice):
    for live in (CPU, CUDA, QUADRANTS):
        launcher.require_native(live, "copy")
    driver_gives(choice, lambda index: None)
    launcher.require_native(SECOND, "copy")
    choice.setenv("TIKV_LAUNCHER", "direct")
    with pytest.raises(tikv.ArchError) as caught:
        launcher.require_native(SECOND, "copy")
    assert str(caught.value) == (
        "copy: cuda:1 needs the native launcher, and the launcher in use is 'direct' (asked for); "
        f"Taichi's own launcher uses cuda:0 alone. {extras.install('cuda')}, or start a process that sees "
        "cuda:1 alone (set CUDA_VISIBLE_DEVICES)."
    )


def test_what_the_native_launcher_cannot_take_is_refused_on_another_gpu(unpatchable):
    """By the engine's launcher it would run on the first one."""
    kernel = kernel_stub(live=SECOND)
    kernel.compile = lambda: pytest.fail("compiled for the engine's launcher")
    with pytest.raises(tikv.ArchError, match=r"cuda:1 needs the native launcher, which cannot launch .*a form nobody"):
        kernel.bind(1, types.SimpleNamespace(device="cuda:1"))


def test_a_gpu_that_the_driver_lacks_does_not_keep_others_from_it(choice):
    def device(index):
        if index:
            raise tikv.ArchError("cuDeviceGet of device 1: the CUDA driver says CUDA_ERROR_INVALID_DEVICE.")

    driver_gives(choice, device)
    assert launcher.launcher_of(SECOND)[0] == "direct"
    assert launcher.launcher_of(CUDA)[0] == "native"
    with pytest.raises(tikv.ArchError, match="CUDA_ERROR_INVALID_DEVICE"):
        launcher.require_native(SECOND, "copy")
