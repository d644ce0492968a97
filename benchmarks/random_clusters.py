"""Clusters and models made up from a seed: what the allocator is measured on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf import duration_pb2

from services.master.state import State, apply
from ullage.v1 import event_pb2, model_pb2, node_pb2

GIB: Final = 2**30
MIB: Final = 2**20
MODEL_ID: Final = "model"
SMALL_MODEL_ID: Final = "small"

LEVEL_FACTORS: Final = {node_pb2.PRESSURE_LEVEL_NORMAL: 1.0, node_pb2.PRESSURE_LEVEL_WARNING: 0.6}


@dataclass(frozen=True)
class Machine:
    """A node, as far as it matters for where a model goes."""

    node_id: str
    available_bytes: int
    bytes_per_second: int
    overhead_bytes: int = 0
    level: node_pb2.PressureLevel.ValueType = node_pb2.PRESSURE_LEVEL_NORMAL


@dataclass(frozen=True)
class Way:
    """A measured link; no latency where it does not work."""

    sender: str
    receiver: str
    latency_ns: int | None
    bytes_per_second: int | None = None


def facts(machine: Machine) -> Iterator[event_pb2.Fact]:
    """What a master hears of a machine."""
    identity = node_pb2.NodeIdentity(node_id=machine.node_id, boot_id="boot")
    yield event_pb2.Fact(node_announced=event_pb2.NodeAnnounced(identity=identity))
    runner = node_pb2.RunnerProfile(
        node_id=machine.node_id,
        boot_id="boot",
        address=f"{machine.node_id}:50502",
        device="metal",
        weight_form=node_pb2.WEIGHT_FORM_AS_STORED,
        compute_element_bytes=2,
        shard_overhead_bytes=machine.overhead_bytes,
        decode_bytes_per_second=machine.bytes_per_second,
        model_ids=[MODEL_ID, SMALL_MODEL_ID],
    )
    yield event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=runner))
    sample = node_pb2.MemorySample(
        ram_total_bytes=2 * machine.available_bytes,
        strict_available_bytes=machine.available_bytes,
        balanced_available_bytes=machine.available_bytes,
        ceiling_available_bytes=machine.available_bytes,
        pressure_level=machine.level,
    )
    yield event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=machine.node_id, sample=sample))


def link_fact(way: Way) -> event_pb2.Fact:
    """What a runner says of a way it has measured."""
    link = node_pb2.Link(from_node_id=way.sender, to_node_id=way.receiver, reachable=way.latency_ns is not None)
    if way.latency_ns is not None:
        latency = duration_pb2.Duration()
        latency.FromNanoseconds(way.latency_ns)
        link.latency.CopyFrom(latency)
        link.bandwidth_bytes_per_second = way.bytes_per_second or 0
    return event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link))


def state_of(machines: list[Machine], ways: list[Way], *models: model_pb2.Model) -> State:
    """The state in which all this was heard."""
    state = State()
    heard = [fact for machine in machines for fact in facts(machine)] + [link_fact(way) for way in ways]
    known = [event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=model)) for model in models]
    for fact in [*heard, *known]:
        apply(state, event_pb2.RecordedEvent(sequence=state.sequence + 1, fact=fact))
    return state


def large_model(layers: int = 80) -> model_pb2.Model:
    """A model of the size of Llama 3.3 70B in 4 bits."""
    weight = model_pb2.Weight(stored_bytes=481_329_152, parameters=855_654_400)
    end = model_pb2.Weight(stored_bytes=591_003_648, parameters=1_050_673_152)
    return model_pb2.Model(
        model_id=MODEL_ID,
        layers=[model_pb2.Layer(weight=weight, kv_elements_per_token=2048)] * layers,
        embedding=end,
        head=end,
        hidden_size=8192,
        intermediate_size=28672,
        vocabulary_size=128_256,
        attention_heads=64,
        kv_heads=8,
        kv_allocation_step_tokens=256,
        context_tokens_max=131_072,
    )


def small_model() -> model_pb2.Model:
    """A model of the size of Llama 3.1 8B in 4 bits."""
    weight = model_pb2.Weight(stored_bytes=122_699_776, parameters=218_112_000)
    end = model_pb2.Weight(stored_bytes=295_501_824, parameters=525_336_576)
    model = large_model(0)
    model.model_id = SMALL_MODEL_ID
    model.layers.extend([model_pb2.Layer(weight=weight, kv_elements_per_token=2048)] * 32)
    model.embedding.CopyFrom(end)
    model.head.CopyFrom(end)
    model.hidden_size, model.intermediate_size, model.attention_heads = 4096, 14336, 32
    return model


def unequal_model(layers: int, seed: int) -> model_pb2.Model:
    """The large model with layers of half its layers' size up to twice it."""
    chance = random.Random(seed)  # noqa: S311 - the same for the same seed
    model = large_model(layers)
    for layer in model.layers:
        part = chance.uniform(0.5, 2.0)
        layer.weight.stored_bytes = int(layer.weight.stored_bytes * part)
        layer.weight.parameters = int(layer.weight.parameters * part)
    return model


def fleet(count: int, seed: int) -> list[Machine]:
    """So many machines of a few kinds, with more or less of their memory free."""
    chance = random.Random(seed)  # noqa: S311 - the same for the same seed
    kinds = [(16, 100), (24, 120), (32, 150), (48, 270), (64, 400), (96, 300), (128, 540), (192, 800)]
    return [
        Machine(
            node_id=f"node-{number:05}",
            available_bytes=int(ram * GIB * chance.uniform(0.4, 0.9)),
            bytes_per_second=int(speed * 1e9 * chance.uniform(0.6, 0.8)),
            overhead_bytes=200 * MIB,
            level=node_pb2.PRESSURE_LEVEL_WARNING if chance.random() < 0.1 else node_pb2.PRESSURE_LEVEL_NORMAL,
        )
        for number, (ram, speed) in enumerate(chance.choices(kinds, weights=[8, 6, 6, 4, 3, 2, 2, 1], k=count))
    ]


def site_ways(machines: list[Machine], site_nodes: int, seed: int) -> list[Way]:
    """Ways within sites of so many machines: a wire in one direction is a little faster than in the other."""
    chance = random.Random(seed)  # noqa: S311 - the same for the same seed
    ways = []
    for start in range(0, len(machines), site_nodes):
        site = machines[start : start + site_nodes]
        latency = chance.choice([60_000, 300_000, 2_000_000])
        for sender in site:
            for receiver in site:
                if sender is not receiver:
                    noise = chance.uniform(0.7, 1.5)
                    ways.append(Way(sender.node_id, receiver.node_id, int(latency * noise), 1_000_000_000))
    return ways
