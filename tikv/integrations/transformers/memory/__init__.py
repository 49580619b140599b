"""The memory of a layer, and how it is written and read.

`storage` has the formats, `stored_ops` writes and reads them as torch's operators, `views` shows the memory to torch.
`slot_map` says which slot holds which token, and `steps` the same on the device, for compiled steps. `slots` is what
decode attention reads, and `stored` the tensors that models get. `gradients` passes gradients on, or refuses them.
"""
