"""From a model whose weights have not been read to what runs it: programs first, then the memory plan, then weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.engine import memory
from jaxinfer.engine.buckets import plan_buckets
from jaxinfer.engine.load import LoadedModel, ModelSource
from jaxinfer.engine.program_store import open_store
from jaxinfer.engine.programs import Compiler
from jaxinfer.engine.runner import ModelRunner
from jaxinfer.engine.sampler import Sampler
from jaxinfer.phases import phase
from jaxinfer.sampling.processors import LogitsProcessor

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled:
    """A runner and a sampler ready to run, the plan that they keep, and the configuration with the plan's numbers."""

    config: EngineConfig
    plan: memory.MemoryPlan
    runner: ModelRunner
    sampler: Sampler
    compiler: Compiler


def assemble(model: ModelSource, config: EngineConfig, processors: Sequence[LogitsProcessor]) -> Assembled:
    """Plan the memory, then read the weights and make the cache and the sampler's state.

    Raises:
        MemoryPlanError: it does not fit; no weight has been read.
    """
    compiler = Compiler(open_store(config.compilation_cache))
    builder = _Builder(model, processors, compiler)
    free_bytes = memory.device_memory(config.cache.gpu_memory_utilization)
    on_cpu = jax.default_backend() == "cpu"
    plan, config = memory.plan_memory(
        config,
        model.weights_bytes,
        builder.measure,
        available_bytes=None if free_bytes is None else free_bytes + model.held_bytes,
        cache_cap_bytes=memory.CPU_POOL_BYTES if on_cpu or free_bytes is None else None,
    )
    _LOG.info("memory plan\n%s", plan)
    with phase("weights"):
        params = model.read()
    builder.runner.allocate(params)
    builder.sampler.restore_state()
    return Assembled(config, plan, builder.runner, builder.sampler, compiler)


def rows_keep_their_bits() -> bool:
    """Whether a row has the same bits in steps of every shape, as XLA's products on CPUs give them.

    Elsewhere a library may sum in another order for another shape, so that only steps of one shape are alike.
    """
    return jax.default_backend() == "cpu"


class _Builder:
    """Builds a runner and a sampler for a configuration and asks their largest programs what they need."""

    runner: ModelRunner
    sampler: Sampler

    def __init__(self, model: ModelSource, processors: Sequence[LogitsProcessor], compiler: Compiler):
        self._compiler = compiler
        self._model = LoadedModel(model.config, model.graphdef, model.shapes)
        self._processors = processors

    def measure(self, config: EngineConfig) -> memory.Footprint:
        """The footprint of the catch-all bucket's step and sampling, and of scoring; they are compiled and kept."""
        self.runner, self.sampler = self._make_runner(config), self._make_sampler(config)
        working_bytes, output_bytes = self.runner.memory_bytes()
        sampling_bytes, state_bytes = self.sampler.memory_bytes(self.runner.buckets[0].num_rows)
        # One program runs at a time. A step's outputs can be read while the next step makes its own.
        return memory.Footprint(max(working_bytes, sampling_bytes) + 2 * output_bytes, state_bytes)

    def _make_runner(self, config: EngineConfig) -> ModelRunner:
        limits, cache = config.scheduler, config.cache
        assert cache.num_pages is not None
        buckets = plan_buckets(
            limits.max_num_batched_tokens, limits.max_num_seqs, single_row=not config.batch_invariant
        )
        return ModelRunner(
            self._model,
            buckets[:1] if config.batch_invariant and not rows_keep_their_bits() else buckets,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            table_width=-(-limits.max_model_len // cache.page_size),
            kv_dtype=config.kv_dtype,
            num_lanes=limits.max_num_seqs,
            compiler=self._compiler,
        )

    def _make_sampler(self, config: EngineConfig) -> Sampler:
        return Sampler(
            config.model.vocab_size,
            config.scheduler.max_num_seqs,
            seed=config.seed,
            processors=self._processors,
            compiler=self._compiler,
        )
