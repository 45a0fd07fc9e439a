// The functions of the id index (index.h) for Python.

#include <cstdint>
#include <new>

#include "index.h"
#include "share.h"

namespace {

using nestpipe::guarded;
using nestpipe::Index;

constexpr int64_t kMinShare = 1 << 14;  // fewer ids (about 0.3 ms) are not worth a thread

}  // namespace

extern "C" {

void* nestpipe_index_create() {
  try {
    return new Index();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void nestpipe_index_destroy(void* index) { delete static_cast<Index*>(index); }

int64_t nestpipe_index_size(const void* index) { return static_cast<const Index*>(index)->size(); }

int64_t nestpipe_index_num_slots(const void* index) { return static_cast<const Index*>(index)->num_slots(); }

void nestpipe_index_find(const void* index, const int64_t* ids, int64_t n, int64_t* slots, int64_t num_threads) {
  const Index& self = *static_cast<const Index*>(index);
  nestpipe::share(n, num_threads, kMinShare, [&self, ids, slots](int64_t begin, int64_t end) {
    self.find(ids + begin, end - begin, slots + begin);
  });
}

int64_t nestpipe_index_find_or_add(void* index, const int64_t* ids, int64_t n, int64_t* slots, int64_t* added) {
  return guarded([&] { return static_cast<Index*>(index)->find_or_add(ids, n, slots, added); });
}

int64_t nestpipe_index_remove(void* index, const int64_t* ids, int64_t n, int64_t* slots) {
  return guarded([&] { return static_cast<Index*>(index)->remove(ids, n, slots); });
}

void nestpipe_index_export(const void* index, int64_t* ids, int64_t* slots) {
  static_cast<const Index*>(index)->content(ids, slots);
}

int64_t nestpipe_index_load(void* index, const int64_t* ids, const int64_t* slots, int64_t n, const int64_t* free,
                            int64_t num_free) {
  return guarded([&] {
    static_cast<Index*>(index)->load(ids, slots, n, free, num_free);
    return n;
  });
}

int64_t nestpipe_index_reserve(void* index, int64_t num_ids) {
  return guarded([&] {
    static_cast<Index*>(index)->reserve(num_ids);
    return num_ids;
  });
}

int64_t nestpipe_index_clear(void* index) {
  return guarded([&] {
    *static_cast<Index*>(index) = Index();
    return int64_t{0};
  });
}

}  // extern "C"
