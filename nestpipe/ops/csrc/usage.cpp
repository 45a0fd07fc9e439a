// Which ids to evict, in time that depends on the ids of a batch and not on the size of the table.
//
// Every bucket has a chain of lists by ascending key, and every list its rows by ascending (last step, id):
//
//     bucket ─ list of key 1 ─ list of key 2 ─ list of key 5          key: the frequency for LFU, 0 for LRU (one list)
//                 │ row           │ row           │ row   <- head: evicted first
//                 │ row                           │ row   <- tail: appended
//
// A batch is touched, admitted and appended, each in ascending order of ids in a bucket. So appending keeps a list sorted,
// because all other rows of the list are of earlier batches. Between `touch` and `append` the rows of the batch are in no
// list, which is why they are not evicted.
//
// A list that has no rows is removed, but not while a row on its way to the next list still refers to it.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <vector>

#include "hash.h"
#include "index.h"

namespace {

using nestpipe::Array;
using nestpipe::guarded;
using nestpipe::Index;
using nestpipe::kWindow;

constexpr int32_t kNone = -1;
constexpr int32_t kDetached = -2;  // as `previous`: the row is in no list
constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
constexpr uint64_t kMinRows = 16;

struct Row {
  int64_t id;
  int32_t last_step, frequency;
  int32_t previous, next;
  int32_t bucket;
  int32_t list;  // its own, or while detached the one that it was in
};
static_assert(sizeof(Row) == 32, "a row must not lie in two cache lines");

struct List {
  int32_t key;
  int32_t head, tail;
  int32_t previous, next;  // lists of the bucket; `next` also chains unused lists
  int32_t num_rows;        // with the detached rows that refer to it
};

struct Bucket {
  int32_t first = kNone, last = kNone;
  int32_t cursor = kNone;  // lists before it have no row that may be evicted; valid during one call
  int64_t num_rows = 0;
};

struct Evicted {
  int64_t id, slot;
};

class Usage {
 public:
  Usage(Index* index, int64_t num_buckets, bool by_frequency)
      : index_(*index), by_frequency_(by_frequency), buckets_(num_buckets) {}

