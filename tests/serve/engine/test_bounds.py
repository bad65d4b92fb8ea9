"""A prefill's settings reach the bounds of its node."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.config.settings import Settings
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.launch.parts import Parts
from kvflow.serve.launch.services import bind_control, prefill_node


async def test_a_prefills_settings_bound_its_node(llama: LoadedModel) -> None:
    settings = Settings(
        disaggregation_transfer_backend="local",
        max_decodes=5000,
        decodes_per_address=3000,
        max_pinned_share=0.25,
    )
    async with AsyncExitStack() as stack:
        layout = build_layout([("kv", "uint8", (8,))], page_size=4, num_pages=4)
        parts = Parts(llama, PagedPool.allocate(layout), Threads("model"))
        stack.callback(parts.pool.close)
        stack.callback(parts.executor.close)
        control = bind_control(settings)
        stack.callback(control[0].close)
        node = await prefill_node(parts, settings, control, stack)
        bounds = node.bounds
        assert (bounds.targets, bounds.decodes_per_address) == (5000, 3000)
        assert bounds.pinned_share == 0.25
