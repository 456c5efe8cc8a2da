"""Pages are handed out once, and only what was handed out comes back."""

from __future__ import annotations

import pytest

from jaxinfer.cache.page_allocator import PageAllocator


def test_the_allocator_refuses_what_it_did_not_give():
    allocator = PageAllocator(4)
    pages = {allocator.allocate() for _ in range(3)}
    assert pages == {1, 2, 3} and allocator.num_free == 0
    with pytest.raises(IndexError):
        allocator.allocate()
    allocator.free([2])
    with pytest.raises(ValueError, match="not in use"):
        allocator.free([2])
    allocator.check_integrity()
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1)
