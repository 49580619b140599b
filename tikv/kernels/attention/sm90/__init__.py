"""Attention by the warpgroups of compute capability 9.0: `attend` for prompts, `latents` for latents."""
