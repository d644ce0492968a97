"""What it costs to get from one node to the next, and which ways there are.

Rules this module lives by:
- A way that was tried and did not work is no way. One that nobody has tried is taken to be as good as a local
  network: the runners try it before anything is loaded.
- Ways are one-way: each direction counts for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ullage.v1 import node_pb2

HOP_SECONDS: Final = 0.001
"""From one rank to the next where no link was measured: what a hop may cost on a local network."""

Seconds = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Way(NamedTuple):
    """A way from one node to another, as the first has measured it."""

    seconds: float
    """For a message without content; infinite where there is no way."""
    bytes_per_second: float
    """Infinite where it was not measured: content then takes no time of its own."""


Ways = Mapping[str, Mapping[str, Way]]
"""What each node has measured to each other, by their ids."""


def way(link: node_pb2.Link) -> Way:
    """What a link says."""
    if not link.reachable:
        return Way(float("inf"), float("inf"))
    latency = link.latency.seconds + link.latency.nanos / 1e9 if link.HasField("latency") else HOP_SECONDS
    return Way(latency, float(link.bandwidth_bytes_per_second or "inf"))


@dataclass(frozen=True, eq=False)
class Hops:
    """Seconds from each node of a list to each other of it; infinite where there is no way."""

    onward: Seconds
    """For the activations of a token, and for its share of the prompt's where prompts are counted."""
    back: Seconds
    """For the sampled token, from the last rank to the first."""

    @property
    def open(self) -> bool:
        """Every node reaches every other."""
        return bool(np.isfinite(self.onward).sum() == self.onward.size - len(self.onward))

    @property
    def even(self) -> bool:
        """Every way there is costs the same."""
        ways = self.onward[np.isfinite(self.onward)]
        return not ways.size or bool(ways.max() == ways.min())

    def among(self, members: Sequence[int]) -> Hops:
        """The same for some of the nodes, in the order given."""
        rows = np.ix_(members, members)
        return Hops(self.onward[rows], self.back[rows])


def hops(node_ids: Sequence[str], ways: Ways, *, token_bytes: float, prompt_bytes: float) -> Hops:
    """The hops among these nodes: `token_bytes` go onward for each token, and `prompt_bytes` of the prompt's."""
    onward = np.full((len(node_ids), len(node_ids)), HOP_SECONDS)
    back = onward.copy()
    places = {node_id: place for place, node_id in enumerate(node_ids)}
    measured = [
        (place, places[receiver], *found)
        for place, found_from in ((place, ways[sender]) for sender, place in places.items() if sender in ways)
        for receiver, found in found_from.items()
        if receiver in places
    ]
    if measured:
        senders, receivers, seconds, speeds = zip(*measured, strict=True)
        back[senders, receivers] = seconds
        onward[senders, receivers] = np.array(seconds) + (token_bytes + prompt_bytes) / np.array(speeds)
    np.fill_diagonal(onward, np.inf)
    np.fill_diagonal(back, np.inf)
    return Hops(onward, back)
