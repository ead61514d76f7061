"""Diffusion transformers: what a denoising step computes, sends and holds under each way to split it, and the best."""
