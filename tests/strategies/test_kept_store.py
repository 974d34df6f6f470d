"""Which files a process leaves behind at its end."""

import pytest

from megatron_moevement.runtime.slots.identity import StoreIdentity
from megatron_moevement.runtime.slots.store import JournalShape
from megatron_moevement.strategies.kept_store import KeptStore

SHAPE = JournalShape(retained_steps=6, entry_bytes=100, last_step=20)


@pytest.mark.parametrize(
    ("ending", "is_left"),
    [((), True), (("finish",), False), (("finish", "keep"), True), (("finish", "stay"), True)],
)
def test_the_files_of_a_process_that_stops_after_all_stay(tmp_path, ending, is_left):
    kept = KeptStore()
    store = kept.open(tmp_path, StoreIdentity("run", "0123"), 0, None)
    store.journal(SHAPE)
    for step in ending:
        getattr(kept, step)()
    kept.close()
    assert store.folder.exists() == is_left
