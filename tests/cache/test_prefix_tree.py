"""The prefix tree by itself: what it finds, what it evicts, what happens when who fills a page leaves."""

from __future__ import annotations

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.page_manager import PageManager
from jaxinfer.cache.prefix_tree import PrefixTree
from jaxinfer.request import SamplingParams, SequenceState

SIZE = 4


def tree_of(num_pages: int, chains: list[list[int]], window: int = 0) -> PrefixTree:
    """A tree with these token lists, used in this order and held by nobody."""
    tree = PrefixTree(PageAllocator(num_pages + 1), SIZE, window)
    for tokens in chains:
        found = tree.match(tokens, len(tokens))
        path = list(found.nodes)
        for node in path:
            tree.acquire(node)
        for start in range(len(path) * SIZE, len(tokens), SIZE):
            chunk = tuple(tokens[start : start + SIZE])
            node = tree.insert(path[-1] if path else None, chunk, "", tree.allocator.allocate(), len(chunk))
            assert node is not None
            path.append(node)
        for node in reversed(path):
            tree.release(node, None)
    tree.check_integrity()
    return tree


def test_the_page_that_shares_most_is_found_among_many():
    tree = tree_of(20, [[1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 9, 5], [1, 3, 1, 1], [2, 2, 2]])
    assert (found := tree.match([1, 2, 3, 8, 7], 5)).nodes == [] and found.num_copied == 3
    assert tree.match([1, 3, 1, 2], 4).num_copied == 3
    assert tree.match([2, 2, 2, 2], 4).num_copied == 3
    assert [node.tokens for node in tree.match([1, 2, 3, 9, 5, 6], 6).nodes] == [(1, 2, 3, 9)]
    assert tree.match([7, 7], 2).source is None and tree.match([1, 2], 2, "salt").source is None


def test_the_least_recently_used_leaf_goes_first_and_never_a_page_in_use():
    tree = tree_of(20, [[1] * 8, [2] * 4, [1] * 4 + [3] * 4, [2] * 4])
    (held,) = tree.match([2] * 4, 4).nodes
    assert tree.evict(1) == 1 and not tree.match([1] * 8, 8).nodes[1:]
    tree.acquire(held)
    assert tree.evict(10) == 2 and tree.num_evictable == 0
    tree.release(held, None)
    assert tree.evict(10) == 1 and tree.allocator.num_used == 0
    tree.check_integrity()


def test_a_leaf_that_another_continues_goes_when_it_is_let_go():
    tree = tree_of(20, [[1, 2]])
    (short,) = tree.nodes()
    tree.acquire(short)
    longer = tree.insert(None, (1, 2, 3), "", tree.allocator.allocate(), 3)
    assert longer is not None and tree.insert(None, (1, 2), "", 9, 2) is None
    tree.release(short, None)
    assert [node.tokens for node in tree.nodes()] == [(1, 2, 3)] and tree.allocator.num_used == 1


def test_stale_entries_of_the_eviction_order_are_thrown_away():
    tree = tree_of(20, [[1] * 4] * 500)
    assert len(tree._heap) <= 2 * 1 + 64 and tree.evict(1) == 1


def test_pages_behind_the_window_are_freed_in_the_middle_and_not_matched():
    tree = tree_of(20, [[1] * 16], window=5)
    nodes = list(tree.nodes())
    tree.acquire(nodes[-1])
    assert tree.evict(2) == 2 and [node.freed for node in nodes] == [False, True, True, False]
    # Position 16 sees positions 12 ... 15: what lies before is not needed. Position 12 would see a page that is gone.
    assert [len(tree.match([1] * count + [2], count).nodes) for count in (16, 12, 8, 4)] == [4, 1, 1, 1]
    tree.release(nodes[-1], None)
    tree.check_integrity()


def sequence(tokens: list[int], arrival: int) -> SequenceState:
    return SequenceState(f"r{arrival}", 0, tokens, SamplingParams(max_tokens=1), len(tokens) + 1, arrival)


def test_where_who_fills_a_page_leaves_another_goes_on():
    pages = PageManager(PageAllocator(20), SIZE)
    first, second = sequence([1] * 10, 1), sequence([1] * 10, 2)
    pages.admit(first)
    pages.admit(second)
    assert pages.runnable(first, 10) == 10 and pages.runnable(second, 10) == 0
    assert pages.allocate(first, 6)
    pages.computed(first, 6, step=1)
    assert pages.advance(second, step=1) is None and second.num_computed == 6 and pages.runnable(second, 4) == 0
    pages.release(first)
    pages.advance(second, step=2)
    assert pages.runnable(second, 4) == 2  # up to the page that it wanted to copy
    assert pages.allocate(second, 8)
    pages.computed(second, 2, step=2)
    assert pages.advance(second, step=3) is None and pages.runnable(second, 2) == 2
    assert pages.allocate(second, 10)
    pages.computed(second, 2, step=3)
    pages.check_integrity([second])
    pages.release(second)
    pages.check_integrity([])
    assert pages.num_available == 19


def test_a_page_that_was_given_back_before_it_could_be_shared_stays_out_of_the_tree():
    pages = PageManager(PageAllocator(20), SIZE, window=4, max_chunk=4)
    first, second = sequence([1] * 2, 1), sequence([1] * 8, 2)
    pages.admit(first)
    pages.admit(second)  # is to compute the page that the first one comes to fill as well
    first.output_ids = [1] * 10
    assert pages.allocate(first, 12)
    pages.computed(first, 12, step=1)
    pages.learn(first)
    assert len(first.nodes) == 1 and len(first.nodes[0].tokens) == 2
    pages.advance(first, step=2)
    assert first.num_dropped == 2 and first.pages[:2] == [0, 0]
    pages.release(second)
    pages.learn(first)
    pages.check_integrity([first])
    pages.release(first)
    pages.check_integrity([])
