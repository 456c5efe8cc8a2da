"""Which pages hold which tokens, so that requests share them: a radix tree with one page a node. Host only.

    root(salt) ── page of tokens 0 … 15 ── page of tokens 16 … 31 ── leaf that ends inside its page
                                       └── another continuation

A full page is shared as it is; of a page that is not full, or that a sequence shares in part, the sequence takes a
copy. A page whose tokens are still to be computed is in the tree too: `filler` is the sequence that computes it, and
others that begin alike wait for it rather than compute the same. The idea is that of RadixAttention (Zheng et al. 2024,
"SGLang: Efficient Execution of Structured Language Model Programs").
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxinfer.cache.page_allocator import PageAllocator


@dataclass(eq=False)
class Node:
    """One page of the tree. `page` is 0 while none is allocated, and again once a page behind the window was freed."""

    tokens: tuple[int, ...]  # fewer than a page's in a leaf that ends inside its page
    parent: Node | None
    page: int = 0
    num_ready: int = 0  # leading tokens whose keys and values are in the page, or will be when the next step has run
    filled_step: int = -1  # the step that computes the last of them
    num_refs: int = 0
    filler: object | None = None
    last_used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    keys: list[tuple[int, ...]] = field(default_factory=list)  # of the children, sorted: neighbours share most
    salt: str = ""  # of a root

    @property
    def ready(self) -> bool:
        return self.num_ready == len(self.tokens)

    @property
    def freed(self) -> bool:
        """Whether the page was computed, and freed behind the window."""
        return bool(self.num_ready) and not self.page


@dataclass(frozen=True)
class Match:
    """What the tree has of a prompt: whole pages in order, then `num_copied` leading tokens of the page of `source`."""

    nodes: list[Node]
    source: Node | None = None
    num_copied: int = 0


class PrefixTree:
    """Maps token prefixes to pages. A node with references is never evicted; the others go least recently used first.

    `window` is the number of positions that every layer sees, 0 for all: pages wholly behind it may be freed.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, window: int = 0):
        self.allocator = allocator
        self.page_size = page_size
        self.window = window
        self._roots: dict[str, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # unreferenced leaves by last use; entries may be stale
        self._order = itertools.count()
        self._clock = 0
        self.num_evictable = 0

    def first_page_seen(self, num_tokens: int) -> int:
        """Index of the first page that the query at position `num_tokens` sees."""
        return max(0, num_tokens - self.window + 1) // self.page_size if self.window else 0

    def first_page_needed(self, nodes: Sequence[Node]) -> int:
        """Index of the first page that a sequence needs which begins like `nodes`: it goes on after the ready ones.

        Those after them may have to be computed by itself, should who fills them leave.
        """
        num_ready = next((index for index, node in enumerate(nodes) if not node.ready), len(nodes))
        return self.first_page_seen(num_ready * self.page_size)

    # Reading.

    def match(self, tokens: Sequence[int], limit: int, salt: str = "") -> Match:
        """The pages that hold, or will hold, the first at most `limit` of `tokens`."""
        size, nodes = self.page_size, []
        parent = self._roots.get(salt)
        if parent is None:
            return Match([])
        for start in range(0, limit - limit % size, size):
            node = parent.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            nodes.append(node)
            parent = node
        while any(node.freed for node in nodes[self.first_page_needed(nodes) :]):
            nodes.pop()
            parent = nodes[-1] if nodes else self._roots[salt]
        start = len(nodes) * size
        source, common = _closest(parent, tuple(tokens[start : min(start + size, limit)]))
        if source is None or source.freed:
            return Match(nodes)
        goes_on = not source.num_refs and common == len(source.tokens) < size
        if common < size // 4 and start + common < limit and not goes_on:  # computing these costs less than a copy
            return Match(nodes)
        return Match(nodes, source, common)

    def match_length(self, tokens: Sequence[int], limit: int, salt: str = "") -> int:
        """Tokens of `match` that are in their pages already."""
        found, length = self.match(tokens, limit, salt), 0
        for node in found.nodes:
            length += node.num_ready
            if not node.ready:
                return length
        return length + (min(found.num_copied, found.source.num_ready) if found.source else 0)

    # Holding.

    def acquire(self, node: Node) -> None:
        if not node.num_refs and node.page:
            self.num_evictable -= 1
        node.num_refs += 1

    def release(self, node: Node, holder: object) -> None:
        """Let go of a node, children before parents. What nobody holds and nobody will fill is cut off."""
        node.num_refs -= 1
        if node.filler is holder:
            node.filler = None
        if node.num_refs:
            return
        self._clock += 1
        node.last_used = self._clock
        if node.page:
            self.num_evictable += 1
        if not node.ready:
            self._truncate(node)
        elif self._is_redundant(node):
            self._remove(node)
        else:
            self._offer(node)

    def _truncate(self, node: Node) -> None:
        """Keep of an unreferenced node what has been computed."""
        assert node.parent is not None and not node.children, "a page is released before what continues it"
        tokens = node.tokens[: node.num_ready]
        if not tokens or _covered(node.parent, tokens, but=node):
            self._remove(node)
        else:
            self._rename(node, tokens)
            self._offer(node)

    # Growing.

    def insert(self, parent: Node | None, tokens: tuple[int, ...], salt: str, page: int, num_ready: int) -> Node | None:
        """A new node, held once; None where a longer page of the same beginning is there already."""
        if parent is None:
            parent = self._roots.setdefault(salt, Node((), None, salt=salt))
        if _covered(parent, tokens):
            return None
        self._clock += 1
        node = Node(tokens, parent, page, num_ready, num_refs=1, last_used=self._clock)
        self._attach(node)
        return node

    def child(self, parent: Node | None, tokens: tuple[int, ...], salt: str) -> Node | None:
        """The node of exactly these tokens."""
        parent = parent or self._roots.get(salt)
        return parent.children.get(tokens) if parent else None

    def extend(self, node: Node, tokens: tuple[int, ...]) -> bool:
        """Let a node that ends inside its page hold more, all computed; False where a sibling has them already."""
        assert node.parent is not None
        if _covered(node.parent, tokens, but=node):
            return False
        self._rename(node, tokens)
        node.num_ready = len(tokens)
        return True

    def take_over(self, node: Node, tokens: tuple[int, ...]) -> bool:
        """Acquire an unheld leaf that ends inside its page, and let it become `tokens`, which begin with its own.

        Spares a copy where a conversation goes on. False, and nothing changed, where others need the leaf as it is.
        """
        assert node.parent is not None
        own = len(node.tokens)
        if node.num_refs or own == self.page_size or tokens[:own] != node.tokens or own == len(tokens):
            return False
        if _covered(node.parent, tokens, but=node):
            return False
        self.acquire(node)
        self._rename(node, tokens)
        return True

    def holds(self, node: Node) -> bool:
        """Whether a node is in the tree still."""
        return node.parent is not None and node.parent.children.get(node.tokens) is node

    # Shrinking.

    def evict(self, count: int) -> int:
        """Free up to `count` pages; returns how many. Leaves go first, then pages behind the window of every layer."""
        freed = 0
        while freed < count and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if self._is_leaf(node) and node.last_used == last_used:
                self._remove(node)
                freed += 1
        if freed < count and self.window:
            idle = [node for node in self.nodes() if node.page and not node.num_refs]
            for node in sorted(idle, key=lambda node: node.last_used)[: count - freed]:
                self.allocator.free([node.page])
                node.page = 0
                self.num_evictable -= 1
                freed += 1
        return freed

    def clear(self) -> None:
        """Forget every page. Raises `AssertionError` while one is held."""
        nodes = list(self.nodes())
        assert not any(node.num_refs for node in nodes)
        self.allocator.free([node.page for node in nodes if node.page])
        self._roots, self._heap, self.num_evictable = {}, [], 0

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless links, keys, pages and counts agree."""
        pages = [node.page for node in self.nodes() if node.page]
        assert len(pages) == len(set(pages)), "two nodes have one page"
        assert self.num_evictable == sum(1 for node in self.nodes() if node.page and not node.num_refs)
        for root in self._roots.values():
            assert root.children, "a root without pages"
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and parent.children.get(node.tokens) is node
            assert node.keys == sorted(node.children)
            assert 0 < len(node.tokens) <= self.page_size and 0 <= node.num_ready <= len(node.tokens)
            assert len(node.tokens) == self.page_size or not node.children
            if not node.num_refs:
                assert node.filler is None and (node.ready or self.window)
                assert self.window or not any(child.num_refs for child in node.children.values())

    def _is_leaf(self, node: Node) -> bool:
        return self.holds(node) and not node.children and not node.num_refs and node.page != 0

    def _is_redundant(self, node: Node) -> bool:
        assert node.parent is not None
        return not node.children and _covered(node.parent, node.tokens, but=node)

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._heap, (node.last_used, next(self._order), node))
        if len(self._heap) > 2 * self.num_evictable + 64:  # most entries are stale
            leaves = [each for each in self.nodes() if self._is_leaf(each)]
            self._heap = [(each.last_used, next(self._order), each) for each in leaves]
            heapq.heapify(self._heap)

    def _attach(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[node.tokens] = node
        insort(node.parent.keys, node.tokens)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        del parent.keys[bisect_left(parent.keys, node.tokens)]

    def _rename(self, node: Node, tokens: tuple[int, ...]) -> None:
        self._detach(node)
        node.tokens = tokens
        self._attach(node)

    def _remove(self, node: Node) -> None:
        """Take an unreferenced node without children out, and with it ancestors that hold nothing."""
        parent = node.parent
        assert parent is not None
        self._detach(node)
        if node.page:
            self.allocator.free([node.page])
            self.num_evictable -= 1
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.salt]
        elif not parent.num_refs:
            if parent.page and parent.ready:
                self._offer(parent)
            else:
                self._remove(parent)


def _closest(parent: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
    """The child that shares most leading tokens, and how many: one of the two neighbours in sorted order."""
    best, most = None, 0
    place = bisect_left(parent.keys, tokens)
    for key in parent.keys[max(0, place - 1) : place + 1]:
        common = next(
            (i for i, (a, b) in enumerate(zip(key, tokens, strict=False)) if a != b), min(len(key), len(tokens))
        )
        if common > most:
            best, most = parent.children[key], common
    return best, most


def _covered(parent: Node, tokens: tuple[int, ...], but: Node | None = None) -> bool:
    """Whether a child other than `but` begins with these tokens."""
    place = bisect_left(parent.keys, tokens)
    near = parent.keys[place : place + 2]
    return any(key[: len(tokens)] == tokens and parent.children[key] is not but for key in near)
