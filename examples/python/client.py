"""A client of an Ullage cluster in a few lines: what is there, what would fit, and an answer.

`python examples/python/client.py MODEL PROMPT`, with the package installed and a master at ULLAGE_MASTER.
"""

from __future__ import annotations

import os
import sys

import grpc

from ullage.v1 import (
    event_service_pb2,
    event_service_pb2_grpc,
    model_pb2,
    placement_service_pb2,
    placement_service_pb2_grpc,
    runner_service_pb2,
    runner_service_pb2_grpc,
)


def main(model_id: str, prompt: str) -> None:
    """Show the nodes, place the model unless it runs already, and print its answer."""
    with grpc.insecure_channel(os.environ.get("ULLAGE_MASTER", "127.0.0.1:50500")) as channel:
        events = event_service_pb2_grpc.EventServiceStub(channel)
        state = events.GetState(event_service_pb2.GetStateRequest(), timeout=30).state
        for node in state.nodes:
            level = node.memory.pressure_level
            # Absent means unknown, never 0.
            known = node.memory.HasField("balanced_available_bytes")
            available = f"{node.memory.balanced_available_bytes} bytes" if known else "an unknown number of bytes"
            print(f"{node.identity.friendly_name or node.identity.node_id}: {available} available, level {level}")

        running = [one for one in state.instances if one.state == model_pb2.INSTANCE_STATE_RUNNING]
        instance = next((one for one in running if one.spec.model_id == model_id), None) or placed(channel, model_id)
        addresses = {node.identity.node_id: node.runner.address for node in state.nodes}
    ask(addresses[instance.placement.shards[0].node_id], instance.instance_id, prompt)


def placed(channel: grpc.Channel, model_id: str) -> model_pb2.Instance:
    """The model's new instance, once it runs. A refusal is the details of the grpc.RpcError it raises."""
    placements = placement_service_pb2_grpc.PlacementServiceStub(channel)
    spec = model_pb2.PlacementSpec(model_id=model_id, context_tokens=1024, requested_by="examples/python")
    instance = placements.Place(placement_service_pb2.PlaceRequest(spec=spec), timeout=30).instance
    watch = placement_service_pb2.WatchInstanceRequest(instance_id=instance.instance_id)
    for change in placements.WatchInstance(watch, timeout=600):
        if change.instance.state == model_pb2.INSTANCE_STATE_RUNNING:
            return change.instance
        if change.instance.state == model_pb2.INSTANCE_STATE_FAILED:
            sys.exit(change.instance.failure)
    sys.exit("it was released before it ran")


def ask(address: str, instance_id: str, prompt: str) -> None:
    """Print what the instance answers. Prompts go to the runner of its first rank."""
    request = runner_service_pb2.GenerateRequest(instance_id=instance_id)
    request.chat.messages.add(role="user", content=prompt)
    request.sampling.max_tokens = 32
    with grpc.insecure_channel(address) as channel:
        for response in runner_service_pb2_grpc.RunnerServiceStub(channel).Generate(request, timeout=600):
            print(response.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:3])