  // Finds the slots of a batch, -1 for unknown ids; counts the known ones and detaches them.
  void touch(const int64_t* ids, int64_t n, int32_t step, int64_t* slots) {
    index_.find(ids, n, slots);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n && slots[i + kWindow] >= 0) __builtin_prefetch(&rows_[slots[i + kWindow]], 1);
      if (i + kWindow / 2 < n && slots[i + kWindow / 2] >= 0) prefetch_neighbours(rows_[slots[i + kWindow / 2]]);
      if (slots[i] < 0) continue;
      Row& row = rows_[slots[i]];
      detach(row);
      row.last_step = step;
      row.frequency += row.frequency < kMost;
    }
  }

  // Adds unknown ids, detached, and writes their slots; with limits per bucket, -1 where nothing may be evicted for an id.
  void admit(const int64_t* ids, const int64_t* frequency, int64_t n, int32_t step, int64_t before, const int64_t* limits,
             int64_t* slots) {
    evicted_.clear();
    index_.reserve(index_.size() + n);
    reserve(index_.num_slots() + n);
    for (int64_t i = 0; i < n; ++i) slots[i] = bucket_of(ids[i]);
    for (int64_t i = 0; i < n; ++i) {
      Bucket& bucket = buckets_[slots[i]];
      bucket.cursor = bucket.first;
    }
    for (int64_t i = 0; i < n; ++i) {
      prefetch_victims(ids, slots, n, i);
      const int32_t number = static_cast<int32_t>(slots[i]);
      if (limits != nullptr && !make_room(buckets_[number], limits[number] - 1, before)) {
        slots[i] = kNone;
        continue;
      }
      ++buckets_[number].num_rows;
      slots[i] = index_.add(ids[i]);
      rows_[slots[i]] = {ids[i], step, static_cast<int32_t>(frequency[i]), kDetached, kNone, number, kNone};
    }
  }

  // Appends detached rows to their lists; slots of -1 and rows in a list are skipped.
  void append(const int64_t* slots, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] >= 0 && rows_[slots[i]].previous == kDetached) append(static_cast<int32_t>(slots[i]));
    }
  }

  // Removes known ids. Returns n, or the place of the first unknown id; those before it are gone.
  int64_t remove(const int64_t* ids, int64_t n) {
    std::vector<int64_t> slots(n);
    index_.find(ids, n, slots.data());
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] < 0) return i;
      remove_row(slots[i]);
    }
    return n;
  }

  // Evicts the first rows of the buckets of these ids, down to the limit of each.
  void trim(const int64_t* ids, int64_t n, const int64_t* limits) {
    evicted_.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t number = bucket_of(ids[i]);
      buckets_[number].cursor = buckets_[number].first;
      make_room(buckets_[number], limits[number], std::numeric_limits<int64_t>::max());
    }
  }

  const std::vector<Evicted>& evicted() const { return evicted_; }

  void state(const int64_t* slots, int64_t n, int64_t* last_step, int64_t* frequency) const {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n) __builtin_prefetch(&rows_[slots[i + kWindow]]);
      last_step[i] = rows_[slots[i]].last_step;
      frequency[i] = rows_[slots[i]].frequency;
    }
  }

  // Replaces all rows; the i-th has slot i in the index already. `order` sorts them by (key, last step, id) in each bucket.
  void load(const int64_t* ids, const int64_t* last_step, const int64_t* frequency, const int64_t* order, int64_t n) {
    std::fill(buckets_.begin(), buckets_.end(), Bucket());
    lists_.clear();
    unused_ = kNone;
    reserve(n);
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bucket = static_cast<int32_t>(bucket_of(ids[i]));
      rows_[i] = {ids[i], static_cast<int32_t>(last_step[i]), static_cast<int32_t>(frequency[i]), kDetached, kNone, bucket, kNone};
      ++buckets_[bucket].num_rows;
    }
    for (int64_t i = 0; i < n; ++i) append(static_cast<int32_t>(order[i]), buckets_[rows_[order[i]].bucket].last);
  }

 private:
  int64_t bucket_of(int64_t id) const { return nestpipe::bucket_of(id, static_cast<int64_t>(buckets_.size())); }

  void reserve(int64_t num_rows) {
    if (num_rows > kMost) throw std::bad_alloc();  // a slot would not fit into 32 bits
    if (static_cast<uint64_t>(num_rows) <= capacity_) return;
    uint64_t capacity = std::max(capacity_, kMinRows);
    while (capacity < static_cast<uint64_t>(num_rows)) capacity *= 2;
    Array<Row> larger = nestpipe::new_array(capacity, Row{});
    std::copy_n(rows_.get(), capacity_, larger.get());
    rows_ = std::move(larger);
    capacity_ = capacity;
  }

  void prefetch_neighbours(const Row& row) const {
    if (row.previous >= 0) __builtin_prefetch(&rows_[row.previous], 1);
    if (row.next >= 0) __builtin_prefetch(&rows_[row.next], 1);
  }

  // Ahead of the i-th candidate: the first row of its bucket, then that row's neighbours and entry in the index.
  void prefetch_victims(const int64_t* ids, const int64_t* numbers, int64_t n, int64_t i) const {
    if (i + kWindow < n) {
      index_.prefetch(ids[i + kWindow]);
      if (const int32_t head = head_of(numbers[i + kWindow]); head != kNone) __builtin_prefetch(&rows_[head], 1);
    }
    if (i + kWindow / 2 < n) {
      if (const int32_t head = head_of(numbers[i + kWindow / 2]); head != kNone) {
        index_.prefetch(rows_[head].id);
        prefetch_neighbours(rows_[head]);
      }
    }
  }

  int32_t head_of(int64_t number) const {
    const int32_t list = buckets_[number].cursor;
    return list == kNone ? kNone : lists_[list].head;
  }

  // Evicts rows last used before a step until the bucket has at most `most` rows; returns whether that was possible.
  bool make_room(Bucket& bucket, int64_t most, int64_t before) {
    while (bucket.num_rows > most) {
      while (bucket.cursor != kNone) {
        const int32_t head = lists_[bucket.cursor].head;
        if (head != kNone && rows_[head].last_step < before) break;
        bucket.cursor = lists_[bucket.cursor].next;
      }
      if (bucket.cursor == kNone) return false;
      const List& list = lists_[bucket.cursor];
      const int32_t slot = list.head;
      if (list.num_rows == 1) bucket.cursor = list.next;  // the list goes with its last row
      evicted_.push_back({rows_[slot].id, slot});
      remove_row(slot);
    }
    return true;
  }

  void remove_row(int64_t slot) {
    Row& row = rows_[slot];
    detach(row);
    --buckets_[row.bucket].num_rows;
    leave(row);
    index_.remove(row.id);
  }

  void detach(Row& row) {
    if (row.previous == kDetached) return;
    List& list = lists_[row.list];
    (row.previous == kNone ? list.head : rows_[row.previous].next) = row.next;
    (row.next == kNone ? list.tail : rows_[row.next].previous) = row.previous;
    row.previous = kDetached;
  }

  void append(int32_t slot, int32_t from = kNone) {
    Row& row = rows_[slot];
    const int32_t number = list_of(row, row.list == kNone ? from : row.list);
    if (number != row.list) {
      leave(row);
      row.list = number;
      ++lists_[number].num_rows;
    }
    List& list = lists_[number];
    row.previous = list.tail;
    row.next = kNone;
    (list.tail == kNone ? list.head : rows_[list.tail].next) = slot;
    list.tail = slot;
  }

  // The list of the row's key, made if it is missing. `from` is a list of its bucket whose key is not larger, or kNone.
  int32_t list_of(const Row& row, int32_t from) {
    const int32_t key = by_frequency_ ? row.frequency : 0;
    int32_t before = from == kNone ? kNone : lists_[from].previous;
    int32_t next = from == kNone ? buckets_[row.bucket].first : from;
    for (; next != kNone && lists_[next].key < key; next = lists_[next].next) before = next;
    return next != kNone && lists_[next].key == key ? next : insert_list(buckets_[row.bucket], key, before, next);
  }

  int32_t insert_list(Bucket& bucket, int32_t key, int32_t before, int32_t next) {
    int32_t number = unused_;
    if (number == kNone) {
      number = static_cast<int32_t>(lists_.size());
      lists_.emplace_back();
    } else {
      unused_ = lists_[number].next;
    }
    lists_[number] = {key, kNone, kNone, before, next, 0};
    (before == kNone ? bucket.first : lists_[before].next) = number;
    (next == kNone ? bucket.last : lists_[next].previous) = number;
    return number;
  }

  // A detached row gives up its list, which is removed with its last row.
  void leave(Row& row) {
    if (row.list == kNone) return;
    List& list = lists_[row.list];
    if (--list.num_rows == 0) {
      Bucket& bucket = buckets_[row.bucket];
      (list.previous == kNone ? bucket.first : lists_[list.previous].next) = list.next;
      (list.next == kNone ? bucket.last : lists_[list.next].previous) = list.previous;
      list.next = unused_;
      unused_ = row.list;
    }
    row.list = kNone;
  }

  Index& index_;
  const bool by_frequency_;
  std::vector<Bucket> buckets_;
  std::vector<List> lists_;
  int32_t unused_ = kNone;  // the first list that can be used again
  Array<Row> rows_;         // by slot
  uint64_t capacity_ = 0;
  std::vector<Evicted> evicted_;
};

