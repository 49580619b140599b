"""Launch Taichi's kernels by NVIDIA's driver: torch's stream, CUDA graphs, no buffer of arguments.

`ptx` rewrites what Taichi generates so that arguments travel with the launch, and `peepholes` so that it is faster;
`compiler` gets it from a child process, which runs `compile_server`; `disk_cache` keeps it on disk; `driver` loads it;
`native` launches it. `legacy_stream` launches by Taichi's launchers what the driver cannot take.
"""
