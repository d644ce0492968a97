"""Whether an instance still runs while one of its answers comes, as the master knows it.

A runner that was stopped, or whose machine is gone, cannot say so itself: its connection only falls silent. The
master is told by the other ranks, and by what it does not hear.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from services.cli.connection import Master
from ullage.v1 import model_pb2, placement_service_pb2

LAST_WORD_SECONDS: Final = 1.0
"""For the runner to tell the failure itself: where it can, it knows more."""

_OVER: Final = frozenset({model_pb2.INSTANCE_STATE_FAILED, model_pb2.INSTANCE_STATE_RELEASED})


class InstanceWatch:
    """Ends a call once its instance is over."""

    def __init__(self, master: Master, instance_id: str, call: Any) -> None:
        self.over: model_pb2.Instance | None = None
        """The instance, once it failed or was released."""
        self._call = call
        request = placement_service_pb2.WatchInstanceRequest(instance_id=instance_id)
        self._changes: Any = master.placements.WatchInstance(request)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="instance watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for change in self._changes:
                if change.instance.state in _OVER:
                    self.over = change.instance
                    break
        except grpc.RpcError:
            # Stopped, or the master is away, and the answer may come all the same.
            return
        if self.over is not None and not self._stopped.wait(LAST_WORD_SECONDS):
            self._call.cancel()

    def stop(self) -> None:
        """Let go of the master."""
        self._stopped.set()
        self._changes.cancel()
        self._thread.join()


@contextmanager
def watched(master: Master, instance_id: str, call: Any) -> Iterator[InstanceWatch]:
    """`call` is ended when the master says that the instance is over; who it was is then in the watch's `over`."""
    watch = InstanceWatch(master, instance_id, call)
    try:
        yield watch
    finally:
        watch.stop()