Usage& of(void* usage) { return *static_cast<Usage*>(usage); }

}  // namespace

extern "C" {

void* nestpipe_usage_create(void* index, int64_t num_buckets, int64_t by_frequency) {
  try {
    return new Usage(static_cast<Index*>(index), num_buckets, by_frequency != 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void nestpipe_usage_destroy(void* usage) { delete static_cast<Usage*>(usage); }

void nestpipe_usage_touch(void* usage, const int64_t* ids, int64_t n, int64_t step, int64_t* slots) {
  of(usage).touch(ids, n, static_cast<int32_t>(step), slots);
}

// Returns the number of evicted ids; `limits` may be null.
int64_t nestpipe_usage_admit(void* usage, const int64_t* ids, const int64_t* frequency, int64_t n, int64_t step,
                             int64_t before, const int64_t* limits, int64_t* slots) {
  return guarded([&] {
    of(usage).admit(ids, frequency, n, static_cast<int32_t>(step), before, limits, slots);
    return static_cast<int64_t>(of(usage).evicted().size());
  });
}

int64_t nestpipe_usage_append(void* usage, const int64_t* slots, int64_t n) {
  return guarded([&] {
    of(usage).append(slots, n);
    return n;
  });
}

int64_t nestpipe_usage_remove(void* usage, const int64_t* ids, int64_t n) {
  return guarded([&] { return of(usage).remove(ids, n); });
}

int64_t nestpipe_usage_trim(void* usage, const int64_t* ids, int64_t n, const int64_t* limits) {
  return guarded([&] {
    of(usage).trim(ids, n, limits);
    return static_cast<int64_t>(of(usage).evicted().size());
  });
}

// What the last `admit` or `trim` evicted, in order.
void nestpipe_usage_evicted(const void* usage, int64_t* ids, int64_t* slots) {
  for (const Evicted& one : static_cast<const Usage*>(usage)->evicted()) {
    *ids++ = one.id;
    *slots++ = one.slot;
  }
}

void nestpipe_usage_state(const void* usage, const int64_t* slots, int64_t n, int64_t* last_step, int64_t* frequency) {
  static_cast<const Usage*>(usage)->state(slots, n, last_step, frequency);
}

int64_t nestpipe_usage_load(void* usage, const int64_t* ids, const int64_t* last_step, const int64_t* frequency,
                            const int64_t* order, int64_t n) {
  return guarded([&] {
    of(usage).load(ids, last_step, frequency, order, n);
    return n;
  });
}

}  // extern "C"
