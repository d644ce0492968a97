"""Loads the BLAS that shards load, before anything here imports MLX, so that both compute alike."""

from __future__ import annotations

from services.runner.shard import blas

blas.load(threads=1)
