// Id -> slot: a hash index for any int64 id, with batch operations.
//
// Open addressing: entries of 16 bytes in one array (a power of two, at most 5/8 full), linear probing from the hashed
// position. An empty entry is marked by its slot, so every int64 is a legal id. Removal shifts later entries back instead
// of leaving tombstones, so lookups stay fast after removals.
//
// Lookups are bound by memory latency, so every loop prefetches the entry of the id kWindow ahead.
//
// Invariant: live ids + free slots == num_slots. No function throws: one that can run out of memory returns kFailed.
// Lookups may run concurrently with each other, but not with changes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "hash.h"

namespace nestpipe {

constexpr int64_t kEmpty = -1;
constexpr int64_t kFailed = -1;
constexpr int64_t kWindow = 24;  // more than the cache misses a core keeps in flight
constexpr uint64_t kMinCapacity = 16;
constexpr uint64_t kHugePage = 1 << 21;

struct Entry {
  int64_t id;
  int64_t slot;
};

struct Release {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename Item>
using Array = std::unique_ptr<Item[], Release>;

// `capacity` copies of an item of 2^k bytes, for a power of two. Large arrays use huge pages, otherwise TLB misses take
// half of the time.
template <typename Item>
Array<Item> new_array(uint64_t capacity, Item filling) {
  const uint64_t bytes = capacity * sizeof(Item);
  void* memory = std::aligned_alloc(std::min(bytes, kHugePage), bytes);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef __linux__
  if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // only advice: may be refused
#endif
  Item* items = static_cast<Item*>(memory);
  std::fill_n(items, capacity, filling);
  return Array<Item>(items);
}

inline constexpr uint64_t limit_of(uint64_t capacity) { return capacity / 8 * 5; }

inline uint64_t capacity_for(uint64_t num_ids) {
  if (num_ids >> 58) throw std::bad_alloc();  // the number of bytes would not fit
  uint64_t capacity = kMinCapacity;
  while (num_ids > limit_of(capacity)) capacity *= 2;
  return capacity;
}

class Index {
 public:
  Index() : entries_(new_array(kMinCapacity, Entry{0, kEmpty})), mask_(kMinCapacity - 1) {}

  int64_t size() const { return size_; }
  int64_t num_slots() const { return num_slots_; }

  void find(const int64_t* ids, int64_t n, int64_t* slots) const {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n) __builtin_prefetch(&entries_[home(ids[i + kWindow])]);
      slots[i] = entries_[probe(ids[i])].slot;
    }
  }

  // Writes where new ids appear first to `added` and returns their number.
  int64_t find_or_add(const int64_t* ids, int64_t n, int64_t* slots, int64_t* added) {
    int64_t num_added = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n) __builtin_prefetch(&entries_[home(ids[i + kWindow])], 1);
      uint64_t place = probe(ids[i]);
      if (entries_[place].slot == kEmpty) {
        if (static_cast<uint64_t>(size_) == limit_of(mask_ + 1)) {
          reserve(size_ + 1);
          place = probe(ids[i]);
        }
        entries_[place] = {ids[i], take_slot()};
        ++size_;
        added[num_added++] = i;
      }
      slots[i] = entries_[place].slot;
    }
    return num_added;
  }

  // Returns n, or the place of the first unknown or repeated id; then nothing has changed.
  int64_t remove(const int64_t* ids, int64_t n, int64_t* slots) {
    if (free_.capacity() < free_.size() + n) free_.reserve(std::max(2 * free_.capacity(), free_.size() + n));
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n) __builtin_prefetch(&entries_[home(ids[i + kWindow])], 1);
      const uint64_t place = probe(ids[i]);
      slots[i] = entries_[place].slot;
      if (slots[i] == kEmpty) {
        free_.resize(free_.size() - i);
        for (int64_t k = 0; k < i; ++k) insert(ids[k], slots[k]);
        return i;
      }
      erase(place);
      free_.push_back(slots[i]);
    }
    return n;
  }

  void prefetch(int64_t id) const { __builtin_prefetch(&entries_[home(id)], 1); }

  // The slot of an unknown id. There must be memory for it (`reserve`).
  int64_t add(int64_t id) {
    const int64_t slot = take_slot();
    insert(id, slot);
    return slot;
  }

  // Frees the slot of a known id.
  void remove(int64_t id) {
    const uint64_t place = probe(id);
    free_.push_back(entries_[place].slot);
    erase(place);
  }

  void content(int64_t* ids, int64_t* slots) const {
    int64_t k = 0;
    for (uint64_t place = 0; place <= mask_; ++place) {
      if (entries_[place].slot == kEmpty) continue;
      ids[k] = entries_[place].id;
      slots[k++] = entries_[place].slot;
    }
  }

  // Distinct ids and slots; the free slots are taken from the end.
  void load(const int64_t* ids, const int64_t* slots, int64_t n, const int64_t* free, int64_t num_free) {
    Index fresh;
    fresh.reserve(n);
    fresh.free_.assign(free, free + num_free);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kWindow < n) __builtin_prefetch(&fresh.entries_[fresh.home(ids[i + kWindow])], 1);
      fresh.insert(ids[i], slots[i]);
    }
    fresh.num_slots_ = n + num_free;
    *this = std::move(fresh);
  }

  // Grows the array for `num_ids` ids in total.
  void reserve(int64_t num_ids) {
    const uint64_t capacity = capacity_for(num_ids);
    if (capacity <= mask_ + 1) return;
    Array<Entry> old = std::exchange(entries_, new_array(capacity, Entry{0, kEmpty}));
    const uint64_t old_capacity = std::exchange(mask_, capacity - 1) + 1;
    // The position is the low bits of the hash, so neighbours stay neighbours and this loop runs at memory bandwidth.
    for (uint64_t place = 0; place < old_capacity; ++place) {
      if (old[place].slot != kEmpty) entries_[probe(old[place].id)] = old[place];
    }
  }

 private:
  // Salted, because the ids of one rank are those whose plain hash falls into its buckets.
  uint64_t home(int64_t id) const { return nestpipe::mix64(static_cast<uint64_t>(id) ^ 0x6E65737470697065u) & mask_; }

  // The place of the id, or the empty one where it belongs.
  uint64_t probe(int64_t id) const {
    uint64_t place = home(id);
    while (entries_[place].id != id && entries_[place].slot != kEmpty) place = (place + 1) & mask_;
    return place;
  }

  void insert(int64_t id, int64_t slot) {
    entries_[probe(id)] = {id, slot};
    ++size_;
  }

  void erase(uint64_t hole) {
    for (uint64_t place = (hole + 1) & mask_; entries_[place].slot != kEmpty; place = (place + 1) & mask_) {
      // The entry may move into the hole if its hashed position is not after the hole.
      if (((place - home(entries_[place].id)) & mask_) < ((place - hole) & mask_)) continue;
      entries_[hole] = entries_[place];
      hole = place;
    }
    entries_[hole] = {0, kEmpty};
    --size_;
  }

  int64_t take_slot() {
    if (free_.empty()) return num_slots_++;
    const int64_t slot = free_.back();
    free_.pop_back();
    return slot;
  }

  Array<Entry> entries_;
  uint64_t mask_;
  int64_t size_ = 0;
  int64_t num_slots_ = 0;
  std::vector<int64_t> free_;  // the most recently freed slot is the last
};

// Runs `work`, which returns a count; kFailed if it throws for lack of memory.
template <typename Work>
int64_t guarded(const Work& work) {
  try {
    return work();
  } catch (const std::exception&) {  // std::bad_alloc, or std::length_error for absurd sizes
    return kFailed;
  }
}

}  // namespace nestpipe
