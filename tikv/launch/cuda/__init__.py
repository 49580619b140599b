"""Launches Taichi's kernels with NVIDIA's driver: on torch's stream, in CUDA graphs, without an argument buffer.

`compiler` gets a kernel's PTX from a child process, which runs `compile_server`; `ptx` rewrites it so that arguments
are passed with the launch, after `ptx_body` if the kernel is long, and `peepholes` makes it faster; `disk_cache` keeps
it on disk; `driver` loads it; `native` launches it. `legacy_stream` uses Taichi's launchers for kernels that the driver
cannot launch.
"""
