"""One shard from its assignment to its end: verified, connected, loaded, running."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Final

import structlog

from services.clock import Clock
from services.model_folder import ModelFolderError, verify
from services.rpc import RpcError
from services.runner.shard.architecture import Cut, UnsupportedModelError
from services.runner.shard.engine import Engine
from services.runner.shard.generation import Generations
from services.runner.shard.life import Life
from services.runner.shard.links import LinkError
from services.runner.shard.pipeline import Pipeline
from services.runner.shard.shard_model import ModelLoadError, WeightForm
from services.runner.shard.text import Text, TextError
from services.runner.shard.warm_up import SeamError, warm_up
from ullage.v1 import dispatch_service_pb2, model_pb2

_EXPECTED: Final = (ModelFolderError, UnsupportedModelError, ModelLoadError, TextError, SeamError)

log = structlog.get_logger()


class Shard:
    """What this process is for. Belongs to the event loop."""

    def __init__(self, life: Life, engine: Engine, form: WeightForm, clock: Clock) -> None:
        self.life = life
        self.assignment: dispatch_service_pb2.Assignment | None = None
        self._engine = engine
        self._form = form
        self._clock = clock
        self._pipeline: Pipeline | None = None
        self._generations: Generations | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, assignment: dispatch_service_pb2.Assignment, folder: Path) -> None:
        """Set out to run the shard `assignment` names, of the model in `folder`. `life` tells how it goes."""
        self.assignment = assignment
        self.life.placed_on(assignment.shard.node_id)
        self._pipeline = Pipeline(assignment, self._engine, self.life, self._clock)
        self._task = asyncio.create_task(self._rise(assignment, folder, self._pipeline))

    def pipeline(self) -> Pipeline:
        """The ring. Only once there is an assignment."""
        assert self._pipeline is not None  # noqa: S101 - callers ask for the assignment first
        return self._pipeline

    def generations(self) -> Generations:
        """The answers. Only on the first rank, once it runs."""
        assert self._generations is not None  # noqa: S101 - callers ask whether it runs first
        return self._generations

    async def stop(self) -> None:
        """Leave the ring. What is in memory goes with the process."""
        if self._task is not None:
            self._task.cancel()
        if self._pipeline is not None:
            await self._pipeline.stop()

    async def _rise(self, assignment: dispatch_service_pb2.Assignment, folder: Path, pipeline: Pipeline) -> None:
        try:
            await self._reach_running(assignment, folder, pipeline)
        except LinkError as error:
            self.life.fail(str(error), blamed_rank=error.blamed_rank)
        except (*_EXPECTED, RpcError) as error:
            self.life.fail(str(error))
        except Exception as error:
            log.error("the shard does not start", exc_info=error)
            self.life.fail(f"{type(error).__name__}: {error}")

    async def _reach_running(
        self, assignment: dispatch_service_pb2.Assignment, folder: Path, pipeline: Pipeline
    ) -> None:
        self.life.advance(model_pb2.SHARD_PHASE_CONNECTING)
        # First, so that a wrong folder is known at once, and not after the neighbours were waited for.
        await asyncio.to_thread(verify, folder, assignment.model)
        await pipeline.connect()
        self.life.advance(model_pb2.SHARD_PHASE_LOADING)
        pipeline.start()
        started_at = self._clock.monotonic()
        if assignment.rank == 0:
            text = await asyncio.to_thread(Text.read, folder)
            self._generations = Generations(assignment, pipeline, text, self.life, self._clock)
        cut = Cut(assignment.shard.first_layer, assignment.shard.end_layer, len(assignment.model.layers))
        await self._engine.load(
            folder,
            cut,
            self._form,
            self.life.progress,
            hidden_size=assignment.model.hidden_size,
            context_tokens=assignment.context_tokens,
        )
        self.life.wait_for_ranks()
        await pipeline.loaded()
        if assignment.rank == 0:
            await warm_up(pipeline, assignment)
        # What is there now stays; looking it through for garbage takes 20 ms, in the middle of somebody's token.
        gc.collect()
        gc.freeze()
        self.life.advance(model_pb2.SHARD_PHASE_RUNNING)
        seconds = round(self._clock.monotonic() - started_at, 3)
        log.info("running", first_layer=cut.first_layer, end_layer=cut.end_layer, load_seconds=seconds)
