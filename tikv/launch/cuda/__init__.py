"""Launch Taichi's kernels by NVIDIA's driver: torch's stream, CUDA graphs, no buffer of arguments.

`ptx` rewrites what Taichi generates so that arguments travel with the launch; `compiler` gets it from a child process;
`disk_cache` keeps it on disk; `driver` loads and launches. `tikv.launch` chooses, and falls back to Taichi's launcher.
"""
