"""Rows on their way into a record batch of bounded size: what a writer holds before it writes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from memopd_trace.invocation import ITEM_COLUMNS, Invocation, batch_from_invocations, item_counts

TOKENS_PER_BATCH = 4 * 2**20  # 16 MiB of int32 ids: one data page
ITEMS_PER_BATCH = 64 * 2**20  # of any other list, map or text: 128 MiB of int16 expert ids
ROWS_PER_BATCH = 16384


class WaitingRows:
    """Rows that are to be one batch, no larger than memory and Arrow's offsets allow."""

    def __init__(self) -> None:
        self._rows: list[Invocation] = []
        self._tokens = 0
        self._items = np.zeros(len(ITEM_COLUMNS), np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, row: Invocation) -> bool:
        """Add a row; `False` where the batch is too full for it. One by itself always has room."""
        tokens = self._tokens + len(row.prompt_ids) + len(row.output_ids)
        items = self._items + item_counts(row)
        full = len(self._rows) >= ROWS_PER_BATCH or tokens > TOKENS_PER_BATCH or items.max() > ITEMS_PER_BATCH
        if self._rows and full:
            return False
        self._rows.append(row)
        self._tokens, self._items = tokens, items
        return True

    def batch(self) -> pa.RecordBatch:
        """The batch of all that wait, of which none is left."""
        rows, self._rows = self._rows, []
        self._tokens, self._items = 0, np.zeros_like(self._items)
        return batch_from_invocations(rows)
