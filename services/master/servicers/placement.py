"""How clients put models on nodes and take them off."""

from __future__ import annotations

from services.master.cluster import Cluster
from ullage.v1 import placement_service_pb2_grpc


class PlacementServicer(placement_service_pb2_grpc.PlacementServiceServicer):
    """PlacementService over the one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
