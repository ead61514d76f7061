"""When cutting the sequence pays: the frameworks, for language models and for denoising steps."""
