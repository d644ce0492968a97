"""Makes a GGUF file, once, the folder of safetensors that shards load from: `python -m services.runner.shard.gguf`.

Rules these modules live by:
- Numbers are never changed: blocks are repacked as MLX packs them, with their scales as they were.
- A file that is cut short, or holds anything not understood, is refused by name before a byte is written.
- The same file gives the same bytes on every machine, so that nodes agree on a model's digest.
- Memory stays bounded: tensors pass through one at a time.
"""
