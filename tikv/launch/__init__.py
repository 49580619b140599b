"""Compiles a kernel once per runtime, binds it once, and launches it many times in the cheapest way for the arch.

Three launchers give the same bits. **native**, on CUDA: NVIDIA's driver launches the kernel on torch's current stream,
or on that of `use_stream`, and a CUDA graph may capture it. **direct**: the engine's launcher, with a launch context
that is filled here. On CPU the context is kept, and only changed arguments are set again; elsewhere a launch overwrites
it, so each launch fills a new one. **public**: the engine's public call, at ten times the cost.

The first that works is used; `TIKV_LAUNCHER` or `choose_launcher` names one. Native and direct use internals of Taichi
1.7, so Taichi is pinned to `taichi>=1.7.4,<1.8`.

`launcher` chooses and reports; `compilation` compiles kernels, `compiled` keeps and binds them; `bound`, `cuda.native`
and `cuda.legacy_stream` launch them; `vectors` names the entries of their arguments; `recorder` and `graph` are for
`tikv.graphs`; `pending` waits for kernels that other processes compile; `ahead` compiles kernels for programs without
Python; `notices` tells users who wait for a compiler.
"""

from tikv.launch.bound import Bound as Bound
from tikv.launch.compilation import CompiledKernel as CompiledKernel
from tikv.launch.compiled import Kernel as Kernel
from tikv.launch.compiled import NeedsNativeLauncher as NeedsNativeLauncher
from tikv.launch.compiled import bind_again as bind_again
from tikv.launch.compiled import bind_elsewhere as bind_elsewhere
from tikv.launch.compiled import kernel as kernel
from tikv.launch.cuda.compile_server import serve_compiler as serve_compiler
from tikv.launch.cuda.driver import use_stream as use_stream
from tikv.launch.cuda.native import OUTSIDE_CAPTURES as OUTSIDE_CAPTURES
from tikv.launch.cuda.native import argument_layout as argument_layout
from tikv.launch.cuda.native import blocks_of as blocks_of
from tikv.launch.cuda.native import is_captured as is_captured
from tikv.launch.cuda.native import refuse_during_capture as refuse_during_capture
from tikv.launch.cuda.native import stream_of as stream_of
from tikv.launch.graph import TaichiGraph as TaichiGraph
from tikv.launch.launcher import choose_launcher as choose_launcher
from tikv.launch.launcher import launcher_report as launcher_report
from tikv.launch.launcher import multiprocessors as multiprocessors
from tikv.launch.launcher import require_native as require_native
from tikv.launch.launcher import why_no_bitcode as why_no_bitcode
from tikv.launch.launcher import why_no_hopper as why_no_hopper
from tikv.launch.launcher import why_no_tensor_cores as why_no_tensor_cores
from tikv.launch.launcher import why_no_warpgroups as why_no_warpgroups
from tikv.launch.launcher import why_not_native as why_not_native
from tikv.launch.notices import notice as notice
from tikv.launch.pending import Pending as Pending
from tikv.launch.pending import wait_for as wait_for
from tikv.launch.recorder import Recorded as Recorded
from tikv.launch.recorder import is_recording as is_recording
from tikv.launch.recorder import recording as recording
from tikv.launch.subgroups import subgroup_report as subgroup_report
from tikv.launch.subgroups import why_no_subgroups as why_no_subgroups
from tikv.launch.vectors import joined as joined
