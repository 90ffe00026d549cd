"""The key index against a plain sorted list, with random calls on unusual keys; then its costs, counted, not timed.

Small buckets and batches make splits and joins frequent. There is no test with several PYTHONHASHSEEDs: the index uses
no set, and sorts its only dict.
"""

from __future__ import annotations

import random
import tracemalloc
from bisect import insort

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rallypoint.core.index.key_index import LONG_KEY_BYTES, MAX_SPLITS, KeyIndex
from rallypoint.core.limits import MAX_KEY_BYTES

LONG = b"k" * (MAX_KEY_BYTES - 1)
NASTY = [b"", b"\x00", b"a", b"a\x00", b"a/", b"a/b", b"a/b/c", b"a\xff", b"a\xff\xff", b"b", b"\xc3\x28"]
NASTY += [b"\xfe\xff", b"\xff", b"\xff\xff", b"\xff\xff\x00", b"\xff" * MAX_KEY_BYTES]
NASTY += [LONG, LONG + b"\x00", LONG + b"\xff"]
KEYS = st.one_of(
    st.integers(0, len(NASTY) - 1).map(lambda at: NASTY[at]),  # sampled_from would print the long keys
    st.lists(st.sampled_from([b"\x00", b"a", b"/", b"\xfe", b"\xff"]), max_size=5).map(b"".join),
    st.binary(max_size=3),
)
SIZES = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 3), (5, 5), (16, 4), (40, 8)])
"""(bucket_size, batch_size). A batch of at most MAX_SPLITS keys never has to leave a bucket unsplit."""


def check(index: KeyIndex) -> None:
    """Assert the rules in the head of the module, without a query, which would merge the pending keys."""
    buckets, bounds = index.buckets, index.bounds
    ordered = [key for bucket in buckets for key in bucket]
    assert ordered == sorted(set(ordered)) and not set(ordered) & set(index.pending)
    assert len(index) == index.count(b"") == len(ordered) + len(index.pending)
    assert len(index.pending) < index.batch_size
    assert len(bounds) == len(buckets) and bounds[0] == b""
    assert all(buckets) or buckets == [[]]
    for at in range(1, len(buckets)):
        assert buckets[at - 1][-1] < bounds[at] <= buckets[at][0]
        assert max(len(buckets[at - 1]), len(buckets[at])) * 4 >= index.bucket_size


def starting(keys: list[bytes], prefix: bytes) -> list[bytes]:
    return [key for key in keys if key.startswith(prefix)]


class Comparison(RuleBasedStateMachine):
    """The same calls on an index and on a sorted list."""

    @initialize(sizes=SIZES, keys=st.sets(KEYS, max_size=30).map(sorted))
    def build(self, sizes: tuple[int, int], keys: list[bytes]) -> None:
        self.model = keys
        self.index = KeyIndex(reversed(keys), bucket_size=sizes[0], batch_size=sizes[1])

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12))
    def add(self, keys: list[bytes]) -> None:
        for key in keys:
            if key not in self.model:
                insort(self.model, key)
                self.index.add(key)

    @rule(keys=st.sets(KEYS, max_size=60))
    def add_all(self, keys: set[bytes]) -> None:
        new = [key for key in sorted(keys) if key not in self.model]
        self.model = sorted([*self.model, *new])
        self.index.add_all(new[::-1])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), many=st.integers(1, 12))
    def discard(self, data: st.DataObject, many: int) -> None:
        for _ in range(min(many, len(self.model))):
            self.index.discard(self.model.pop(data.draw(st.integers(0, len(self.model) - 1))))

    @rule(prefix=KEYS)
    def discard_prefix_in_slices(self, prefix: bytes) -> None:
        for _ in range(3):
            for key in self.index.first(prefix, 3):
                self.index.discard(key)
                self.model.remove(key)

    @rule(key=KEYS)
    def discard_missing(self, key: bytes) -> None:
        if key not in self.model:
            with pytest.raises(KeyError):
                self.index.discard(key)

    @rule(prefix=KEYS)
    def count(self, prefix: bytes) -> None:
        assert self.index.count(prefix) == len(starting(self.model, prefix))

    @rule(prefix=KEYS)
    def keys(self, prefix: bytes) -> None:
        assert self.index.keys(prefix) == starting(self.model, prefix)

    @rule(prefix=KEYS, limit=st.integers(0, 50))
    def first(self, prefix: bytes, limit: int) -> None:
        assert self.index.first(prefix, limit) == starting(self.model, prefix)[:limit]

    @invariant()
    def intact(self) -> None:
        check(self.index)
        assert len(self.index) == len(self.model)
        assert all(len(bucket) <= self.index.bucket_size for bucket in self.index.buckets)


