"""The child process that holds one shard: a range of a model's layers, computed with MLX."""
