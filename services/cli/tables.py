"""The cluster as tables: nodes, instances, and who got which layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf import duration_pb2
from rich.table import Table
from rich.text import Text

from services import exclusions
from services.cli import names
from services.cli.output import UNKNOWN, bytes_text, known_bytes_text, level_text
from ullage.v1 import config_service_pb2, model_pb2, node_pb2, state_pb2

_GPU_UNITS: Final = {"usage_pct": "%", "temperature_celsius": "°C", "power_watts": "W"}


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def nodes(state: state_pb2.ClusterState) -> Table:
    """One row for each node: what it can give, what it has given, and what its shards hold as its probe sees it."""
    sizes = ("AVAILABLE", "PROMISED", "RESIDENT", "OWN")
    table = _table("NODE", "HEARD", "LEVEL", *sizes, "RUNNER", right=sizes)
    for node in sorted(state.nodes, key=lambda node: names.node_name(node.identity)):
        table.add_row(
            names.node_name(node.identity),
            _heard(node),
            level_text(node.memory.pressure_level),
            known_bytes_text(node.memory, "balanced_available_bytes"),
            bytes_text(node.promised_bytes),
            bytes_text(node.resident_bytes),
            known_bytes_text(node.memory, "own_bytes"),
            node.runner.address or "none",
        )
    return table


def settings(settings: Iterable[config_service_pb2.Setting]) -> Table:
    """One row for each option of a service: as it stands, where that comes from, and what else would set it."""
    table = _table("OPTION", "VALUE", "FROM", "ENVIRONMENT")
    for setting in settings:
        source = config_service_pb2.SettingSource.Name(setting.source).removeprefix("SETTING_SOURCE_")
        table.add_row(
            setting.flag,
            Text(setting.value if setting.HasField("value") else "none"),
            source.replace("_", " ").lower(),
            setting.environment_variable,
        )
    return table


def gpus(state: state_pb2.ClusterState) -> list[str]:
    """A line for each GPU, by node: whose its memory is, what of that is free, and what it is doing."""
    by_name = sorted(state.nodes, key=lambda node: names.node_name(node.identity))
    return [f"{names.node_name(node.identity)}: {_gpu_text(gpu)}" for node in by_name for gpu in node.system.gpus]


def _gpu_text(gpu: node_pb2.Gpu) -> str:
    if gpu.unified:
        memory = "its memory is the node's"
    else:
        available, total = (known_bytes_text(gpu, f"memory_{what}_bytes") for what in ("available", "total"))
        memory = f"{available} of {total} free"
    known = {field.name: value for field, value in gpu.ListFields()}
    doing = [f"{known[field]:.0f} {unit}" for field, unit in _GPU_UNITS.items() if field in known]
    return ", ".join([gpu.name, memory, *doing])


def _heard(node: state_pb2.NodeView) -> str:
    if not node.HasField("liveness"):
        return UNKNOWN
    return state_pb2.Liveness.Name(node.liveness).removeprefix("LIVENESS_").lower()


def instances(state: state_pb2.ClusterState, shown: list[model_pb2.Instance]) -> Table:
    """One row for each shard, under its instance."""
    node_names = names.node_names(state)
    table = _table("INSTANCE", "MODEL", "STATE", "RANK", "NODE", "LAYERS", "PHASE", "DONE", "RESIDENT", right=("RANK",))
    for instance in shown:
        head = (instance.instance_id, instance.model.model_id, instance_state_text(instance))
        for shard, status in zip(instance.placement.shards, instance.shards, strict=False):
            table.add_row(
                *head,
                str(shard.rank),
                names.named(node_names, shard.node_id),
                layers_text(shard),
                phase_name(status.phase),
                done_text(status),
                known_bytes_text(status, "resident_bytes"),
            )
            head = ("", "", Text())
    return table


def instance_state_text(instance: model_pb2.Instance) -> Text:
    """The state of an instance by its name, in its colour."""
    name = model_pb2.InstanceState.Name(instance.state).removeprefix("INSTANCE_STATE_")
    return Text(name, style={"RUNNING": "green", "FAILED": "bold red"}.get(name, ""))


def phase_name(phase: model_pb2.ShardPhase.ValueType) -> str:
    """A shard's phase by its name."""
    return model_pb2.ShardPhase.Name(phase).removeprefix("SHARD_PHASE_")


def done_text(status: model_pb2.ShardStatus) -> str:
    """How far a phase is, in percent, where the runner says so."""
    if not status.HasField("done_bytes") or not status.total_bytes:
        return ""
    return f"{100 * status.done_bytes // status.total_bytes} %"


def layers_text(shard: model_pb2.Shard) -> str:
    """The layers of a shard, first to last: "0-11"."""
    return f"{shard.first_layer}-{shard.end_layer - 1}"


def placement(decided: model_pb2.Placement) -> Table:
    """Who got which layers: bytes by part, the level it was decided at, and the factor that level gave."""
    sizes = ("LAYER BYTES", "EMBEDDING", "HEAD", "KV", "ACTIVATIONS", "OVERHEAD", "TOTAL")
    table = _table("RANK", "NODE", "LAYERS", *sizes, "LEVEL", "FACTOR", right=("RANK", *sizes, "FACTOR"))
    budgets = {budget.node_id: budget for budget in decided.nodes}
    for shard in decided.shards:
        budget = budgets.get(shard.node_id, model_pb2.NodeBudget(node_id=shard.node_id))
        table.add_row(
            str(shard.rank),
            _budget_name(budget),
            layers_text(shard),
            *(bytes_text(size) if size else "-" for size in _parts(shard.bytes)),
            level_text(budget.pressure_level),
            f"{budget.pressure_factor:g}",
        )
    return table


def prediction(decided: model_pb2.Placement) -> list[str]:
    """The time a token is predicted to take, by rank and hop; nothing where speeds are not known."""
    if not decided.HasField("time_per_token"):
        return []
    parts = []
    for shard in decided.shards:
        hop = f" + {_milliseconds(shard.hop_time)} on" if shard.HasField("hop_time") else ""
        parts.append(f"rank {shard.rank} {_milliseconds(shard.stage_time)}{hop}")
    return [f"predicted for a token: {_milliseconds(decided.time_per_token)} = {', '.join(parts)}"]


def runners_up(decided: model_pb2.Placement) -> list[str]:
    """The ways it could have gone, each with what it lacked."""
    budgets = {budget.node_id: _budget_name(budget) for budget in decided.nodes}
    return [
        f"or {', '.join(f'{budgets.get(each.node_id, each.node_id)} {layers_text(each)}' for each in other.shards)}: "
        f"{other.reason}"
        for other in decided.alternatives
    ]


def _milliseconds(time: duration_pb2.Duration) -> str:
    return f"{time.ToNanoseconds() / 1e6:.1f} ms"


def _parts(size: model_pb2.ShardBytes) -> tuple[int, ...]:
    return (
        size.layers_bytes,
        size.embedding_bytes,
        size.head_bytes,
        size.kv_bytes,
        size.activation_bytes,
        size.overhead_bytes,
        size.total_bytes,
    )


def left_out(decided: model_pb2.Placement) -> list[str]:
    """A line for each node that could not be used, with the reason."""
    return [
        f"{_budget_name(budget)} is left out: {exclusions.words(budget.exclusion)}"
        for budget in decided.nodes
        if budget.HasField("exclusion")
    ]


def _budget_name(budget: model_pb2.NodeBudget) -> str:
    return names.node_name(node_pb2.NodeIdentity(node_id=budget.node_id, friendly_name=budget.friendly_name))
