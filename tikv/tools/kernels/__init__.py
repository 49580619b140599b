"""`tikv kernels build`: makes kernels for CUDA beforehand, on a machine without a GPU.

`forms` lists the calls of usual models; `collect` makes them over `stand_in`, which answers as NVIDIA's driver, and
finds out which kernels they need; `building` has Taichi write their PTX, side by side, into files that
`tikv.launch.cuda.made` reads.
"""
