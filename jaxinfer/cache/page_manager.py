"""The pages of running sequences: found in the prefix tree, copied, allocated as they are needed, given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.cache.page_allocator import PageAllocator
from jaxinfer.cache.prefix_tree import Node, PrefixTree
from jaxinfer.request import SequenceState


class PageManager:
    """Keeps `SequenceState.pages`, and `num_computed` where the tree has what a sequence needs.

    The leading pages of a sequence are nodes of the tree, which it holds; the pages after them are its own. Only the
    filler of a node writes to its page, or, past the tokens of a last node that ends inside its page, the sequence that
    inserted it.

    Args:
        window: positions that every layer sees, 0 for all of them; pages behind it are given back.
        max_chunk: most tokens of a step, which a sequence needs pages for beside its window.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, *, share: bool = True, window: int = 0, max_chunk: int = 0
    ):
        self.allocator = allocator
        self.page_size = page_size
        self.share = share
        self.tree = PrefixTree(allocator, page_size, window)
        self.num_looked_up_tokens = 0
        self.num_cached_tokens = 0
        self._most = -(-(window + max_chunk) // page_size) + 1 if window else allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that are free, or would be at once."""
        return self.allocator.num_free + self.tree.num_evictable

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at most at one time."""
        return min(-(-num_tokens // self.page_size), self._most)

    def outstanding(self, sequence: SequenceState) -> int:
        """Pages that the known tokens of an admitted sequence will still take from the free ones."""
        count, first = 0, len(sequence.pages)
        for node in sequence.nodes[first:]:
            count += not node.page and node.filler is sequence
        count += max(0, -(-sequence.num_tokens // self.page_size) - max(first, len(sequence.nodes)))
        return min(count, self._most)

    def reserved(self, sequence: SequenceState) -> int:
        """Pages that an admitted sequence takes for its known tokens and, if it goes on that far, for the next page."""
        grows = self.pages_needed(sequence.max_total_tokens) > self.pages_needed(sequence.num_tokens)
        return self.outstanding(sequence) + grows

    def admission_cost(self, sequence: SequenceState) -> int:
        """Available pages that `admit` and then computing the sequence would take."""
        needed = self.pages_needed(sequence.num_tokens)
        if not self.share:
            return needed
        found = self.tree.match(sequence.known_ids, sequence.num_tokens - 1, _salt(sequence))
        held = sum(1 for node in found.nodes if node.num_refs or not node.page)
        return max(0, needed - held)

    def cached_tokens(self, sequence: SequenceState) -> int:
        """Leading tokens of a waiting sequence that could be skipped now."""
        if not self.share or sequence.reads_prompt:
            return 0
        return self.tree.match_length(sequence.known_ids, sequence.num_tokens - 1, _salt(sequence))

    def admit(self, sequence: SequenceState) -> None:
        """Hold what the tree has of a sequence, and enter what it will compute."""
        self.num_looked_up_tokens += sequence.num_tokens
        if not self.share:
            return
        tree, size, salt = self.tree, self.page_size, _salt(sequence)
        tokens = sequence.known_ids
        found = tree.match(tokens, len(tokens) - 1, salt)
        nodes, source = found.nodes, found.source
        if sequence.reads_prompt:  # shares pages and computes them again, to the same bits
            nodes, source = [] if any(node.freed for node in nodes) else nodes, None
        first = 0 if sequence.reads_prompt else tree.first_page_needed(nodes)
        for node in nodes[first:]:
            tree.acquire(node)
        sequence.nodes = list(nodes)
        sequence.num_dropped = first
        sequence.pages = [0] * first
        if source is not None:
            chunk = tuple(tokens[len(nodes) * size : (len(nodes) + 1) * size])
            if tree.take_over(source, chunk):
                source.filler = sequence
                sequence.nodes.append(source)
            else:
                tree.acquire(source)
                sequence.copy_from = source, found.num_copied, len(nodes)
        self._enter(sequence, tokens)
        if first:
            self._skip(sequence, first * size)

    def _enter(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Put the rest of the known tokens into the tree, to be computed by this sequence."""
        size = self.page_size
        for start in range(len(sequence.nodes) * size, len(tokens), size):
            parent = sequence.nodes[-1] if sequence.nodes else None
            node = self.tree.insert(parent, tuple(tokens[start : start + size]), _salt(sequence), 0, 0)
            if node is None:
                break
            node.filler = sequence
            sequence.nodes.append(node)

    def _skip(self, sequence: SequenceState, position: int) -> None:
        moved = position - sequence.num_computed
        sequence.num_computed = position
        self.num_cached_tokens += moved
        if not sequence.num_preemptions:
            sequence.num_cached_tokens += moved

    def advance(self, sequence: SequenceState, step: int) -> tuple[int, int] | None:
        """Move past tokens that others have computed, all but the last; the copy `(from, to)` that this takes, if any.

        Copies run before the step, so one is made only of what earlier steps computed.
        """
        self._drop_behind_window(sequence)
        if sequence.reads_prompt:
            return None
        size, last = self.page_size, sequence.num_tokens - 1
        while (index := sequence.num_computed // size) < len(sequence.nodes):
            node = sequence.nodes[index]
            position = min(index * size + node.num_ready, last)
            if position <= sequence.num_computed:
                break
            if index == len(sequence.pages):
                sequence.pages.append(node.page)
            self._skip(sequence, position)
        if sequence.copy_from is not None and sequence.num_computed > sequence.copy_from[2] * size:
            self._drop_copy(sequence)  # another has computed that page meanwhile
        return self._copy(sequence, step) if self._at_copy(sequence) else None

    def _at_copy(self, sequence: SequenceState) -> bool:
        """Whether the sequence has come to the page that it wants to copy."""
        return sequence.copy_from is not None and sequence.num_computed == sequence.copy_from[2] * self.page_size

    def _copy(self, sequence: SequenceState, step: int) -> tuple[int, int] | None:
        assert sequence.copy_from is not None
        source, count, index = sequence.copy_from
        if source.num_ready >= count and source.filled_step >= step:
            return None
        if source.num_ready < count and _is_left_to(source, sequence):
            return None
        pair = None
        # Where who computed the source has left, or no page is to be had, the sequence computes these tokens itself.
        if source.num_ready >= count and self.allocate(sequence, sequence.num_computed + 1):
            pair = source.page, sequence.pages[index]
            self._skip(sequence, sequence.num_computed + count)
            if index < len(sequence.nodes):
                target = sequence.nodes[index]
                target.num_ready, target.filled_step = min(count, len(target.tokens)), step
        self._drop_copy(sequence)
        return pair

    def _drop_copy(self, sequence: SequenceState) -> None:
        if sequence.copy_from is not None:
            self.tree.release(sequence.copy_from[0], sequence)
            sequence.copy_from = None

    def runnable(self, sequence: SequenceState, count: int) -> int:
        """How many of the next `count` tokens the sequence is to compute now: not those that another one fills."""
        if sequence.reads_prompt:
            return count
        start, size = sequence.num_computed, self.page_size
        if sequence.copy_from is not None:  # that page is copied once it can be
            count = min(count, sequence.copy_from[2] * size - start)
        for index in range(start // size, min(len(sequence.nodes), -(-(start + count) // size))):
            node, begin = sequence.nodes[index], max(start, index * size)
            if begin - index * size >= len(node.tokens):
                break  # past what is shared
            # The last token is computed even where another has done so, to the same bits: its logits are wanted.
            is_last = begin == sequence.num_tokens - 1
            if not is_last and (_is_left_to(node, sequence) or node.num_ready > begin - index * size):
                return begin - start
            node.filler = sequence
        return count

    def allocate(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Give a sequence pages for its first `num_tokens`; False, with some of them, where none is available."""
        while len(sequence.pages) * self.page_size < num_tokens:
            index = len(sequence.pages)
            node: Node | None = sequence.nodes[index] if index < len(sequence.nodes) else None
            if node is None or not node.page:
                if not self.allocator.num_free and not self.tree.evict(1):
                    return False
                page = self.allocator.allocate()
                if node is not None:
                    node.page = page
            else:
                page = node.page
            sequence.pages.append(page)
        return True

    def computed(self, sequence: SequenceState, count: int, step: int) -> None:
        """The next step computes `count` more tokens of a sequence."""
        size, start = self.page_size, sequence.num_computed
        sequence.num_computed += count
        for index in range(start // size, min(len(sequence.nodes), -(-sequence.num_computed // size))):
            node = sequence.nodes[index]
            ready = min(len(node.tokens), sequence.num_computed - index * size)
            if ready > node.num_ready:
                node.num_ready, node.filled_step = ready, step
            if node.ready and node.filler is sequence:
                node.filler = None

    def learn(self, sequence: SequenceState) -> None:
        """Enter the full pages whose tokens the host knows."""
        while self.share:
            nodes, size = sequence.nodes, self.page_size
            index = len(nodes) - bool(nodes and len(nodes[-1].tokens) < size)
            if (index + 1) * size > min(sequence.num_known, sequence.num_computed) or index < sequence.num_dropped:
                return
            if not self._adopt(sequence, index, tuple(sequence.tokens(index * size, (index + 1) * size))):
                return

    def _adopt(self, sequence: SequenceState, index: int, tokens: tuple[int, ...]) -> bool:
        """Have page `index` in the tree: the sequence's own, or the one that is there already in its place."""
        nodes, salt = sequence.nodes, _salt(sequence)
        own = nodes[index] if index < len(nodes) else None
        parent = nodes[index - 1] if index else None
        if index < sequence.num_dropped or (parent is not None and not self.tree.holds(parent)):
            return False
        other = self.tree.child(parent, tokens, salt)
        if other is None:
            if own is not None:
                return self.tree.extend(own, tokens)
            node = self.tree.insert(parent, tokens, salt, sequence.pages[index], len(tokens))
            assert node is not None
            nodes.append(node)
            return True
        if not other.ready or not other.page:
            return False
        self.tree.acquire(other)
        if own is not None:
            nodes[index] = other
            self.tree.release(own, sequence)
        else:
            nodes.append(other)
            self.allocator.free([sequence.pages[index]])
        sequence.pages[index] = other.page
        return True

    def release(self, sequence: SequenceState) -> None:
        """Take everything from a sequence; what it computed stays in the tree until its pages are needed."""
        self._drop_copy(sequence)
        self.learn(sequence)
        self._learn_tail(sequence)
        own = sequence.pages[max(len(sequence.nodes), sequence.num_dropped) :]
        for node in reversed(sequence.nodes[sequence.num_dropped :]):
            self.tree.release(node, sequence)
        self.allocator.free(own)
        sequence.pages, sequence.nodes, sequence.num_dropped, sequence.num_computed = [], [], 0, 0

    def _learn_tail(self, sequence: SequenceState) -> None:
        """Enter the last page, which is not full."""
        nodes, size = sequence.nodes, self.page_size
        known = min(sequence.num_known, sequence.num_computed)
        index = known // size
        tokens = tuple(sequence.tokens(index * size, known))
        if not self.share or not tokens or index < sequence.num_dropped:
            return
        if index == len(nodes) - 1 and nodes[-1].ready and len(tokens) > len(nodes[-1].tokens):
            self.tree.extend(nodes[-1], tokens)
        elif index == len(nodes) and (not nodes or (len(nodes[-1].tokens) == size and self.tree.holds(nodes[-1]))):
            parent = nodes[-1] if nodes else None
            node = self.tree.insert(parent, tokens, _salt(sequence), sequence.pages[index], len(tokens))
            if node is not None:
                nodes.append(node)

    def _drop_behind_window(self, sequence: SequenceState) -> None:
        """Give back the pages that no layer sees any more."""
        first = min(self.tree.first_page_seen(sequence.num_computed), len(sequence.pages))
        for index in range(sequence.num_dropped, first):
            if index < len(sequence.nodes):
                self.tree.release(sequence.nodes[index], sequence)
            else:
                self.allocator.free([sequence.pages[index]])
            sequence.pages[index] = 0
        sequence.num_dropped = max(sequence.num_dropped, first)

    def forget(self) -> None:
        """Empty the prefix cache, while no sequence holds a page."""
        self.tree.clear()

    def check_integrity(self, running: list[SequenceState]) -> None:
        """Raise `AssertionError` unless every page is free, a node's, or one running sequence's own."""
        self.allocator.check_integrity()
        self.tree.check_integrity()
        nodes = list(self.tree.nodes())
        held: dict[Node, int] = {}
        own: list[int] = []
        for sequence in running:
            for index, node in enumerate(sequence.nodes):
                if index < sequence.num_dropped:
                    continue
                held[node] = held.get(node, 0) + 1
                assert index >= len(sequence.pages) or sequence.pages[index] == node.page != 0
            own += sequence.pages[max(len(sequence.nodes), sequence.num_dropped) :]
            assert sequence.num_computed <= len(sequence.pages) * self.page_size
            if sequence.copy_from is not None:
                held[sequence.copy_from[0]] = held.get(sequence.copy_from[0], 0) + 1
        assert all(node.num_refs == held.pop(node, 0) for node in nodes) and not held
        shared = [node.page for node in nodes if node.page]
        assert len(own) == len(set(own)) and 0 not in own and not set(own) & set(shared)
        assert len(own) + len(shared) == self.allocator.num_used, "a page leaked"


def _is_left_to(node: Node, sequence: SequenceState) -> bool:
    """Whether another sequence computes the node's page, one that need not wait for those of `sequence`'s priority."""
    filler: Any = node.filler
    return filler is not None and filler is not sequence and filler.priority <= sequence.priority


def _salt(sequence: SequenceState) -> str:
    return sequence.options.cache_salt
