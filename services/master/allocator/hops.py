"""What it costs to get from one node to the next, and which ways there are.

Rules this module lives by:
- A way that was tried and did not work is no way. One that nobody has tried is taken to be as good as a local
  network: the runners try it before anything is loaded.
- Ways are one-way: each direction counts for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ullage.v1 import node_pb2

HOP_SECONDS: Final = 0.001
"""From one rank to the next where no link was measured: what a hop may cost on a local network."""

Links = Mapping[str, Mapping[str, node_pb2.Link]]
"""What each node has measured to each other, by their ids."""
Seconds = np.ndarray[tuple[int, int], np.dtype[np.float64]]


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


def hops(node_ids: Sequence[str], links: Links, *, token_bytes: float, prompt_bytes: float) -> Hops:
    """The hops among these nodes: `token_bytes` go onward for each token, and `prompt_bytes` of the prompt's."""
    onward = np.full((len(node_ids), len(node_ids)), HOP_SECONDS)
    back = onward.copy()
    places = {node_id: place for place, node_id in enumerate(node_ids)}
    for sender, row in places.items():
        measured = links.get(sender)
        if not measured:
            continue
        near = measured if len(measured) < len(places) else places
        for receiver in near:
            column, link = places.get(receiver), measured.get(receiver)
            if column is not None and link is not None:
                onward[row, column] = _seconds(link, token_bytes + prompt_bytes)
                back[row, column] = _seconds(link, 0.0)
    np.fill_diagonal(onward, np.inf)
    np.fill_diagonal(back, np.inf)
    return Hops(onward, back)


def _seconds(link: node_pb2.Link, sent_bytes: float) -> float:
    """How long `sent_bytes` take over `link`."""
    if not link.reachable:
        return float("inf")
    latency = link.latency.seconds + link.latency.nanos / 1e9 if link.HasField("latency") else HOP_SECONDS
    bandwidth = link.bandwidth_bytes_per_second
    return latency + (sent_bytes / bandwidth if bandwidth else 0.0)
