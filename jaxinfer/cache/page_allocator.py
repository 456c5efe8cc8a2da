"""Which pages are free. Host only."""

from __future__ import annotations


class PageAllocator:
    """Hands out pages 1 … num_pages - 1; page 0 is the null page and is never handed out."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages} must be at least 2: the null page and one more")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """A free page. Raises `IndexError` where there is none."""
        page = self._free.pop()
        self._used.add(page)
        return page

    def free(self, pages: list[int]) -> None:
        """Give pages back. Raises `ValueError` for a page that is not in use."""
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is freed and is not in use")
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless each page but the null page is either free or used, once."""
        assert len(self._free) == len(set(self._free))
        assert not self._used & set(self._free)
        assert self._used | set(self._free) == set(range(1, self.num_pages))
