"""What of its GPUs is told as a node's own: of each figure, that of the first GPU that has it."""

from __future__ import annotations

from ullage.v1 import node_pb2


def fill(sample: node_pb2.SystemSample) -> None:
    """Set the node's figures from the GPUs in `sample`, where they are not set yet."""
    for gpu in sample.gpus:
        if gpu.HasField("usage_pct") and not sample.HasField("gpu_pct"):
            sample.gpu_pct = gpu.usage_pct
        if gpu.HasField("temperature_celsius") and not sample.HasField("gpu_temperature_celsius"):
            sample.gpu_temperature_celsius = gpu.temperature_celsius
        if gpu.HasField("power_watts") and not sample.HasField("gpu_power_watts"):
            sample.gpu_power_watts = gpu.power_watts