TestComparison = Comparison.TestCase
TestComparison.settings = settings(max_examples=150, stateful_step_count=40)


@given(st.sets(KEYS, max_size=40), st.lists(KEYS, max_size=8), SIZES)
def test_prefix_queries_equal_a_scan(keys: set[bytes], prefixes: list[bytes], sizes: tuple[int, int]) -> None:
    index = KeyIndex(keys, bucket_size=sizes[0], batch_size=sizes[1])
    for prefix in [*NASTY, *prefixes]:
        expected = starting(sorted(keys), prefix)
        assert (index.count(prefix), index.keys(prefix)) == (len(expected), expected)
        assert all(index.first(prefix, limit) == expected[:limit] for limit in range(len(expected) + 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("bucket_size", "batch_size"), [(16, 3), (64, 8), (200, 200)])
def test_the_index_stays_sound_while_it_grows_and_shrinks(seed: int, bucket_size: int, batch_size: int) -> None:
    rng = random.Random(seed)
    index = KeyIndex(bucket_size=bucket_size, batch_size=batch_size)
    model: list[bytes] = []
    for phase, chance in enumerate([0.9, 0.1, 0.7, 0.5, 0.05]):
        for _ in range(1500):
            key = b"%d/%x" % (rng.randrange(20), rng.getrandbits(16))
            if rng.random() < chance and key not in model:
                insort(model, key)
                index.add(key)
            elif model:
                index.discard(model.pop(rng.randrange(len(model))))
        check(index)
        for prefix in (b"%d" % phase, b"1", b"1/", b"1/a", b""):
            expected = starting(model, prefix)
            assert index.keys(prefix) == expected and index.count(prefix) == len(expected)
            assert index.first(prefix, 37) == expected[:37]


def test_deleting_all_but_one_key_in_a_hundred_leaves_few_buckets() -> None:
    keys = [b"%05d" % number for number in range(20_000)]
    index = KeyIndex(keys, bucket_size=200, batch_size=200)
    assert len(index.buckets) == 200
    kept = keys[::100]
    for key in keys:
        if key not in kept:
            index.discard(key)
    check(index)
    assert index.keys(b"") == kept and len(index.buckets) <= 1 + 2 * len(kept) // (200 // 4)
    for key in kept:
        index.discard(key)
    assert index.buckets == [[]] and index.bounds == [b""] and index.keys(b"") == []


def test_a_prefix_deleted_in_slices_leaves_the_other_keys() -> None:
    index = KeyIndex([b"%d/%d" % (number % 5, number) for number in range(5000)], bucket_size=100, batch_size=100)
    slices = 0
    while found := index.first(b"3/", 64):
        slices += 1
        for key in found:
            index.discard(key)
        check(index)
    assert slices == 16 and len(index) == 4000 and index.count(b"2/") == index.count(b"4/") == 1000


def filled(steps: int) -> tuple[KeyIndex, list[int]]:
    """Add one key per step to each of 64 buckets of 32; return the index, and how many buckets each step added."""
    keys = [b"%04d" % number for number in range(64 * 32)]
    index = KeyIndex(keys, bucket_size=64, batch_size=64)
    growth = []
    for step in range(steps):
        before = len(index.buckets)
        for key in keys[::32]:
            index.add(b"%s/%d" % (key, step))
        assert not index.pending
        growth.append(len(index.buckets) - before)
    return index, growth


def test_a_merge_splits_few_buckets_and_later_merges_split_the_rest() -> None:
    index, growth = filled(45)
    assert growth == [0] * 32 + [MAX_SPLITS] * 8 + [0] * 5
    assert max(map(len, index.buckets)) <= 64
    check(index)


@pytest.mark.parametrize("steps", [32, 33])
def test_a_shrinking_bucket_between_full_ones_stays_apart_until_it_is_empty(steps: int) -> None:
    index, _ = filled(steps)
    others = index.buckets[:40] + index.buckets[41:]
    assert {len(bucket) for bucket in others[39:]} == {32 + steps}  # at 33 steps these are yet to be split
    for key in list(index.buckets[40]):
        assert len(index.buckets) == len(others) + 1
        index.discard(key)
    assert index.buckets == others
    check(index)


def test_many_keys_are_merged_at_once_into_buckets_of_the_usual_size() -> None:
    index = KeyIndex([b"%06d" % number for number in range(0, 3000, 3)])
    index.add_all([b"%06d" % number for number in range(100_000) if number % 3 or number >= 3000])
    assert not index.pending and max(map(len, index.buckets)) <= index.bucket_size
    assert index.keys(b"") == [b"%06d" % number for number in range(100_000)]
    check(index)


def test_a_long_key_is_merged_at_once() -> None:
    index = KeyIndex()
    index.add(b"k" * LONG_KEY_BYTES)
    assert len(index.pending) == 1
    index.add(b"k" * (LONG_KEY_BYTES + 1))
    assert not index.pending and len(index) == 2


def test_a_deleted_key_that_is_still_a_bound_returns_to_its_bucket() -> None:
    index = KeyIndex([b"a", b"b", b"c", b"d"], bucket_size=4, batch_size=4)
    assert index.bounds == [b"", b"c"]
    index.discard(b"c")
    assert index.bounds == [b"", b"c"]
    index.add(b"bb")
    index.add(b"c")
    assert index.keys(b"") == [b"a", b"b", b"bb", b"c", b"d"] and index.keys(b"c") == [b"c"]
    check(index)


@pytest.mark.parametrize(("bucket_size", "batch_size"), [(8, 0), (8, 9), (0, 0)])
def test_a_batch_larger_than_a_bucket_is_refused(bucket_size: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="batch_size must be between 1 and bucket_size"):
        KeyIndex(bucket_size=bucket_size, batch_size=batch_size)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must not be negative: -1"):
        KeyIndex([b"a", b"b"]).first(b"", -1)


class Counted(bytes):
    """A key that counts comparisons."""

    comparisons = 0

    def __lt__(self, other: bytes) -> bool:
        Counted.comparisons += 1
        return bytes(self) < bytes(other)

    def __gt__(self, other: bytes) -> bool:
        Counted.comparisons += 1
        return bytes(self) > bytes(other)


def test_calls_on_many_keys_compare_few_of_them() -> None:
    index = KeyIndex(Counted(b"%04d/%d" % (number // 8, number)) for number in range(32_000))
    search = 2 * 17  # two bisections, of the bounds and of a bucket, take at most 17 comparisons for 32,000 keys

    def cost(call: str, *args: object) -> int:
        before = Counted.comparisons
        getattr(index, call)(*args)
        return Counted.comparisons - before

    assert cost("add", Counted(b"2000/x")) == 0
    assert cost("discard", Counted(b"2000/x")) == 0
    assert cost("discard", Counted(b"3000/24001")) <= search
    for prefix in (b"", b"0000/", b"1", b"2000/", b"3999/", b"\xff"):
        assert max(cost("count", prefix), cost("keys", prefix), cost("first", prefix, 3)) <= 2 * search
        index.add(Counted(prefix + b"new"))
        assert cost("keys", prefix) <= 3 * search  # the search for the new key's place comes first


def test_the_first_keys_of_many_are_copied_alone() -> None:
    index = KeyIndex(b"%05d" % number for number in range(32_000))
    tracemalloc.start()
    try:
        assert index.first(b"", 600)[-1] == b"00599"  # more than one bucket of 512
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32_000  # all keys would be 256,000 bytes


def test_a_repeated_count_visits_no_bucket_again() -> None:
    class Bucket(list[bytes]):
        measured = 0

        def __len__(self) -> int:
            Bucket.measured += 1
            return super().__len__()

    index = KeyIndex((b"k%05d" % number for number in range(1000)), bucket_size=8, batch_size=4)
    index.buckets = [Bucket(bucket) for bucket in index.buckets]
    assert index.count(b"k") == 1000
    Bucket.measured = 0
    assert index.count(b"k") == 1000 and index.count(b"k009") == 100
    assert Bucket.measured < 50, "a search looks at a few buckets, a count of all would look at 250"


def test_counts_follow_changes_in_between() -> None:
    chance = random.Random(1)
    index, model = KeyIndex(bucket_size=8, batch_size=2), set[bytes]()
    for _ in range(4000):
        key = b"%03d" % chance.randrange(600)
        if key in model:
            model.remove(key)
            index.discard(key)
        else:
            model.add(key)
            index.add(key)
        prefix = b"%d" % chance.randrange(6)
        assert index.count(prefix) == sum(one.startswith(prefix) for one in model)
