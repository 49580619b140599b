"""Metal source, compiled by clang and run on the CPU with a check of each access: Metal's kernels on any Linux machine.

`source` makes C++ of a kernel's Metal source, `library` compiles and launches it over bytes, `threads.h` and `metal.h`
are what it is compiled with. `taichi_source` has the source of tikv's kernels; `back_end` lets tikv run on them.
"""

from metal_on_cpu.library import MetalFault as MetalFault
from metal_on_cpu.library import MetalFunction as MetalFunction
from metal_on_cpu.library import Options as Options
